"""`--pd-proxy`: the prefill leg in the decode worker itself, as the sidecar runs it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.support.waiting import pass_time
from tests.support.web_server import Server
from worker.types import KvSource

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STORED = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 9,
}
SOURCE = KvSource("10.0.0.1", 5600, "e", "r", 9)
ASKED = {"prompt": "abc", "max_tokens": 7}


async def keeps(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": STORED})


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({}, status=503)


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def prefiller() -> AsyncIterator[Server]:
    async with Server(keeps).serving() as server:
        yield server


def api(bench: Any, **settings: object) -> Any:
    return bench.api(kv_role="kv_consumer", pd_proxy=True, **settings)


async def test_the_prefill_leg_is_that_of_the_sidecar(bench: Any, prefiller: Server) -> None:
    headers = {"x-prefiller-host-port": prefiller.address, "authorization": "Bearer ü".encode()}
    async with bench.client_of(api(bench)) as client:
        body = {**ASKED, "min_tokens": 2, "stream": True, "unheard_of": 1}
        answer = await client.post(TEXT, json=body, headers=headers)
    assert answer.status_code == 200
    ((method, path, sent, leg),) = prefiller.asked
    assert (method, path) == ("POST", TEXT)
    assert "x-prefiller-host-port" not in sent
    assert sent["authorization"] == "Bearer ü"
    assert sent["x-request-id"]
    asked = {"stream": False, "max_tokens": 1, "min_tokens": 1}
    params = json.loads(leg).pop("kv_transfer_params")
    assert params["do_remote_decode"] is True
    assert json.loads(leg) == {**body, **asked, "kv_transfer_params": params}
    (request,) = bench.engine.requests
    assert (request.kv_source, request.params.max_tokens) == (SOURCE, 7)


@pytest.mark.parametrize("behave", [refuses, hangs])
async def test_without_a_prefill_the_prompt_is_run_here(
    bench: Any, prefiller: Server, behave: Any
) -> None:
    prefiller.behave = behave
    headers = {"x-prefiller-host-port": prefiller.address}
    async with bench.client_of(api(bench, prefill_timeout_seconds=600.0)) as client:
        asking = asyncio.create_task(client.post(TEXT, json=ASKED, headers=headers))
        await prefiller.arrived.wait()
        if behave is hangs:
            pass_time(asyncio.get_running_loop())
        assert (await asking).status_code == 200
    assert len(prefiller.asked) == 1
    assert bench.engine.requests[0].kv_source is None


async def test_only_allowed_prefillers_are_asked(bench: Any, prefiller: Server) -> None:
    async with bench.client_of(api(bench)) as client:
        headers = {"x-prefiller-host-port": "8.8.8.8:80"}
        answer = await client.post(TEXT, json=ASKED, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "Forbidden")
    async with bench.client_of(api(bench, prefiller_networks=("10.0.0.0/8",))) as client:
        headers = {"x-prefiller-host-port": prefiller.address}
        assert (await client.post(TEXT, json=ASKED, headers=headers)).status_code == 403
    assert prefiller.asked == []
    assert bench.engine.requests == []


async def test_a_client_cannot_name_a_source_of_kv(bench: Any) -> None:
    async with bench.client_of(api(bench)) as client:
        body = json.dumps({**ASKED, "kv_transfer_params": STORED, "x": 7})
        # 1e999 is more than a number can be.
        for path, number in ((TEXT, "7"), (TEXT, "1e999"), ("/invocations", "7")):
            content = body.replace('"x": 7', f'"x": {number}')
            answer = await client.post(path, content=content)
            assert answer.status_code == 200, answer.text
    assert [request.kv_source for request in bench.engine.requests] == [None] * 3


async def test_without_the_flag_the_header_says_nothing(bench: Any, prefiller: Server) -> None:
    headers = {"x-prefiller-host-port": prefiller.address}
    async with bench.client(kv_role="kv_consumer") as client:
        assert (await client.post(TEXT, json=ASKED, headers=headers)).status_code == 200
    assert prefiller.asked == []


async def test_a_client_that_leaves_ends_the_leg(bench: Any, prefiller: Server) -> None:
    prefiller.behave = hangs
    headers = {"x-prefiller-host-port": prefiller.address}
    async with bench.listening(api(bench)) as url, httpx.AsyncClient(timeout=60) as client:
        asking = asyncio.create_task(client.post(url + TEXT, json=ASKED, headers=headers))
        await prefiller.arrived.wait()
        asking.cancel()
        await asyncio.wait_for(prefiller.left.wait(), 60)
    assert bench.engine.requests == []
