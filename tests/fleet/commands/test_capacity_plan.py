"""`pointsman plan`: the load, the objective, the table, and errors in any of them."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from fleet.command_lines import parser_of
from fleet.commands.capacity_plan import load_of_bench, load_of_picker, objective_of, plan_command
from fleet.errors import FleetError, UsageError
from fleet.http_client import HttpAnswer
from fleet.picker_views import PickerViews
from picker.admin.views import EndpointsView, PoolRates
from picker.decisions.views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView
from picker.planner.capacity import LatencyObjective, Load

FILE = """slo: {ttftSeconds: 4, itlSeconds: 0.06}
capacity: {prefillTokensPerSecond: 5000, decodeBaseSeconds: 0.02, decodePerSequenceSeconds: 0.0015}
groups:
- {deployment: gpu, maxReplicas: 8, costPerReplicaHour: 2.5}
"""
LOAD = ("--rate", "2", "--input-tokens", "3000", "--output-tokens", "400")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "autoscale.yaml"
    path.write_text(FILE)
    return str(path)


def said(*argv: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    return plan_command(parser_of("plan").parse_args(argv), lines.append), lines


def as_json(*argv: str) -> tuple[int, dict[str, Any]]:
    status, lines = said(*argv, "--json")
    document: dict[str, Any] = json.loads("".join(lines))
    return status, document


def test_the_table_marks_the_fewest_replicas_that_are_enough(file: str) -> None:
    status, lines = said(file, *LOAD)
    assert status == 0
    assert "gpu: 6 replicas, 15 an hour" in lines
    [marked] = [line for line in lines if line.endswith("<-")]
    assert marked.split()[0] == "6"
    assert len([line for line in lines if line.strip()[:1].isdigit()]) == 6  # the load, and 4 to 8


def test_too_few_replicas_are_status_1(file: str) -> None:
    status, found = as_json(file, *LOAD[2:], "--rate", "20")
    [group] = found["groups"]
    assert (status, group["replicas"], group["is_enough"]) == (1, 8, False)
    assert group["rows"][0]["ttft_seconds"] is None


def test_flags_replace_what_the_file_says(file: str) -> None:
    status, found = as_json(
        file, *LOAD, "--cached-share", "0.5", "--slo", "ttft_p95<9s", "--cost-per-replica-hour", "1"
    )
    [group] = found["groups"]
    assert (status, found["load"]["cached_tokens"]) == (0, 1500)
    assert found["objective"] == {"ttftSeconds": 9.0, "itlSeconds": None, "share": 0.95}
    assert group["cost_per_hour"] == group["replicas"] < 6


def test_a_bench_gives_the_load_of_its_last_stage(file: str, tmp_path: Path) -> None:
    stage = {
        "requests": 110,
        "errors": {"HTTP 503": 10},
        "offered_rate": 2.0,
        "prompt_tokens": 300_000,
        "cached_tokens": 30_000,
        "output_tokens": 40_000,
        "ttft": None,
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"stages": [stage | {"offered_rate": 1.0}, stage]}))
    assert load_of_bench(path) == Load(2.0, 3000.0, 400.0, 300.0)
    _, found = as_json(file, "--bench", str(path), "--rate", "1")
    assert (found["load"]["rate"], found["load"]["cached_tokens"]) == (1.0, 300.0)


def test_a_running_picker_gives_the_load_of_its_pool() -> None:
    def fetch(url: str) -> HttpAnswer:
        path = urlsplit(url).path
        if path == "/endpoints":
            view = EndpointsView((), PoolRates(requests_per_second=2.0, tokens_per_second=800.0))
            return HttpAnswer(200, msgspec.json.encode(view))
        if path == "/queues":
            return HttpAnswer(200, msgspec.json.encode(QueuesView()))
        summary = RecordSummary("r", 0.0, "m", "", 0, "done")
        if path == "/decisions":
            return HttpAnswer(200, msgspec.json.encode({"decisions": [summary]}))
        record = RecordView(summary, "m", "m", prompt_tokens=3000, matched_prefix_tokens=600)
        return HttpAnswer(200, msgspec.json.encode(record))

    views = PickerViews("http://127.0.0.1:9090", fetch)
    assert load_of_picker(views) == Load(2.0, 3000.0, 400.0, 600.0)


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft<1s,itl<50ms", LatencyObjective(ttft_seconds=1.0, itl_seconds=0.05, share=0.99)),
        (
            "ttft_p50<1s,itl_p95<50ms",
            LatencyObjective(ttft_seconds=1.0, itl_seconds=0.05, share=0.95),
        ),
    ],
)
def test_bounds_are_those_of_a_bench(text: str, objective: LatencyObjective) -> None:
    assert objective_of(text) == objective


@pytest.mark.parametrize("text", ["e2e<1s", "ttft_mean<1s", "ttft<1s,ttft_p95<2s", "quick"])
def test_bounds_that_cannot_be_planned_for_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        objective_of(text)


@pytest.mark.parametrize(
    ("content", "argv", "error"),
    [
        (FILE, ("--rate", "2"), "--input-tokens, --output-tokens of the load is unknown or 0"),
        (FILE, (*LOAD, "--bench", "/none.json"), "cannot read /none.json"),
        (FILE, (*LOAD, "--picker", "http://127.0.0.1:1"), "no picker answers"),
        ("mode: thresholds\ngroups: [{}]", LOAD, "has no slo"),
        ("mode: thresholds\ngroups: [{}]", (*LOAD, "--slo", "ttft<1s"), "both has no capacity"),
        ("groups: []", LOAD, "groups: is empty"),
    ],
)
def test_a_missing_number_is_named(
    tmp_path: Path, content: str, argv: tuple[str, ...], error: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(FleetError, match=error):
        said(str(path), *argv)
