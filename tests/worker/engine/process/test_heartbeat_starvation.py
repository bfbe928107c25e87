"""A process that waits for a core is distinguished from a hung and from an endless one."""

import time
from pathlib import Path

import pytest

from tests.support.busy_loops import busy_loops, counts_waits, run_for
from worker.engine.process.heartbeat import Threads, ThreadTimes, read_threads, starved_seconds

ASLEEP, READY = (0.0, 0.0, False), (0.0, 0.0, True)


def threads(*times: tuple[float, float, bool]) -> Threads:
    """Return threads that ran and waited for these times, and are ready or not."""
    return {number: ThreadTimes(*each) for number, each in enumerate(times)}


@pytest.mark.parametrize(
    ("before", "after", "starved"),
    [
        pytest.param([ASLEEP, ASLEEP], [ASLEEP, ASLEEP], 0.0, id="hangs"),
        pytest.param([ASLEEP], [(0.1, 0.0, False)], 0.0, id="hangs from now and then"),
        pytest.param([READY], [(10.0, 0.0, True)], 0.0, id="endless loop"),
        pytest.param([READY], [(1.0, 9.0, True)], 9.0, id="endless loop, starved"),
        pytest.param([READY] * 3, [(4.0, 6.0, True)] * 3, 6.0, id="endless loops, starved"),
        pytest.param([READY], [(2.5, 7.5, False)], 7.5, id="throttled"),
        pytest.param([READY], [(2.5, 0.0, True)], 7.5, id="wait that is not over"),
        pytest.param([READY], [READY], 10.0, id="one wait for all of it"),
        pytest.param([ASLEEP], [(1.0, 25.0, False)], 9.0, id="end of a wait that began earlier"),
        pytest.param([ASLEEP], [READY], 0.0, id="ready just now"),
        pytest.param([ASLEEP] * 2, [ASLEEP, (1.0, 8.0, False)], 8.0, id="others wait at a barrier"),
        pytest.param(
            [ASLEEP] * 2, [(1.0, 3.0, False), (2.0, 4.0, False)], 7.0, id="one after the other"
        ),
        pytest.param(
            [ASLEEP] * 2, [(9.0, 0.0, False), (1.0, 8.0, False)], 1.0, id="one waits, one runs"
        ),
        pytest.param([], [(1.0, 8.0, True)], 8.0, id="a thread that has begun"),
        pytest.param([READY, ASLEEP], [(1.0, 8.0, True)], 9.0, id="a thread that has ended"),
    ],
)
def test_time_counts_in_which_a_thread_ran_or_all_slept(
    before: list[tuple[float, float, bool]], after: list[tuple[float, float, bool]], starved: float
) -> None:
    assert starved_seconds(10.0, threads(*before), threads(*after)) == pytest.approx(starved)


@pytest.mark.parametrize(
    ("before", "after", "stopped", "starved"),
    [
        (None, None, 0.0, 0.0),
        (None, None, 8.0, 8.0),
        (None, None, 12.0, 10.0),
        (threads(ASLEEP), None, 8.0, 8.0),
        (None, threads(ASLEEP), 8.0, 8.0),
        (threads(ASLEEP), threads((0.0, 9.0, False)), 8.0, 9.0),
        (threads(ASLEEP), threads((9.0, 0.0, False)), 8.0, 1.0),
    ],
)
def test_a_process_that_was_stopped_did_not_run_either(
    before: Threads | None, after: Threads | None, stopped: float, starved: float
) -> None:
    assert starved_seconds(10.0, before, after, stopped) == pytest.approx(starved)


def lay(tasks: Path, thread_id: int, schedstat: str | None, name: str, state: str) -> None:
    (tasks / str(thread_id)).mkdir(parents=True)
    (tasks / str(thread_id) / "stat").write_text(f"{thread_id} ({name}) {state} 1 1 1 0\n")
    if schedstat is not None:
        (tasks / str(thread_id) / "schedstat").write_text(schedstat)


def test_the_kernels_sums_are_read(tmp_path: Path) -> None:
    lay(tmp_path, 7, "1500000000 250000000 12\n", "python", "R")
    lay(tmp_path, 8, "500000000 0 3\n", "a) R (b", "S")
    lay(tmp_path, 9, "500000000 0 3\n", "heartbeat", "R")
    assert read_threads(str(tmp_path), but=9) == {
        7: ThreadTimes(pytest.approx(1.5), pytest.approx(0.25), True),
        8: ThreadTimes(pytest.approx(0.5), 0.0, False),
    }


@pytest.mark.parametrize("schedstat", [None, "0 0 0\n", ""])
def test_a_kernel_without_sums_says_nothing(tmp_path: Path, schedstat: str | None) -> None:
    lay(tmp_path, 7, schedstat, "python", "R")
    assert read_threads(str(tmp_path)) is None


@pytest.mark.skipif(not counts_waits(), reason="the kernel keeps no sums of waits")
def test_an_endless_loop_that_shares_a_core_is_starved() -> None:
    """Four loops on a core: each runs for a quarter of the time at most."""
    with busy_loops(4) as (one, *_):
        tasks = f"/proc/{one}/task"
        began, before = time.monotonic(), read_threads(tasks)
        run_for(one, 0.2)
        after, ended = read_threads(tasks), time.monotonic()
    assert starved_seconds(ended - began, before, after) > (ended - began) / 2
