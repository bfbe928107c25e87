"""Operators pause, put to sleep, reset and inspect a worker."""

import asyncio
from typing import Any

import pytest

from worker.api.routes.control import redacted
from worker.config import ApiConfig, EngineConfig
from worker.engine.messages import (
    CachedBlock,
    CommandReply,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from worker.types import EngineStats

ADMIN = {"enable_admin_routes": True}


@pytest.mark.parametrize(
    ("route", "commands", "answer"),
    [
        ("/reset_prefix_cache", [ResetPrefixCache(0)], {"success": True}),
        (
            "/reset_prefix_cache?reset_running_requests=true",
            [ResetPrefixCache(0, reset_running=True)],
            {"success": True},
        ),
        ("/pause", [Pause(0), ResetPrefixCache(0)], {"status": "paused"}),
        ("/pause?mode=wait&clear_cache=false", [Pause(0, "wait")], {"status": "paused"}),
        ("/pause?mode=keep", [Pause(0, "keep")], {"status": "paused"}),
        ("/resume", [Resume(0)], {"status": "resumed"}),
        ("/sleep", [Sleep(0, 1, "abort")], {"status": "sleeping", "level": 1}),
        ("/sleep?level=2&mode=wait", [Sleep(0, 2, "wait")], {"status": "sleeping", "level": 2}),
        ("/wake_up", [WakeUp(0)], {"status": "awake", "tags": None}),
        (
            "/wake_up?tags=weights&tags=kv_cache",
            [WakeUp(0, ["weights", "kv_cache"])],
            {"status": "awake", "tags": ["weights", "kv_cache"]},
        ),
    ],
)
async def test_routes_become_commands(
    bench: Any, route: str, commands: list[Any], answer: dict[str, Any]
) -> None:
    async with bench.client(**ADMIN) as client:
        response = await client.post(route)
    assert (response.status_code, response.json()) == (200, answer)
    assert bench.engine.commands == commands


@pytest.mark.parametrize(
    "route",
    [
        "/sleep?level=3",
        "/sleep?level=1.0",
        "/sleep?level=",
        "/sleep?level=1&level=2",
        "/sleep?lever=1",
        "/sleep?level",
        "/sleep?mode=hard",
        "/pause?clear_cache=maybe",
        "/wake_up?tags=all",
        "/reset_prefix_cache?reset_running_requests=1",
        "/pause?mode=%FF",
        "/pause?" + "&".join(f"f{n}=1" for n in range(100)),
    ],
)
async def test_wrong_queries_are_refused(bench: Any, route: str) -> None:
    async with bench.client(**ADMIN) as client:
        response = await client.post(route)
    assert response.status_code == 400
    assert bench.engine.commands == []


async def test_the_engines_state_is_reported(bench: Any) -> None:
    async with bench.client(**ADMIN) as client:

        async def state() -> tuple[bool, bool]:
            return (
                (await client.get("/is_paused")).json()["is_paused"],
                (await client.get("/is_sleeping")).json()["is_sleeping"],
            )

        assert await state() == (False, False)
        bench.engine.stats = EngineStats(sleep_level=1, is_paused=True)
        assert await state() == (True, True)
        partly = await client.post("/wake_up", params={"tags": "weights"})
        assert partly.json() == {"status": "sleeping", "tags": ["weights"]}


async def test_a_refusal_of_the_engine_is_passed_on(bench: Any) -> None:
    bench.engine.reply = CommandReply(0, ok=False, error="not while asleep")
    async with bench.client(**ADMIN) as client:
        refused = await client.post("/resume")
        reset = await client.post("/reset_prefix_cache")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "not while asleep"
    assert (reset.status_code, reset.json()) == (200, {"success": False})


async def test_the_cache_is_dumped(bench: Any) -> None:
    child = CachedBlock(b"\x02", b"\x01", [3, 4], "salt", "sql")
    blocks = [CachedBlock(b"\x01", None, [1, 2]), child]
    bench.engine.reply = CommandReply(0, blocks=blocks, event_sequence=7)
    async with bench.client(**ADMIN) as client:
        dump = (await client.get("/kv_events/dump")).json()
    assert (dump["block_size"], dump["event_sequence"]) == (16, 7)
    assert [list(block.values()) for block in dump["blocks"]] == [
        ["01", None, [1, 2], None, None],
        ["02", "01", [3, 4], "salt", "sql"],
    ]


async def test_operators_need_the_flag_and_the_key(bench: Any) -> None:
    async with bench.client() as client:
        assert (await client.post("/sleep")).status_code == 404
    async with bench.client(**ADMIN, api_keys=["k"]) as client:
        keyless = [
            await client.post("/sleep"),
            await client.get("/server_info"),
            await client.get("/kv_events/dump"),
            await client.post("/abort_requests", json={"request_ids": []}),
        ]
        assert [r.status_code for r in keyless] == [401] * 4
        assert bench.engine.commands == []
        key = {"authorization": "Bearer k"}
        assert (await client.post("/sleep", headers=key)).status_code == 200


async def test_secrets_are_not_shown(bench: Any) -> None:
    async with bench.client(**ADMIN, api_keys=["top-secret"]) as client:
        key = {"authorization": "Bearer top-secret"}
        text = await client.get("/server_info", headers=key)
        plain = await client.get("/server_info?config_format=json", headers=key)
    assert isinstance(text.json()["vllm_config"], str)
    assert plain.json()["vllm_config"]["api"]["api_keys"] == "1 keys"
    assert "top-secret" not in text.text + plain.text
    engine = EngineConfig("sim", None, prefix_caching_hash_seed="hidden")
    assert "hidden" not in repr(redacted(ApiConfig(("m",), 64, 300), engine))


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("name", ["mine", "cmpl-mine"])
async def test_requests_are_aborted_by_the_clients_id(bench: Any, path: str, name: str) -> None:
    bench.engine.steps = [asyncio.Event()]
    body = {"prompt": ["a", "b"], "n": 2, "stream": True}
    async with bench.client() as client:
        asked = client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        call = asyncio.ensure_future(asked)
        await bench.engine.saw_request.wait()
        await asyncio.sleep(0)  # the second prompt is asked for in the same turn of the loop
        answer = await client.post(path, json={"request_ids": [name, "unknown"]})
        assert (answer.status_code, answer.content) == (200, b"")
        ids = {i for r in bench.engine.requests for i in (r.request_id, *r.branch_ids)}
        assert set(bench.engine.aborted) == ids
        assert len(ids) == 4
        call.cancel()


async def test_the_ids_to_abort_are_bounded(bench: Any) -> None:
    taken, refused = [
        await bench.post("/abort_requests", {"request_ids": ["x"] * n}) for n in (1024, 1025)
    ]
    assert (taken.status_code, refused.status_code) == (200, 400)
    assert refused.json()["error"]["param"] == "body.request_ids"
