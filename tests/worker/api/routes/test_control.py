"""Operators pause, put to sleep, reset and inspect a worker, and load adapters."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from worker.api.routes.control import redacted
from worker.config import ApiConfig, EngineConfig
from worker.engine.messages import (
    CachedBlock,
    CommandReply,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadAdapter,
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


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    return str(tmp_path)


async def test_an_adapter_is_loaded_asked_for_and_unloaded(bench: Any, folder: str) -> None:
    async with bench.client(enable_adapter_routes=True) as client:
        loaded = await client.post(LOAD, json={"lora_name": "sql", "lora_path": folder})
        assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
        cards = (await client.get("/v1/models")).json()["data"]
        parents = {card["id"]: card["parent"] for card in cards}
        assert parents == {"tiny": None, "alias": None, "sql": "tiny"}
        assert (await client.get("/v1/models/sql")).json()["root"] == folder
        for path, more in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/inference/v1/generate", {"token_ids": [65]}),
        ):
            answer = await client.post(path, json={"model": "sql", **more})
            assert answer.json()["model"] == "sql", answer.text
            assert bench.engine.requests[-1].adapter.name == "sql"
        base = await client.post("/v1/completions", json={"prompt": "x"})
        assert (base.json()["model"], bench.engine.requests[-1].adapter) == ("tiny", None)
        removed = await client.post(UNLOAD, json={"lora_name": "sql"})
        assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
        late = await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})
        assert late.status_code == 404
    load, unload = bench.engine.commands
    assert (type(load), type(unload)) == (LoadAdapter, UnloadAdapter)
    assert load.adapter == unload.adapter


async def test_a_name_is_loaded_again_only_in_place(bench: Any, folder: str) -> None:
    """The engine sees another adapter, so the cache of the first cannot serve the second."""
    body = {"lora_name": "sql", "lora_path": folder}
    async with bench.client(enable_adapter_routes=True) as client:
        await client.post(LOAD, json=body)
        refused = await client.post(LOAD, json=body)
        assert refused.status_code == 400
        assert "has already been loaded" in refused.json()["error"]["message"]
        replaced = await client.post(LOAD, json={**body, "load_inplace": True})
        assert replaced.status_code == 200
    first, second, gone = (command.adapter for command in bench.engine.commands)
    assert gone == first
    assert (second.number, second.version) == (first.number + 1, 1)
    assert second.key != first.key


@pytest.mark.parametrize(
    ("route", "body", "status", "kind"),
    [
        (LOAD, {"lora_name": "", "lora_path": "/x"}, 400, "InvalidUserInput"),
        (LOAD, {"lora_name": "a,b", "lora_path": "/x"}, 400, "InvalidUserInput"),
        (LOAD, {"lora_name": "tiny", "lora_path": "/x"}, 400, "InvalidUserInput"),
        (LOAD, {"lora_name": "sql", "lora_path": "/nowhere"}, 404, "NotFoundError"),
        (LOAD, {"lora_name": "sql"}, 400, "Bad Request"),
        (UNLOAD, {"lora_name": "sql"}, 404, "NotFoundError"),
        (UNLOAD, {"lora_name": ""}, 400, "InvalidUserInput"),
    ],
)
async def test_mistakes_are_named_in_vllms_words(
    bench: Any, route: str, body: dict[str, Any], status: int, kind: str
) -> None:
    answer = await bench.post(route, body, enable_adapter_routes=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert bench.engine.commands == []


async def test_an_adapter_that_the_engine_refuses_is_not_served(bench: Any, folder: str) -> None:
    bench.engine.reply = CommandReply(0, False, "bias 'all' is not supported")
    async with bench.client(enable_adapter_routes=True) as client:
        answer = await client.post(LOAD, json={"lora_name": "sql", "lora_path": folder})
        assert answer.status_code == 400
        assert "bias 'all' is not supported" in answer.json()["error"]["message"]
        assert len((await client.get("/v1/models")).json()["data"]) == 2


async def test_without_the_switch_there_are_no_such_routes(bench: Any) -> None:
    async with bench.client() as client:
        assert (await client.post(LOAD, json={})).status_code == 404
