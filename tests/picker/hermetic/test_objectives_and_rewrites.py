"""Objectives and rewrites of the endpoints file apply to requests, and change in flight."""

import asyncio
import json
from collections import Counter
from pathlib import Path

from tests.support.picker.ext_proc_stream import Message, completion, destination_of
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import objective, rewrite, rule, whole_picker
from tests.support.waiting import until

OBJECTIVE = "x-llm-d-inference-objective"


def model_of(said: list[Message]) -> str:
    pieces = [one.request_body.response.body_mutation.streamed_response.body for one in said[1:]]
    return json.loads(b"".join(pieces))["model"]


async def test_changes_apply_whole_and_fail_no_request(tmp_path: Path) -> None:
    first, second = pods(page(), page())
    states = {
        pod.name: [objective("o", priority), rewrite("r", rule("m", **{model: None}))]
        for pod, priority, model in ((first, 1, "v1"), (second, 2, "v2"))
    }
    seen: Counter[tuple[str, str]] = Counter()
    async with whole_picker(tmp_path, [first, second]) as picker:
        picker.policies = states[first.name]
        picker.list_endpoints([first])
        await until(lambda: _only(picker, first.name))
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                said = await picker.ask(completion("m"), {OBJECTIVE: "o"})
                seen[destination_of(said), model_of(said)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            for pod in (second, first) * 3:
                picker.policies = states[pod.name]
                picker.list_endpoints([pod])
                await until(lambda name=pod.name: _only(picker, name))
            done.set()
        assert seen.keys() == {(first.host_port, "v1"), (second.host_port, "v2")}
        assert await picker.outcomes() == {"client-gone": sum(seen.values())}
        for model, priority in (("v1", "1"), ("v2", "2")):
            fields = {"target_model_name": model, "priority": priority}
            counted = sum(count for (_, name), count in seen.items() if name == model)
            assert await picker.requests(**fields) == counted


async def _only(picker, name: str) -> bool:  # type: ignore[no-untyped-def]
    return list(await picker.endpoints()) == [name]
