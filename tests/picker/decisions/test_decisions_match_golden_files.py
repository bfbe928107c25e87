"""Recordings, `explain`, traces and series are those of `tests/golden/decisions`, which running
this file as a script makes again.
"""

import asyncio
import io
import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from fleet.commands.explain_text import Layout, explained
from fleet.commands.replay import replayed as report_of
from picker.decisions.ring import DecisionRing
from picker.errors import RefusedError
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest
from tests.support.picker.configured_requests import PROMPT, Moment, Routing, routing
from tests.support.picker.configured_requests import golden as golden_config
from tests.support.picker.recorded_traffic import Traffic, replayed
from tests.support.picker.span_notes import Noted, Notes

GOLDEN = Path(__file__).parents[2] / "golden" / "decisions"
RECORDING, DECISIONS = GOLDEN / "recording.jsonl", GOLDEN / "decisions.json"
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
UNIX = 1_800_000_000.0
ROLES = ("prefill", "decode", "decode", "")
POOL = [
    Endpoint(f"w{index}", f"10.0.0.{index}", 8000, labels={"llm-d.ai/role": role, "tier": tier})
    for index, (role, tier) in enumerate(zip(ROLES, ("a", "a", "b", "b"), strict=True), 1)
]
LABELLED = """
plugins:
- {type: by-label-selector, parameters: {matchLabels: {tier: b}}}
- {type: queue-scorer}
- {type: weighted-random-picker, parameters: {maxNumOfEndpoints: 2}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: by-label-selector}
  - {pluginRef: queue-scorer}
  - {pluginRef: weighted-random-picker}
"""
GATED = """
featureGates: [flowControl]
plugins: [{type: queue-scorer}, {type: active-request-scorer}]
"""


RECORDED = ("built in", "published_pd_disaggregation", "header_profile_handler")


def config(name: str) -> str:
    file = "default" if name == "built in" else name  # of the version that made the files
    return golden_config(file).partition("Config\n")[2]


def recording() -> bytes:
    lines: list[bytes] = []
    for number, name in enumerate(RECORDED):
        texts = [HEAD + config(name)] + [HEAD + LABELLED] * (number == 0)
        traffic = Traffic(texts, seed=number, endpoints=4, prompts=number == 0)
        asyncio.run(traffic.run(12))
        lines += traffic.sink.lines
    return b"".join(lines)


class Scene:
    def __init__(self, text: str, **options: Any) -> None:
        self.now, self.notes = Moment(), Notes()
        self.records = DecisionRing(50, lambda: self.now(), lambda: UNIX + self.now())
        self.house: Routing = routing(
            text, POOL, tracer=self.notes, watchers=(self.records,), **options
        )
        self.now = self.house.now
        for index, endpoint in enumerate(POOL):
            known = EndpointMetrics(index, 2 * index, 0.1 * index, updated_at_seconds=99.5)
            self.house.datastore.update_metrics(endpoint.key, known)

    async def ask(self, request_id: str, body: Any = PROMPT, **headers: str) -> None:
        exchange = self.house.director.begin()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        head = {":path": "/v1/completions", "x-request-id": request_id, **sent}
        content = None if body is None else json.dumps(body).encode()
        try:
            decision = await exchange.route(RawRequest(head, content))
        except RefusedError as refusal:
            exchange.finish(FinishCause.REFUSED, refusal.status)
            return
        self.now.seconds += 0.25
        if decision.response is None:
            exchange.finish(FinishCause.COMPLETED, 200)
        else:
            usage = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
            self.house.answer(exchange, decision, b"data: {}\n\n", usage)

    def shown(self) -> list[Any]:
        found = []
        for summary, span in zip(
            reversed(list(self.records.last(50))), self.notes.requests, strict=True
        ):
            record = self.records.find(summary.request_id)
            out = io.StringIO()
            console = Console(file=out, width=120)
            for part in explained(record, Layout(zone=UTC)):
                console.print(part, highlight=False, markup=False)
            spans = tree(span)
            text = [line.rstrip() for line in out.getvalue().splitlines()]
            view = msgspec.to_builtins(record)
            assert all(reason.split(":")[0] in "\n".join(text) for reason in view.pop("reasons"))
            found.append({"json": view, "text": text, "spans": spans})
        return found


