"""The sidecar between workers like vLLM's: both legs, as they are on the wire."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from fleet.command_lines import parser_of
from tests.support.fleet.sidecar_house import (
    ASKED,
    CHAT,
    CHUNKS,
    SOURCE,
    House,
    dies,
    hangs,
    refuses,
    streams,
)
from tests.support.web_server import Handler, Server, for_all_paths
from tests.support.web_server import runner_of as web_runner_of
from worker.api.routes.prefill_leg import prefill_body


def leg(server: Server) -> tuple[dict[str, str], bytes]:
    ((method, path, headers, body),) = server.asked
    assert (method, path) == ("POST", CHAT)
    assert "x-prefiller-host-port" not in headers
    assert headers["content-length"] == str(len(body))
    return headers, body


async def test_both_legs_as_the_protocol_says(house: House) -> None:
    await house.start()
    status, answer = await house.ask(**{"x-request-id": "mine", "authorization": "Bearer k"})
    assert (status, answer) == (200, b"".join(CHUNKS))
    first, prefill = leg(house.prefiller)
    assert json.loads(prefill) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Zwölf"}],
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 0.25,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    second, decode = leg(house.decoder)
    assert json.loads(decode) == {**ASKED, "kv_transfer_params": SOURCE}
    for headers in (first, second):
        assert (headers["x-request-id"], headers["authorization"]) == ("mine", "Bearer k")
    assert first["content-type"] == "application/json"


async def test_both_legs_name_the_caches_to_ask(house: House) -> None:
    """The picker means the worker that computes: the decode worker if the first leg fails."""
    await house.start()
    await house.ask(**{"x-kv-cache-source-host-port": "10.0.0.7:8000"})
    legs = [server.asked[0][2] for server in (house.prefiller, house.decoder)]
    assert [leg["x-kv-cache-source-host-port"] for leg in legs] == ["10.0.0.7:8000"] * 2


async def two_ports_of(stack: AsyncExitStack, *servers: Server) -> int:
    """Serve each at a port after that of the one before; return the first."""
    while True:
        async with AsyncExitStack() as tried:
            port = 0
            try:
                for server in servers:
                    runner = web_runner_of(for_all_paths(server.handle))
                    tried.push_async_callback(runner.cleanup)
                    await runner.setup()
                    await web.TCPSite(runner, "127.0.0.1", port and port + 1).start()
                    port = int(runner.addresses[0][1])
            except OSError:  # another program has the port
                continue
            stack.push_async_exit(tried.pop_all())
            return port - len(servers) + 1


async def test_each_rank_has_a_port_and_a_name(house: House) -> None:
    """The picker's `data-parallel-profile-handler` names a rank by the sidecar's port for it."""
    async with AsyncExitStack() as stack:
        second = Server(streams)
        first_port = await two_ports_of(stack, house.decoder, second)
        decoder = f"http://127.0.0.1:{first_port}"
        await house.start(decoder=decoder, port=7000, data_parallel_size=2)
        named = "x-data-parallel-host-port"
        for header, server in (("127.0.0.1:7000", house.decoder), ("127.0.0.1:7001", second)):
            status, _ = await house.ask(**{named: header})
            assert status == 200
            assert named not in server.asked.pop()[2]
        for header in ("127.0.0.1:7002", "127.0.0.1:6999", "10.0.0.1:7000", "127.0.0.1:", "x"):
            assert (await house.ask(**{named: header}))[0] == 400, header
        assert (house.decoder.asked, second.asked) == ([], [])


async def test_both_legs_have_one_request_id(house: House) -> None:
    await house.start()
    await house.ask()
    ids = [server.asked[0][2]["x-request-id"] for server in (house.prefiller, house.decoder)]
    assert len(set(ids)) == 1


@pytest.mark.parametrize(
    ("path", "given", "limits"),
    [
        (CHAT, {}, {"max_tokens": 1}),
        (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {"max_tokens": 9}, {"max_tokens": 1}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"max_tokens": 5, "min_tokens": 3, "seed": 1}},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "seed": 1}},
        ),
        ("/inference/v1/generate", {}, {"sampling_params": {"max_tokens": 1}}),
    ],
)
def test_a_prefill_is_of_one_token(path: str, given: Any, limits: Any) -> None:
    body = prefill_body(path, given)
    assert {name: body[name] for name in body if name not in ("stream", "kv_transfer_params")} == (
        limits
    )


async def babbles(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[1")


@pytest.mark.parametrize("behave", [refuses, hangs, babbles, dies])
async def test_without_a_prefill_the_decode_continues(house: House, behave: Handler) -> None:
    house.prefiller.behave = behave
    await house.start(prefill_timeout=0.2)
    body = json.dumps(ASKED, indent=3).encode()
    assert await house.ask(body) == (200, b"".join(CHUNKS))
    assert house.decoder.asked[0][3] == body
    assert "x-prefiller-host-port" not in house.decoder.asked[0][2]


async def test_a_missing_prefiller_costs_nothing_else(house: House) -> None:
    await house.start()
    assert await house.ask(prefiller="127.0.0.1:1") == (200, b"".join(CHUNKS))


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b""])
async def test_a_body_that_is_no_object_is_the_decoders_to_refuse(
    house: House, body: bytes
) -> None:
    await house.start()
    assert (await house.ask(body))[0] == 200
    assert (house.prefiller.asked, house.decoder.asked[0][3]) == ([], body)


@pytest.mark.parametrize(
    "prefiller",
    [
        *("8.8.8.8:80", "169.254.169.254:80", "[::ffff:169.254.169.254]:80"),
        *("[::ffff:8.8.8.8]:80", "host:80", "x", "[::]:1"),
        *("127.0.0.1:x@host.example", "127.0.0.1:80/admin?x=", "[::1%x@host.example]:80"),
        *("user@127.0.0.1:80", "127.0.0.1", "::1:80"),
    ],
)
async def test_only_allowed_prefillers_are_asked(house: House, prefiller: str) -> None:
    """Clients can set the header, and must not reach other services with it."""
    await house.start()
    status, body = await house.ask(prefiller=prefiller)
    assert (status, json.loads(body)["error"]["type"]) == (403, "Forbidden")
    assert house.decoder.asked == []


async def test_networks_can_be_named(house: House) -> None:
    await house.start(prefiller_networks=("10.0.0.0/8",))
    assert (await house.ask())[0] == 403


async def test_the_rest_is_passed_on(house: House) -> None:
    await house.start()
    async with house.client.get(f"{house.url}/metrics?a=%20b") as answer:
        assert (answer.status, answer.headers["X-Worker"]) == (200, "w")
    await house.ask(path="/v1/messages")
    assert [one[:2] for one in house.decoder.asked] == [
        ("GET", "/metrics?a=%20b"),
        ("POST", "/v1/messages"),
    ]
    assert house.prefiller.asked == []
    assert "x-prefiller-host-port" not in house.decoder.asked[1][2]


async def test_a_decoder_that_is_gone_is_a_503(house: House) -> None:
    await house.start(decoder="http://127.0.0.1:1")
    status, body = await house.ask()
    assert (status, json.loads(body)["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_a_client_disconnect_ends_the_prefill(house: House) -> None:
    house.prefiller.behave = hangs
    await house.start()
    asking = asyncio.create_task(house.ask())
    await house.prefiller.arrived.wait()
    asking.cancel()
    await asyncio.wait_for(house.prefiller.left.wait(), 60)


@pytest.mark.parametrize("number", ["1e999", "NaN"])
async def test_an_unreadable_body_names_no_kv(house: House, number: str) -> None:
    """A decode worker may accept more encodings than the sidecar."""
    await house.start()
    body = json.dumps({**ASKED, "kv_transfer_params": SOURCE, "x": 7}).encode()
    status, _ = await house.ask(body.replace(b'"x": 7', f'"x": {number}'.encode()))
    said = [json.loads(one[3]) for one in house.decoder.asked]
    assert (status, said) == (
        (400, []) if number == "NaN" else (200, [{**ASKED, "x": float("inf")}])
    )


@pytest.mark.parametrize(
    ("field", "spelling"),
    [
        ("kv_transfer_params", "kv_transfer_params"),
        ("kv_transfer_params", "kv_transfer\\u005fparams"),
        ("bootstrap_host", "bootstrap_host"),
        ("bootstrap_port", "bootstrap_port"),
        ("bootstrap_room", "bootstrap\\u005froom"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_client_does_not_say_where_kv_is_taken_from(
    house: House, field: str, spelling: str, is_packed: bool
) -> None:
    """The decode worker would connect to that address, in any spelling or compression."""
    await house.start()
    body = json.dumps({**ASKED, field: SOURCE}).encode()
    body = body.replace(field.encode(), spelling.encode())
    data, headers = (gzip.compress(body), {"content-encoding": "gzip"}) if is_packed else (body, {})
    async with house.client.post(house.url + CHAT, data=data, headers=headers) as answer:
        assert answer.status == 200
    ((_, _, prefill, decode),) = house.decoder.asked
    assert json.loads(decode) == ASKED
    assert "content-encoding" not in prefill


async def test_sglang_has_the_same_body_at_both_workers_at_once(house: House) -> None:
    """Neither waits for the other; the decode worker's answer is the client's."""
    await house.start(kv_connector="sglang")
    both = asyncio.Barrier(2)

    async def prefills(_: web.Request) -> web.StreamResponse:
        await both.wait()
        return web.json_response({"choices": []})

    async def decodes(request: web.Request) -> web.StreamResponse:
        await both.wait()
        return await streams(request)

    house.prefiller.behave, house.decoder.behave = prefills, decodes
    before = time.time_ns()
    status, answer = await house.ask(authorization="Bearer k")
    assert (status, answer) == (200, b"".join(CHUNKS))
    (first, prefill), (second, decode) = leg(house.prefiller), leg(house.decoder)
    assert prefill == decode
    room = json.loads(decode)["bootstrap_room"]
    assert before <= room <= time.time_ns() + 1000
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room}
    assert json.loads(decode) == {**ASKED, **where}
    assert first["authorization"] == second["authorization"] == "Bearer k"
    assert first["content-type"] == "application/json"


async def test_sglang_decodes_though_the_prefill_fails(house: House) -> None:
    house.prefiller.behave = refuses
    await house.start(kv_connector="sglang", bootstrap_port=7)
    assert await house.ask() == (200, b"".join(CHUNKS))
    assert json.loads(house.decoder.asked[0][3])["bootstrap_port"] == 7
    assert await house.ask(b"[]") == (200, b"".join(CHUNKS))
    assert house.decoder.asked[1][3] == b"[]"


async def test_sglangs_prefill_continues_without_its_client(house: House) -> None:
    """The decode leg ends with the client, and the prefill ends with the sidecar."""
    house.prefiller.behave = house.decoder.behave = hangs
    await house.start(kv_connector="sglang")
    asking = asyncio.create_task(house.ask())
    await house.prefiller.arrived.wait()
    await house.decoder.arrived.wait()
    asking.cancel()
    await asyncio.wait_for(house.decoder.left.wait(), 60)
    assert not house.prefiller.left.is_set()
    await house.sidecar_stack.aclose()
    await asyncio.wait_for(house.prefiller.left.wait(), 60)


def test_the_bootstrap_port_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own routers read the same variable."""
    assert parser_of("sidecar").parse_args([]).bootstrap_port == 8998
    monkeypatch.setenv("SGLANG_BOOTSTRAP_PORT", "9000")
    assert parser_of("sidecar").parse_args([]).bootstrap_port == 9000
    assert parser_of("sidecar").parse_args(["--bootstrap-port", "1"]).bootstrap_port == 1
