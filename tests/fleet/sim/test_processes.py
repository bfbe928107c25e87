"""Jobs in several processes: ordered results, and one end for all."""

import os
import signal
import time
from pathlib import Path

import pytest

from fleet.errors import FleetError, UsageError
from fleet.sim.processes import Processes

Job = tuple[str, Path]


def work(job: Job) -> tuple[str, int, bool]:
    """Do what the job says; return the process, and whether a Ctrl-C would reach it."""
    kind, folder = job
    if kind == "waits":
        (folder / "written").write_text(str(os.getpid()))
        (folder / "written").rename(folder / "pid")
        while not (folder / "go").exists():
            time.sleep(0.01)
    elif kind == "goes":
        (folder / "go").touch()
    elif kind in ("dies", "refuses"):
        while not (folder / "pid").exists():
            time.sleep(0.01)
        if kind == "refuses":
            raise UsageError("that cannot be")
        os.kill(os.getpid(), signal.SIGKILL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return kind, os.getpid(), signal.SIGINT not in blocked


def test_results_are_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    ended: list[str] = []
    jobs = [(kind, tmp_path) for kind in ("waits", "passes", "passes", "goes")]
    with Processes(work, 2) as processes:
        results = list(processes.results(jobs, lambda job: ended.append(job[0])))
        again = list(processes.results(jobs[1:3], lambda _: None))
    assert [kind for kind, _, _ in results] == ["waits", "passes", "passes", "goes"]
    assert ended[:2] == ["passes", "passes"]
    used = {pid for _, pid, _ in results}
    assert len(used) == 2
    assert os.getpid() not in used
    assert {pid for _, pid, _ in again} <= used
    assert not any(is_reached for *_, is_reached in results)


def test_one_job_needs_no_process(tmp_path: Path) -> None:
    for count, jobs in ((2, 1), (1, 2)):
        with Processes(work, count) as processes:
            results = list(processes.results([("passes", tmp_path)] * jobs, lambda _: None))
        assert {pid for _, pid, _ in results} == {os.getpid()}


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("dies", FleetError, "a process of the simulation ended by signal 9"),
        ("refuses", UsageError, "that cannot be"),
    ],
)
def test_a_failure_in_one_process_ends_the_others(
    kind: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text), Processes(work, 2) as processes:
        list(processes.results([("waits", tmp_path), (kind, tmp_path)], lambda _: None))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_interruption_ends_all(tmp_path: Path) -> None:
    def interrupted(_: Job) -> None:
        raise KeyboardInterrupt

    jobs = [("passes", tmp_path), ("waits", tmp_path), ("waits", tmp_path)]
    with pytest.raises(KeyboardInterrupt), Processes(work, 2) as processes:
        list(processes.results(jobs, interrupted))
