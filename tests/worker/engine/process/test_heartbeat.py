"""A step may take several times its usual time; a wait for a core is no hang."""

import time
from pathlib import Path

import pytest

from tests.support.busy_loops import busy_loops, counts_waits, run_for
from worker.engine.messages import Heartbeat
from worker.engine.process.heartbeat import (
    COMMAND_SECONDS,
    HEARTBEAT_SECONDS,
    Pulse,
    StepBudget,
    Threads,
    ThreadTimes,
    frozen_seconds,
    read_threads,
    starved_seconds,
)


class Watched:
    """A pulse with a made-up clock, step and thread, which is asleep unless it runs or waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.running: tuple[float, int] | None = None
        self.cpu_seconds = self.waited_seconds = 1.0
        self.pulse = Pulse(StepBudget(2.0, 4.0), lambda: self.now, self.threads)
        self.pulse.follow(lambda: self.running)

    def threads(self) -> Threads:
        return {1: ThreadTimes(self.cpu_seconds, self.waited_seconds)}


@pytest.fixture
def it() -> Watched:
    return Watched()


def test_short_steps_share_the_least_budget() -> None:
    budget = StepBudget(2.5, 4.0)
    budget.observe(1, 0.02)
    assert budget.seconds(1) == 2.5


def test_a_size_is_judged_by_its_own_steps() -> None:
    budget = StepBudget(0.1, 4.0)
    budget.observe(1024, 1.0)
    budget.observe(1, 0.05)
    assert budget.seconds(1024) == pytest.approx(4.0)
    assert budget.seconds(1536) == pytest.approx(6.0)
    assert budget.seconds(1) == pytest.approx(0.2)


def test_a_size_never_seen_is_judged_by_its_neighbours() -> None:
    budget = StepBudget(0.1, 4.0)
    budget.observe(1, 0.01)
    assert budget.seconds(2000) == pytest.approx(80.0)
    other = StepBudget(0.1, 4.0)
    other.observe(100, 1.0)
    assert other.seconds(3) == pytest.approx(4 * 0.01 * 128)


def test_the_first_step_has_time_to_warm_up() -> None:
    budget = StepBudget(0.5, 4.0, warm_up_seconds=60.0)
    assert budget.seconds(1) == budget.seconds(2048) == 60.0
    budget.observe(1, 0.01)
    assert budget.seconds(1) == 0.5
    assert budget.seconds(7) == 0.5


def test_first_steps_of_a_size_have_time_to_compile() -> None:
    budget = StepBudget(0.5, 4.0, warm_up_seconds=60.0)
    budget.compiles_kernels = True
    budget.observe(1, 0.01)
    assert budget.seconds(1) == 0.5
    assert budget.seconds(7) == 60.0


def test_an_idle_engine_never_stalls(it: Watched) -> None:
    it.pulse.working()
    it.pulse.idle()
    it.now += 1e6
    assert it.pulse.beat() == Heartbeat(0.0)


def test_a_step_stalls_when_its_budget_is_over(it: Watched) -> None:
    it.pulse.working()
    it.running = (101.0, 1)
    it.now = 103.0
    assert it.pulse.beat().stalled_seconds == 0.0
    it.now = 104.5
    assert it.pulse.beat() == Heartbeat(1.5, 2.0)
    it.running = None
    it.pulse.stepped(1)
    it.pulse.working()
    assert it.pulse.beat().stalled_seconds == 0.0


def test_a_long_prefill_does_not_stall(it: Watched) -> None:
    it.pulse.working()
    it.now += 8.0
    it.pulse.stepped(2048)
    it.pulse.working()
    it.running = (it.now, 2048)
    it.now += 30.0
    assert it.pulse.beat().stalled_seconds == 0.0
    it.now += 3.0
    assert it.pulse.beat().stalled_seconds == pytest.approx(1.0)


def test_time_between_steps_is_not_learned(it: Watched) -> None:
    it.pulse.working()
    it.now += 1.0
    it.pulse.stepped(1)
    it.pulse.idle()
    it.now += 1000.0
    it.pulse.working()
    it.now += 1.0
    it.pulse.stepped(1)
    it.pulse.working()
    it.running = (it.now, 1)
    it.now += 5.0
    assert it.pulse.beat() == Heartbeat(1.0, 4.0)


def test_a_loop_that_hangs_outside_of_steps_stalls(it: Watched) -> None:
    it.pulse.working()
    it.now += 2.5
    assert it.pulse.beat() == Heartbeat(0.5, 2.0)


def test_a_command_may_take_long(it: Watched) -> None:
    """Moving weights is no stall, and the step before it has its own budget."""
    it.pulse.working(commanded=True)
    it.now += 60.0
    assert it.pulse.beat().stalled_seconds == 0.0
    it.running = (it.now, 1)
    it.now += 3.0
    assert it.pulse.beat() == Heartbeat(1.0, 2.0)
    it.running = None
    it.now += COMMAND_SECONDS + 1.0
    assert it.pulse.beat().stalled_seconds == 1.0


def test_a_step_known_to_be_long_does_not_stall(it: Watched) -> None:
    modelled = [6.0]
    it.pulse.follow(lambda: it.running, lambda: modelled[0])
    it.pulse.working()
    it.running = (it.now, 1)
    it.now += 24.0
    assert it.pulse.beat() == Heartbeat(0.0, 24.0)
    modelled[0] = 0.0
    assert it.pulse.beat().stalled_seconds == pytest.approx(22.0)


def test_time_when_nothing_ran_is_no_steps_fault(it: Watched) -> None:
    """The worker was stopped (Ctrl-Z, a frozen container): the step continues from where it was."""
    it.pulse.working()
    it.running = (it.now, 1)
    it.now += 9.0
    assert it.pulse.beat(8.0).stalled_seconds == 0.0
    it.now += 2.0
    assert it.pulse.beat() == Heartbeat(pytest.approx(1.0), 2.0)
    it.now += 0.5
    assert it.pulse.beat(0.5) == Heartbeat(pytest.approx(1.0), 2.0)


def test_a_step_that_began_later_has_no_use_of_it(it: Watched) -> None:
    it.pulse.working()
    it.now += 9.0
    it.pulse.beat(8.0)
    it.running = (it.now, 1)
    it.now += 5.0
    assert it.pulse.beat() == Heartbeat(3.0, 2.0)


def beats(it: Watched, seconds: int, *, cpu: float, waited: float) -> float:
    """Return the stall of the last of many beats; `cpu` and `waited` are by the second."""
    stalled = it.pulse.beat().stalled_seconds
    for _ in range(4 * seconds):
        it.now += 0.25
        it.cpu_seconds += cpu / 4
        it.waited_seconds += waited / 4
        stalled = it.pulse.beat().stalled_seconds
    return stalled


@pytest.mark.parametrize(
    ("cpu", "waited", "stalled"),
    [(0.0, 0.0, 18.0), (1.0, 0.0, 18.0), (0.01, 0.99, 0.0), (0.25, 0.75, 3.0), (0.0, 0.5, 8.0)],
    ids=["asleep", "endless loop", "starved", "endless loop, starved", "half of it asleep"],
)
def test_waiting_for_a_core_does_not_stall_a_step(
    it: Watched, cpu: float, waited: float, stalled: float
) -> None:
    it.pulse.working()
    it.running = (it.now, 1)
    found = beats(it, 20, cpu=cpu, waited=waited)
    # At the first two beats of a step nothing is known of its threads.
    assert stalled <= found <= stalled + 0.25


def test_waits_for_cores_teach_nothing(it: Watched) -> None:
    """After a starved step of 40 s, one that hangs is noticed as soon as before it."""
    it.pulse.working()
    it.running = (it.now, 1)
    assert beats(it, 40, cpu=0.0, waited=1.0) == 0.0
    it.pulse.stepped(1)
    it.pulse.working()
    it.running = (it.now, 1)
    assert beats(it, 5, cpu=0.0, waited=0.0) == 3.0


def test_work_after_a_long_step_begins_at_its_end(it: Watched) -> None:
    """The outputs of a step of 30 s may take as long, and are not overdue at once."""
    it.pulse.follow(lambda: it.running, lambda: 30.0)
    it.pulse.working()
    it.running = (it.now, 2048)
    it.now += 30.0
    assert it.pulse.beat().stalled_seconds == 0.0
    it.running = None
    assert it.pulse.beat().stalled_seconds == 0.0
    it.now += 3.0
    assert it.pulse.beat() == Heartbeat(1.0, 2.0)


@pytest.mark.parametrize(
    ("gap", "frozen"),
    [(HEARTBEAT_SECONDS, 0.0), (1.9 * HEARTBEAT_SECONDS, 0.0), (8.0, 8.0 - HEARTBEAT_SECONDS)],
)
def test_a_beat_that_is_far_too_late_shows_a_freeze(gap: float, frozen: float) -> None:
    """A busy machine delays a beat a little; only a stopped process misses several."""
    assert frozen_seconds(50.0, 50.0 + gap) == pytest.approx(frozen)


ASLEEP, READY = (0.0, 0.0, False), (0.0, 0.0, True)


def threads(*times: tuple[float, float, bool]) -> Threads:
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
