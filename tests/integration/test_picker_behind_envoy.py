"""This project's picker behind a generated bootstrap on a real Envoy: request bodies, WebSockets,
and answers that no worker gave.
"""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from base.response_bodies import ResponseBodies
from fleet.envoy.settings import Limits, Mechanism, SocketAddress
from tests.support.picker.bench_picker import picked
from tests.support.picker.http_exchange import Ask, exchange
from tests.support.picker.websocket import ECHOED, echoing, over_http1, over_http2
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
MECHANISMS = pytest.mark.parametrize("mechanism", list(Mechanism), ids=lambda m: m.value)
CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LIMITS = Limits(request_timeout_seconds=1.0)
TOO_LARGE = LIMITS.request_buffer_bytes + 1
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
# Envoy closes the connection of a request that it cannot read before a picker has seen the answer.
UNREADABLE = [
    (
        Ask("/v1/models", method="GET", headers=[(f"x-{n}", "1") for n in range(120)]),
        *(431, "Request Header Fields Too Large", "The proxy cannot take this HTTP request: "),
    ),
    (
        Ask("/v1/models", method="GET", headers=[("a_b", "1")]),
        *(400, "BadRequestError", "No header may have an underscore in its name: "),
    ),
]
LATE = Ask("/v1/completions", [b"{"], length=False, has_end=False)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_envoys_own_errors_are_the_apis(bench) -> None:
    async with picked(bench, limits=LIMITS) as (b, picker):
        picker.pick(b.workers[0].port)
        large, late = "The request body is too large: ", "The request did not arrive in time: "
        answer = await b.post("/a/v1/messages?beta=true", size=TOO_LARGE)
        said = json.loads(answer["text"])
        assert said["error"].pop("message").startswith(large)
        assert said == {"type": "error", "error": {"type": "request_too_large"}}
        answer = await exchange(port_of(b.url), Ask("/v1%2Fmodels", method="GET"))
        assert (answer.status, answer.body) == (307, b"")
        await is_error(b, LATE, 408, "Request Timeout", late)
        assert b.workers[0].requests == []
        await picker.server.stop(0)
        await b.until_healthy("picker", 0)
        for ask, status, kind, begins in UNREADABLE:
            await is_error(b, ask, status, kind, begins)


async def is_error(b, ask: Ask, status: int, kind: str, begins: str) -> None:
    answer = await exchange(port_of(b.url), ask)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert answer.headers["x-pointsman-local-reply"] == "envoy"
    error = json.loads(answer.body)["error"]
    assert error.pop("message").startswith(begins)
    assert error == {"type": kind, "param": None, "code": status}


async def test_clients_read_the_errors_of_picker_and_envoy(bench) -> None:
    """The picker's come through Envoy as they are: for a pool without endpoints, and then for one
    whose worker is not there, which is Envoy's to say. A gRPC status message stays text.
    """
    async with picked(bench) as (b, picker):
        gpt = openai.AsyncOpenAI(base_url=f"{b.url}/v1", api_key="x", max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=b.url, api_key="x", max_retries=0)
        for message in ("No endpoint is available", "No worker can take the request: "):
            with pytest.raises(openai.InternalServerError) as failed:
                await gpt.chat.completions.create(**CHAT)
            error: Any = failed.value
            assert error.body["message"].startswith(message), error.body
            assert (error.code, error.type, error.param) == ("503", "Service Unavailable", None)
            is_envoys = "x-pointsman-local-reply" in error.response.headers
            assert is_envoys is message.startswith("No worker")
            with pytest.raises(anthropic.APIStatusError) as broken:
                await claude.messages.create(**CHAT, max_tokens=1)
            said: Any = broken.value.body
            assert said["error"]["type"] == "overloaded_error"
            assert said["error"]["message"].startswith(message)
            answer = await exchange(
                port_of(b.url), Ask("/p.S/M", [b"\0\0\0\0\0"], headers=GRPC), http2=True
            )
            assert answer.headers["grpc-message"].startswith(("No endpoint", "no healthy"))
            for worker in b.workers:
                await worker.stop()
            await b.until_healthy("pool", 0)
            picker.pick(b.workers[0].port)
        await gpt.close()
        await claude.close()


@MECHANISMS
async def test_the_picked_endpoint_serves_bodies_up_to_the_limit(bench, mechanism) -> None:
    async with picked(bench, mechanism) as (b, picker):
        for worker in b.workers:
            picker.pick(worker.port)
            for size in (1, 100_000, 3_000_000, 4 * 1024 * 1024):
                answer = await b.post(size=size)
                assert (answer["worker"], answer["size"]) == (worker.name, size)
        assert (await b.post(size=4 * 1024 * 1024 + 1))["status"] == 413
        await until(lambda: picker.inflight.total == 0, what="all is released")


async def test_a_request_counts_until_its_last_token(bench) -> None:
    async with picked(bench) as (b, picker):
        picker.pick(b.workers[0].port)
        async with b.client.post(f"{b.url}/stream", data=b"x") as response:
            assert await response.content.readline() == b"data: first\n"
            await b.post()
            await until(lambda: picker.inflight.total == 1, what="the short one is released")
            b.workers[0].go_on.set()
            await response.content.read()
            await until(lambda: picker.inflight.total == 0, what="the stream is released")


@pytest.mark.parametrize("buffered", [True, False])
async def test_a_websocket_reaches_its_worker(bench, buffered: bool) -> None:
    async with echoing() as first, echoing() as second, asyncio.timeout(60):
        endpoints = tuple(SocketAddress("127.0.0.1", port) for port in (first, second))
        changes = {
            "endpoints": endpoints,
            "buffer_request_body": buffered,
            "response_bodies": ResponseBodies.USAGE,  # whose filter leaves it alone
        }
        async with picked(bench, **changes) as (b, picker):
            picker.pick(second)
            for talk in (over_http1, over_http2):
                assert await talk(port_of(b.url)) == ECHOED
            await until(lambda: picker.inflight.total == 0, what="all is released")