def tree(span: Noted) -> Any:
    said = {name: one for name, one in span.said.items() if one != ""}
    found: dict[str, Any] = {"name": span.name}
    if said:
        found["said"] = said
    if span.failure:
        found["failure"] = span.failure
    if span.parts:
        found["parts"] = [tree(part) for part in span.parts]
    return found


# Of a histogram the count is enough.
_OTHERS = re.compile(r"_sum\b|_bucket\{")


def series_of(house: Routing) -> list[str]:
    found = {line.rpartition(" ")[0] for line in house.metrics.render().decode().splitlines()}
    return sorted(line for line in found if line[:1] != "#" and not _OTHERS.search(line))


async def decisions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    series: set[str] = set()
    scene = Scene(config("built in"))
    await scene.ask("first", x_llm_d_inference_fairness_id="tenant")
    await scene.ask("second")
    await scene.ask("renamed", x_llm_d_model_name_rewrite="other")
    await scene.ask("not cached", {"model": "m", "prompt": "unseen"}, prefer="if-available")
    await scene.ask("no body", None)
    await scene.ask("no prompt", {"model": "m"})
    found["built in"], house = scene.shown(), [scene.house]
    for name, text in (
        ("pd", config("published_pd_disaggregation")),
        ("labelled", LABELLED),
        ("headers", config("header_profile_handler")),
        ("none left", LABELLED.replace("tier: b", "tier: c")),
    ):
        scene = Scene(text)
        for number in range(3):
            await scene.ask(f"{name} {number}", test_epp_profile="none")
        found[name] = scene.shown()
        house.append(scene.house)
    scene = Scene(GATED, gated=True)
    await scene.ask("let in", x_llm_d_inference_fairness_id="tenant")
    scene.house.gate.shut_down()
    await scene.ask("refused")
    found["flow control"] = scene.shown()
    house.append(scene.house)
    for one in house:
        series.update(series_of(one))
    found["series"] = sorted(series)
    return found


def replay_of(path: Path) -> dict[str, Any]:
    report = report_of(path, None, 10, True)
    return {
        "comparison": msgspec.to_builtins(report.comparison),
        "notes": report.notes,
        "outcomes": [msgspec.to_builtins(one.outcome) for one in replayed(path).decisions],
    }


def ordered(value: dict[str, Any]) -> dict[str, Any]:
    if "active_models" in value:
        value["active_models"].sort()
    return value


@cache
def made() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(json.dumps(asyncio.run(decisions())))
    return found


@cache
def golden() -> Mapping[str, Any]:
    return json.loads(DECISIONS.read_text())


def test_an_old_recording_replays_identically() -> None:
    assert json.loads(json.dumps(replay_of(RECORDING))) == golden()["replay"]


def test_equal_requests_make_equal_recordings() -> None:
    before = RECORDING.read_bytes().splitlines()
    for line, known in zip(recording().splitlines(), before, strict=True):
        assert json.loads(line, object_hook=ordered) == json.loads(known, object_hook=ordered)


@pytest.mark.parametrize(
    "name", ["built in", "pd", "labelled", "headers", "none left", "flow control", "series"]
)
def test_requests_are_shown_as_before(name: str) -> None:
    assert made()[name] == golden()[name]


def _listed(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"


if __name__ == "__main__":
    RECORDING.write_bytes(recording())
    every = {**made(), "replay": replay_of(RECORDING)}
    lines = (f"{json.dumps(key)}: {_listed(one)}" for key, one in every.items())
    DECISIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.exit(0)
