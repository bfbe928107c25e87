"""`pointsman simulate` as a user runs it, in virtual time."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from base.flags import defaults_of
from fleet.errors import FleetError, UsageError
from fleet.policies import POLICIES
from fleet.run.layout import FleetOptions
from fleet.sim.command import simulate_command
from fleet.sim.flags import SimulateSettings, build_parser
from fleet.sim.scenarios import ELSEWHERE, SCENARIOS
from picker.config.build import DEFAULT_CONFIG
from picker.recording.lines import AnyLine, DecisionLine, End, Header, RequestLine, encoded
from picker.types import Usage
from tests.support.picker.recorded_traffic import Traffic, record

LENGTHS = ["--output-tokens", "40", "--input-tokens", "100"]
SMALL = ["--fast", "--rate", "12", "--duration", "6", *LENGTHS]
SHARED = [*SMALL, "--workers", "4", "--prefix-groups", "12", "--prefix-tokens", "2000"]
TWO_IN_TURN = [*SMALL, "--workers", "2", "--policies", "round-robin"]


def run(*flags: str) -> tuple[int, str]:
    said: list[str] = []
    flags = flags if "--processes" in flags else (*flags, "--processes", "1")
    return simulate_command(flags, said.append, lambda _: None), "\n".join(said)


def results(tmp_path: Path, *flags: str) -> dict[str, dict[str, Any]]:
    path = tmp_path / "result.json"
    run(*flags, "--json", str(path))
    return {one["name"]: one for one in json.loads(path.read_text())["stages"]}


def scenario(tmp_path: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    """Return the text, and the rows of each scenario."""
    path = tmp_path / "result.json"
    status, text = run("--scenario", *flags, "--json", str(path))
    assert status == 0
    return text, json.loads(path.read_text())["scenarios"]


@pytest.fixture(scope="module")
def by_policy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return results(tmp_path_factory.mktemp("policies"), *SHARED, "--policies", *POLICIES)


def test_every_policy_answers_the_same_requests(by_policy: dict[str, dict[str, Any]]) -> None:
    assert len({one["requests"] for one in by_policy.values()}) == 1
    assert [one["errors"] for one in by_policy.values()] == [{}] * len(POLICIES)


def test_policies_that_know_prefixes_find_more_cached(by_policy: dict[str, dict[str, Any]]) -> None:
    cached = {name: one["cached_tokens"] / one["prompt_tokens"] for name, one in by_policy.items()}
    blind = max(cached[name] for name in ("random", "round-robin", "power-of-two"))
    for name in ("default", "precise", "cache_aware", "consistent-hashing", "prefix-only"):
        assert cached[name] > blind + 0.1, name


def test_a_full_disk_is_reported_with_the_file_after_the_report() -> None:
    said: list[str] = []
    flags = ("--requests", "1", "--html", "/dev/full", "--processes", "1")
    with pytest.raises(FleetError, match=r"^cannot write /dev/full: No space left on device"):
        simulate_command(flags, said.append, lambda _: None)
    assert "1 requests" in said[0]


def test_a_seed_gives_one_outcome(tmp_path: Path) -> None:
    first = results(tmp_path, *SHARED)
    assert results(tmp_path, *SHARED) == first
    assert results(tmp_path, *SHARED, "--seed", "2") != first


def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    noted: list[str] = []
    every = []
    for number in ("1", "2"):
        path, said = tmp_path / number, list[str]()
        flags = [*SMALL, "--policies", "default", "random", "--seeds", "2", "--csv", str(path)]
        assert simulate_command([*flags, "--processes", number], said.append, noted.append) == 0
        every.append((said, path.read_text()))
    assert every[0] == every[1]
    names = [
        f"{policy}, 4 workers, seed {seed}" for policy in ("default", "random") for seed in (1, 2)
    ]
    assert noted[:4] == [f"{number}/4 {name}" for number, name in enumerate(names, 1)]
    assert sorted(one.partition(" ")[2] for one in noted[4:]) == sorted(names)


def test_approximate_workers_are_near_the_exact_ones(tmp_path: Path) -> None:
    near = results(tmp_path, *SHARED)["default"]
    exact = results(tmp_path, *(flag for flag in SHARED if flag != "--fast"))["default"]
    for metric in ("ttft", "itl", "e2e"):
        assert near[metric]["p50"] == pytest.approx(exact[metric]["p50"], rel=0.05)
    assert near["cached_tokens"] == pytest.approx(exact["cached_tokens"], rel=0.05)


def test_requests_of_a_dead_worker_fail_and_the_rest_is_answered(tmp_path: Path) -> None:
    flags = TWO_IN_TURN
    calm = results(tmp_path, *flags)["round-robin"]
    hit = results(tmp_path, *flags, "--event", "3:kill:1", "--event", "5:add:2")["round-robin"]
    assert hit["requests"] == calm["requests"]
    [(error, times)] = hit["errors"].items()
    assert error == "503 the worker died"
    assert 0 < times < 40


def test_an_event_after_the_last_answer_is_noted() -> None:
    events = ("--event", "6:slow:2:3", "--event", "900:kill:1")
    for more, noted in (
        ((), r"the run ended at [678]\.[0-9] s"),
        (("--seeds", "2"), r"2 of 2 simulations ended, the last of them at [678]\.[0-9] s"),
    ):
        notes: list[str] = []
        flags = (*TWO_IN_TURN, *events, *more, "--processes", "1")
        assert simulate_command(flags, lambda _: None, notes.append) == 0
        assert re.fullmatch(f"--event 900:kill:1 never happened: {noted}", notes[-1])
        assert "6:slow" not in "".join(notes)


def test_quantiles_do_not_hold_where_requests_fail() -> None:
    """Quantiles count answers only, so the share of answered requests has to hold, too."""
    flags = (*TWO_IN_TURN, "--slo", "ttft_p95<100s")
    assert run(*flags)[0] == 0
    status, text = run(*flags, "--event", "3:kill:1")
    assert status == 1
    assert "% of requests answered, 99.00% wanted" in text
    assert "goodput" not in text


@pytest.mark.parametrize("kind", ["--fast", "--rate=12"])
def test_a_request_larger_than_the_kv_cache_fails(kind: str, tmp_path: Path) -> None:
    flags = [kind, "--rate", "12", "--duration", "3", "--kv-tokens", "128", "--output-tokens", "38"]
    stage = results(tmp_path, *flags, "--input-tokens", "90..91")["default"]
    [(error, times)] = stage["errors"].items()
    assert error == "400 longer than the 128 tokens of a KV cache"
    assert stage["e2e"]["count"] == stage["requests"] - times > 0


def test_a_drained_worker_loses_nothing_and_a_slow_one_is_slow(tmp_path: Path) -> None:
    flags = TWO_IN_TURN
    calm = results(tmp_path, *flags)["round-robin"]
    drained = results(tmp_path, *flags, "--event", "3:drain:1")["round-robin"]
    slow = results(tmp_path, *flags, "--event", "3:slow:1:10")["round-robin"]
    assert drained["errors"] == {}
    assert slow["e2e"]["p95"] > 3 * calm["e2e"]["p95"]


def test_the_least_number_of_workers_is_found() -> None:
    load = [*SMALL, "--input-tokens", "2000", "--slo", "ttft_p95<400ms"]
    status, text = run(*load, "--find", "workers")
    assert status == 0
    assert text.startswith("default: ")
    number = int(text.split()[1])
    assert f"(with {number - 1}: ttft_p95<400ms: " in text
    for workers, expected in ((number, 0), (number - 1, 1)):
        assert run(*load, "--workers", str(workers))[0] == expected


def test_an_objective_beyond_all_workers_is_reported() -> None:
    load = ["--fast", "--requests", "2", "--slo", "ttft_p50<1ms"]
    status, text = run(*load, "--find", "workers")
    assert status == 1
    assert "do not meet it either" in text


def test_a_page_and_a_table_have_every_configuration(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(POLICIES["random"] or "")
    page = tmp_path / "page.html"
    status, text = run(*SMALL, "--policies", "default", str(config), "--html", str(page))
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()] == ["stage", "default", "mine.yaml"]
    assert "<svg" in page.read_text()
    assert "mine.yaml" in page.read_text()


def test_a_recording_is_replayed_to_latency(tmp_path: Path) -> None:
    config = POLICIES["round-robin"] or ""
    lines: list[AnyLine] = [Header(1, "test", "pool", "a.yaml", config, 1, False, 0.0, 0.0)]
    for number in range(40):
        at, size = 100 + number / 8, 8000 if number else 4000
        request = RequestLine("r", "openai", {}, at, prompt_bytes=(size,))
        lines.append(DecisionLine(number, 0, at, 0, request))
        if number % 2:
            usage = Usage(prompt_tokens=2000, completion_tokens=64)
            lines.append(End(number, "r", "completed", at + 1, usage))
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(map(encoded, lines)))
    status, text = run("--fast", "--replay", str(path), "--policies", "default")
    assert status == 0
    assert "40 have no recorded prompt" in text
    assert "20 have no recorded length" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["recorded", "default"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_command_lines_with_known_policies(name: str) -> None:
    one = SCENARIOS[name]
    SimulateSettings(**vars(build_parser().parse_args(one.flags.split()))).check()
    assert set(one.policies) <= set(POLICIES)


def test_a_simulated_picker_sees_by_default_what_that_of_a_fleet_sees() -> None:
    shown = build_parser().get_default("response_bodies")
    assert shown == defaults_of(FleetOptions)["response_bodies"].value


def test_the_picker_learns_only_from_responses_that_it_sees(tmp_path: Path) -> None:
    load = ["S16", "--fast", "--rate", "40", "--duration", "10", "--warmup", "4"]
    answers = ["--output-tokens", "60", "--policies", "default"]
    seen = {
        mode: scenario(tmp_path, *load, *answers, "--response-bodies", mode)[1]["S16"]
        for mode in ("usage", "all", "off")
    }
    assert seen["usage"] == seen["all"] != seen["off"]


@pytest.mark.full
def test_a_load_term_spreads_shared_prompts(tmp_path: Path) -> None:
    """S6 validates the simulator: prefixes alone pile requests up on few workers."""
    shape = ["--prefix-groups", "2", "--prefix-tokens", "1000", "--input-tokens", "50"]
    load = ["--fast", "--workers", "4", "--rate", "30", "--duration", "30", "--warmup", "10"]
    text, rows = scenario(tmp_path, "S6,S8", *shape, *load)
    assert f"S8 {ELSEWHERE['S8']}" in text
    stages = {one["name"]: one for one in rows["S6"]}
    assert stages["default"]["goodput"] > 0.95
    assert stages["prefix-only"]["goodput"] < 0.6


def test_refused_requests_are_counted_and_not_good(tmp_path: Path) -> None:
    """S12: low priority is shed when the pool is full."""
    load = ["--fast", "--workers", "2", "--rate", "30", "--duration", "12", "--warmup", "3"]
    _, rows = scenario(tmp_path, "S12", "--policies", "random", *load)
    stages = {one["name"]: one for one in rows["S12"]}
    large, small = stages["random, large"], stages["random, small"]
    [(error, times)] = large["errors"].items()
    assert error.startswith("429 ")
    assert large["goodput"] <= 1 - times / large["requests"]
    assert small["errors"] == {}


def test_a_scenario_that_answers_nothing_fails() -> None:
    flags = ("--policies", "default", "--requests", "3", "--warmup", "0", "--kv-tokens", "16")
    status, text = run("--scenario", "S6", *flags)
    assert status == 1
    assert "400 longer than the 16 tokens" in text


def test_flags_complete_those_of_a_scenario_before_they_contradict() -> None:
    load = ("--workers", "1", "--rate", "2", "--duration", "70", "--requests", "1")
    _, text = run("--scenario", "S6", "--fast", *load, "--warmup", "60")
    assert text.startswith("S6 ")
    with pytest.raises(UsageError, match=r"--warmup must be shorter than --duration, 30 s"):
        run(*load[:4], "--warmup", "60")


@pytest.mark.full
def test_scenarios_with_several_seeds_are_one_page_with_a_verdict(tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    load = ["--fast", "--workers", "2", "--rate", "20", "--duration", "4", "--warmup", "0"]
    policies = ["--policies", "default", "random", "--output-tokens", "20"]
    shape = ["--prefix-groups", "8", "--prefix-tokens", "4000", "--input-tokens", "50"]
    flags = [*load, *policies, *shape, "--seed", "3", "--seeds", "2"]
    text, by_scenario = scenario(tmp_path, "S6,S12", *flags, "--html", str(html))
    rows = by_scenario["S6"]
    names = [(one["seed"], one["name"]) for one in rows]
    assert names == [(seed, name) for name in ("default", "random") for seed in (3, 4)]
    speeds = [one["output_tokens_per_second"] for one in rows[:2]]
    assert speeds[0] != speeds[1]
    [row] = [line for line in text.splitlines() if line.split()[:1] == ["default"]]
    assert float(row.split()[3].replace(",", "")) == pytest.approx(sum(speeds) / 2, abs=1)
    verdict = text.partition("Behind the best of each load")[2]
    assert verdict.count("; 3 loads") == 2  # one of S6, and two tenants of S12
    assert html.read_text().count("</pre>") == 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--policies nothing", "--policies: nothing is neither a file nor the name of a policy"),
        ("--policies rondom", "did you mean random"),
        ("--worker nothing", "--worker: nothing is neither a file nor the name of a preset"),
        ("--fast --worker dynamo", "--fast is for the latency model linear; that of dynamo is"),
        ("--find workers", "--find needs --slo"),
        ("--find workers --slo ttft<1s --json a.json", "--find prints a number"),
        ("--workers 10001", "--workers must not be more than 10,000"),
        ("--event 3:kill:5", "--event 3:kill:5: there is no worker 5 then"),
        ("--event 3:add:9997", "--event 3:add:9997: there are at most 10,000"),
        ("--scenario S1 --duration 9", "--warmup must be shorter than --duration"),
        ("--scenario S99", "--scenario: there is no S99; there are S1, "),
        ("--replay nothing.jsonl", "--replay: nothing.jsonl: No such file"),
        ("--replay a --trace b", "--replay has the requests"),
        ("--find workers --slo ttft<1s --event 1:add:1", "--event is not for --find"),
        ("--prefill 1", "--prefill and --decode go together"),
        ("--prefill 1 --decode 2 --policies random", "random knows no prefill workers"),
        ("--prefill 1 --decode 2 --scenario S1", "--prefill is not for --scenario"),
        ("--prefill 1 --decode 2 --event 3:kill:4", "there is no worker 4 then"),
        ("--sim-kv-cache-transfer-latency 5ms", "--sim-kv-cache-transfer-latency is for --prefill"),
    ],
)
def test_contradicting_flags_are_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        run(*flags.split())
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "event", ["3", "3:die:1", "3:slow:1", "3:slow:1:0", "x:kill:1", "3:kill:0"]
)
def test_an_event_that_is_none_is_refused(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--event", event])
    assert "takes an event such as 60:kill:3" in capsys.readouterr().err


def test_a_real_recording_is_read_with_its_prompts(tmp_path: Path) -> None:
    path = record(Traffic([DEFAULT_CONFIG.decode()], seed=4), 60, tmp_path / "r.jsonl")
    status, text = run("--fast", "--replay", str(path), "--policies", "round-robin")
    assert status == 0
    assert "recorded requests, with their times" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["recorded", "round-robin"]
