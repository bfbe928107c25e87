"""A fit finds a worker from its results."""

import json
from pathlib import Path

import pytest

from fleet.command_lines import parser_of
from fleet.errors import FleetError, UsageError
from fleet.sim.command import simulate_command
from fleet.sim.fit import fit_command
from tests.depth import some

LOAD = [
    "--fast",
    "--workers",
    "1",
    "--duration",
    "24",
    "--warmup",
    "4",
    "--input-tokens",
    "64..256",
    "--requests",
    "30",
]
given = parser_of("fit").parse_args
WORKER = {
    "prefill_tokens_per_second": 2000.0,
    "decode_base_seconds": 0.012,
    "decode_per_sequence_seconds": 0.0004,
    "overhead_seconds": 0.02,
    "template_tokens": 10,
    "async_scheduling": True,
}


def paths(folder: Path, worker: dict[str, float]) -> tuple[Path, Path, Path]:
    """The file of a worker, and names for a run and for a fitted worker."""
    measured, run, out = (folder / name for name in ("measured", "run", "out"))
    measured.write_text(json.dumps(worker))
    return measured, run, out


def simulated(path: Path, worker: Path, *flags: str) -> dict[str, float]:
    command = [*LOAD, "--worker", str(worker), "--json", str(path), *flags]
    simulate_command(command, lambda _: None, lambda _: None)
    stage = json.loads(path.read_text())["stages"][0]
    return {f"{metric} {name}": stage[metric][name]
            for metric in ("ttft", "itl", "e2e") for name in ("p50", "p95")}  # fmt: skip


@pytest.mark.full
def test_a_fitted_worker_takes_what_the_measured_one_took(tmp_path: Path) -> None:
    measured, run, fitted = paths(tmp_path, WORKER)
    simulated(run, measured, "--rate", "1,4")
    said: list[str] = []
    assert fit_command(given([str(run), str(fitted), "--kv-tokens", "50000"]), said.append) == 0
    assert "root mean square" in said[-1]
    found = json.loads(fitted.read_text())
    assert found["kv_tokens"] == 50_000
    for name, value in WORKER.items():
        assert found[name] == pytest.approx(value, rel=0.2), name
    theirs = simulated(run, measured, "--rate", "3")
    ours = simulated(run, fitted, "--rate", "3")
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=0.05), name


def test_one_stage_does_not_make_a_worker(tmp_path: Path) -> None:
    worker, run, out = paths(tmp_path, WORKER)
    simulated(run, worker, "--rate", "1")
    with pytest.raises(FleetError, match="two stages or more"):
        fit_command(given([str(run), str(out)]), print)


QUICK = {**WORKER, "prefill_tokens_per_second": 9e6}
UNDETERMINED = {
    "one length": (
        WORKER,
        ("--rate", "0.5,1", "--input-tokens", "96"),
        "the prompts do not vary: all have 96 tokens",
    ),
    "one load": (WORKER, ("--concurrency", "3,3"), "the load does not vary"),
    "prompts that cost nothing": (QUICK, ("--rate", "1,4"), "prompts take 0.0% of the time"),
}


@pytest.mark.parametrize("name", some(UNDETERMINED))
def test_a_run_without_enough_variation_is_refused(name: str, tmp_path: Path) -> None:
    worker, flags, why = UNDETERMINED[name]
    measured, run, out = paths(tmp_path, worker)
    simulated(run, measured, *flags)
    with pytest.raises(FleetError, match=why):
        fit_command(given([str(run), str(out)]), print)
    assert not out.exists()


def test_a_run_is_not_replaced_by_its_fit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text('{"stages": []}')
    with pytest.raises(UsageError, match="FILE would replace the run"):
        fit_command(given([str(run), str(tmp_path / ".." / tmp_path.name / "run")]), print)
    with pytest.raises(UsageError, match="is no folder"):
        fit_command(given([str(run), str(run / "out")]), print)


@pytest.mark.parametrize("text", ["", "[]", '{"stages": 3}'])
def test_a_file_that_is_no_run_is_refused(text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text(text)
    with pytest.raises(UsageError, match="is no JSON of `pointsman bench`"):
        fit_command(given([str(run), str(tmp_path / "out")]), print)


@pytest.mark.full
def test_a_poor_fit_says_what_to_check(tmp_path: Path) -> None:
    """No simulated worker has gaps between tokens that shrink under load."""
    measured, run, out = paths(tmp_path, WORKER)
    simulated(run, measured, "--rate", "1,4")
    document = json.loads(run.read_text())
    for name in ("mean", "p50", "p95", "p99", "max"):
        document["stages"][1]["itl"][name] /= 20
    run.write_text(json.dumps(document))
    said: list[str] = []
    assert fit_command(given([str(run), str(out)]), said.append) == 0
    assert "check --workers and --kv-tokens" in said[-1]
