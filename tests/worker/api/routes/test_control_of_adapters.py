"""Adapters by name: loaded, listed, asked for, unloaded; in vLLM's words."""

from pathlib import Path
from typing import Any

import pytest

from worker.engine.messages import CommandReply, LoadAdapter, UnloadAdapter

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
