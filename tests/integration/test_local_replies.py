"""Answers that no worker gave, Envoy's own and the picker's, in the form of the API: on a real
Envoy with a generated bootstrap.
"""

import json
from typing import Any

import anthropic
import openai
import pytest

from fleet.envoy.settings import Limits
from tests.support.picker.bench_picker import picked
from tests.support.picker.http_exchange import Ask, exchange

pytestmark = pytest.mark.envoy
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
