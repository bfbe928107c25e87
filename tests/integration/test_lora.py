"""Adapters in running workers: they come and go under load, and the picker finds them."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.support.fleet.running_fleet import ready_fleet
from tests.support.model.lora_files import write_adapter
from tests.support.waiting import until
from tests.support.worker.running_worker import Worker, running_worker
from worker.models.checkpoints import open_checkpoint
from worker.models.loader import expected_shapes

pytestmark = pytest.mark.full

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: lora-affinity-scorer}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 1}
  - {pluginRef: lora-affinity-scorer, weight: 3}
"""
ADAPTERS = [f"adapter-{n}" for n in range(6)]
REPEATS = 10


async def complete(worker: Worker, model: str | None) -> tuple[int, str]:
    body = {"prompt": "The points are", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = await worker.http.post("/v1/completions", json={**body, "model": model})
    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    return answer.status_code, text


async def change(worker: Worker, route: str, **body: object) -> None:
    answer = await worker.http.post(f"/v1/{route}_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


async def test_adapters_come_and_go_under_load(model_path: Path, tmp_path: Path) -> None:
    """No request fails, and none is answered by anything but the adapter that it named: also not
    while others are loaded, replaced in place and unloaded, and slots are fewer than adapters.
    """
    shapes = expected_shapes(open_checkpoint(model_path).config)
    paths = {name: write_adapter(tmp_path / name, shapes, n) for n, name in enumerate("abcx")}
    stays = [f"{name}={paths[name]}" for name in "abc"]
    limits = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3")
    flags = ("--model", str(model_path), "--enable-admin-routes", *limits)
    async with running_worker(*flags, "--lora-modules", *stays) as worker:
        models: list[str | None] = [*"abc", None]
        wanted = {model: await complete(worker, model) for model in models}
        assert len(set(wanted.values())) == len(models)
        answered: Counter[str | None] = Counter()

        async def ask(model: str | None) -> None:
            while min(answered[m] for m in models) < 3 or not changing.done():
                assert await complete(worker, model) == wanted[model]
                answered[model] += 1

        async def come_and_go() -> None:
            for _ in range(3):
                await change(worker, "load", lora_name="x", lora_path=str(paths["x"]))
                late = asyncio.create_task(complete(worker, "x"))
                path = str(paths["x"])
                await change(worker, "load", lora_name="x", lora_path=path, load_inplace=True)
                await change(worker, "unload", lora_name="x")
                assert (await late)[0] in (200, 404)  # it may have come too late

        async with asyncio.TaskGroup() as group:
            changing = group.create_task(come_and_go())
            for model in models:
                group.create_task(ask(model))
        listed = (await worker.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed[1:]] == ["a", "b", "c"]


@pytest.mark.envoy
async def test_requests_meet_their_adapter(tmp_path: Path) -> None:
    """Nine of ten repeated requests for six adapters, on three workers with two slots each, run
    where the adapter is loaded already.
    """
    config = tmp_path / "picker.yaml"
    config.write_text(CONFIG)
    modules = " ".join(f"{name}=/nowhere" for name in ADAPTERS)
    flags = f"--enable-lora --max-loras 2 --max-cpu-loras 6 --lora-modules {modules}"
    requests = ADAPTERS * REPEATS
    Random(5).shuffle(requests)
    fleet_flags = ("--workers", "3", "--config", str(config), "--decision-header")
    async with (
        ready_fleet(*fleet_flags, "--worker-args", flags) as fleet,
        httpx.AsyncClient(timeout=60) as http,
    ):

        async def where(model: str) -> str:
            body = {"model": model, "prompt": "x", "max_tokens": 2}
            answer = await http.post(f"{fleet.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            return answer.headers["x-pointsman-endpoint"]

        async def seen(model: str) -> bool:
            page = (await http.get(f"{fleet.picker_url}/endpoints")).json()
            known = [e["metrics"] or {} for e in page["endpoints"]]
            return any(model in metrics.get("active_models", ()) for metrics in known)

        homes = {}
        for model in ADAPTERS:
            homes[model] = await where(model)
            await until(lambda model=model: seen(model), what=f"{model} is seen")
        places = [(model, await where(model)) for model in requests]
    assert len(set(homes.values())) == 3
    met = sum(place == homes[model] for model, place in places)
    assert met >= 0.9 * len(requests)
