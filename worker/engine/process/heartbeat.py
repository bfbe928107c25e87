"""Signs of life of the engine process, from a thread of its own.

A step is late beyond a budget: a multiple of what steps of that many tokens have taken so far. Time
in which this process could not run is not held against it. The kernel sums for each thread the time
it ran, and the time it was ready and waited for a core. Over an interval

    counted = max(CPU time of the busiest thread, interval - waits of all threads)
    starved = interval - counted

The waits are those of all threads because while one waits for a core, the others sleep at a barrier
and seem to be stuck. The busiest thread's CPU time counts in any case: an endless loop on a busy
machine waits most of the time as well. The kernel adds a wait when it ends, so less than one
interval is wrongly taken for starved.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from worker.engine.messages import Heartbeat

_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """The times that a thread ran and waited for a core, and whether it runs or waits now."""

    cpu_seconds: float = 0.0
    waited_seconds: float = 0.0
    is_ready: bool = False


Threads = Mapping[int, ThreadTimes]  # by thread id
_BEGINNING = ThreadTimes()


def starved_seconds(
    elapsed_seconds: float,
    before: Threads | None,
    after: Threads | None,
    stopped_seconds: float = 0.0,
) -> float:
    """Return the part of the interval between two readings in which a process waited for a core.

    `stopped_seconds` of it are known to be lost for another reason. Without both readings no more
    is known.
    """
    if before is None or after is None:
        return min(stopped_seconds, elapsed_seconds)
    busiest = waited = 0.0
    for thread_id, now in after.items():
        then = before.get(thread_id, _BEGINNING)
        cpu = now.cpu_seconds - then.cpu_seconds
        idle = max(0.0, elapsed_seconds - cpu)
        # The kernel adds a wait when it ends: a thread ready at both readings may still wait.
        is_waiting = then.is_ready and now.is_ready
        waited += idle if is_waiting else min(idle, now.waited_seconds - then.waited_seconds)
        # Not the sum: threads that share a step take as long as the busiest of them.
        busiest = max(busiest, cpu)
    return max(0.0, min(max(waited, stopped_seconds), elapsed_seconds - busiest))


def read_threads(tasks: str, but: int | None = None) -> Threads | None:
    """Return the times of all threads of a process, `but` one; `tasks` is its `/proc/PID/task`.
    Return None if the kernel has no scheduler statistics, or no such process.
    """
    threads: dict[int, ThreadTimes] = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return None
    for name in names:
        try:
            with open(f"{tasks}/{name}/schedstat", "rb") as file:
                cpu, waited = file.read().split()[:2]
            with open(f"{tasks}/{name}/stat", "rb") as file:
                # The name in parentheses before the state may hold blanks and parentheses.
                state = file.read().rpartition(b") ")[2][:1]
        except (OSError, ValueError):  # the thread has ended, or the kernel keeps no such sums
            continue
        times = ThreadTimes(int(cpu) * _NANOSECOND, int(waited) * _NANOSECOND, state == b"R")
        threads[int(name)] = times
    # A kernel that keeps no sums may show zeros instead of no file.
    if not any(times.cpu_seconds for times in threads.values()):
        return None
    return {thread_id: times for thread_id, times in threads.items() if thread_id != but}


logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.2
# Commands may move a model's weights, which takes a time that is not known beforehand.
COMMAND_SECONDS = 120.0
_WEIGHT = 0.2  # of the newest step in the running mean
_SIZES = 32  # steps are classed by the number of binary digits of their token count


class StepBudget:
    """Learns how long steps take, in seconds, by size, and says when one takes too long.

    Steps are grouped by the power of two of their token count. A size never seen is judged by its
    neighbours. The very first step may take `warm_up_seconds`, and so may the first one of every
    size while `compiles_kernels`: a device may compile a kernel at its first use.
    """

    compiles_kernels = False

    def __init__(self, least_seconds: float, factor: float, warm_up_seconds: float = 0.0) -> None:
        self.least_seconds = least_seconds
        self._factor = factor
        self._warm_up = max(warm_up_seconds, least_seconds)
        # By size: a token takes far longer in a step of one than in a prefill of thousands.
        self._per_token: list[float | None] = [None] * (_SIZES + 1)

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _size(num_tokens)
        mean, new = self._per_token[size], seconds / num_tokens
        self._per_token[size] = new if mean is None else mean + _WEIGHT * (new - mean)

    def seconds(self, num_tokens: int, modelled_seconds: float = 0.0) -> float:
        """Return how long a step may take; `modelled_seconds` is its known duration, or 0."""
        return max(self._usual(num_tokens), self._factor * modelled_seconds)

    def _usual(self, num_tokens: int) -> float:
        size = _size(num_tokens)
        per_token = self._per_token[size]
        if per_token is not None:
            return max(self.least_seconds, self._factor * per_token * num_tokens)
        guess = self._guess(num_tokens, size)
        if guess is None:
            return self._warm_up
        least = self._warm_up if self.compiles_kernels else self.least_seconds
        return max(least, self._factor * guess)

    def _guess(self, num_tokens: int, size: int) -> float | None:
        """Judge by neighbours: a step costs no more than a larger one, and no less per token."""
        for smaller in reversed(self._per_token[:size]):
            if smaller is not None:
                return smaller * num_tokens
        for larger, per_token in enumerate(self._per_token[size + 1 :], size + 1):
            if per_token is not None:
                return float(per_token * (1 << larger))
        return None


def _size(num_tokens: int) -> int:
    return min(max(1, num_tokens).bit_length(), _SIZES)


def _other_threads() -> Threads | None:
    """Read the threads of this process without the caller's, which no step needs."""
    return read_threads("/proc/self/task", but=threading.get_native_id())


class Pulse:
    """The state of the serving thread, which this thread and the heartbeat thread both read and
    write; each fact is one attribute, so that no lock is needed.
    """

    def __init__(
        self,
        budget: StepBudget,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], Threads | None] = _other_threads,
    ) -> None:
        self._budget = budget
        self._clock = clock
        self._read_threads = threads
        self._running_step: Callable[[], tuple[float, int] | None] = lambda: None
        self._modelled_seconds: Callable[[], float] = lambda: 0.0
        self._busy: tuple[float, float] | None = None  # since when, and for how long it may be
        self._progress = (0.0, 0.0)  # when there was some, and `_all_starved` then
        self._all_starved = 0.0  # seconds, of all beats
        # Of the heartbeat thread alone:
        self._beaten = clock()
        self._stepping = 0.0  # when a step was last seen to run
        self._since: float | None = None  # the beginning of what the last beat was about
        self._starved = 0.0  # seconds since then
        self._threads: Threads | None = None  # at the last beat

    def follow(
        self,
        running_step: Callable[[], tuple[float, int] | None],
        modelled_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Set the functions that return the start and tokens of the oldest step in flight, and its
        duration if the executor knows it (else 0). They are called from the heartbeat thread.
        """
        self._running_step = running_step
        self._modelled_seconds = modelled_seconds

    def idle(self) -> None:
        self._busy = None

    def working(self, *, commanded: bool = False) -> None:
        """Record the beginning of a turn of the loop, of each one while there is work. With
        `commanded` it may carry out a command, whose duration is not limited.
        """
        now = self._clock()
        if self._busy is None:
            self._progress = (now, self._all_starved)
        self._busy = (now, COMMAND_SECONDS if commanded else self._budget.least_seconds)

    def stepped(self, num_tokens: int) -> None:
        (since, starved_then), self._progress = self._progress, (self._clock(), self._all_starved)
        now, starved_now = self._progress
        if num_tokens > 0:
            lasted = now - since - (starved_now - starved_then)
            self._budget.observe(num_tokens, max(0.0, lasted))

    def beat(self, stopped_seconds: float = 0.0) -> Heartbeat:
        """Build the next heartbeat; called from the heartbeat thread. A step is timed from its
        start, anything else from the turn's beginning or from the last step that ran in it. The
        process was stopped for `stopped_seconds` since the last call.
        """
        now = self._clock()
        elapsed, self._beaten = now - self._beaten, now
        busy, step = self._busy, self._running_step()
        if busy is None:
            self._since = None
            return Heartbeat()
        since, allowed = max(busy[0], self._stepping), busy[1]
        if step is not None:
            self._stepping = now
            since, allowed = step[0], self._budget.seconds(step[1], self._modelled_seconds())
        self._count_starved(since, elapsed, stopped_seconds)
        return Heartbeat(max(0.0, now - since - self._starved - allowed), allowed)

    def _count_starved(self, since: float, elapsed: float, stopped: float) -> None:
        is_new = since != self._since
        # Most steps are too short to be met twice, and are not worth a reading of all threads.
        before, self._threads = self._threads, None if is_new else self._read_threads()
        starved = starved_seconds(elapsed, before, self._threads, stopped)
        self._all_starved += starved
        # What is new may have begun in the middle of the interval.
        self._starved = min(starved, self._beaten - since) if is_new else self._starved + starved
        self._since = since


def frozen_seconds(previous: float, now: float) -> float:
    """Return how long a process that beats every `HEARTBEAT_SECONDS` did not run between two beats:
    stopped by a signal, or frozen with its container or machine. 0 when the beat is almost on time.
    """
    late = now - previous - HEARTBEAT_SECONDS
    return late if late > HEARTBEAT_SECONDS else 0.0


class HeartbeatThread:
    def __init__(self, address: str, pulse: Pulse) -> None:
        self._address = address
        self._pulse = pulse
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        stalled = False
        previous = time.monotonic()
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.linger = 0
            socket.connect(self._address)
            while True:
                now = time.monotonic()
                beat = self._pulse.beat(frozen_seconds(previous, now))
                previous = now
                if beat.stalled_seconds > 0 and not stalled:
                    logger.error("no progress for longer than %.1f s", beat.budget_seconds)
                    faulthandler.dump_traceback(all_threads=True)
                stalled = beat.stalled_seconds > 0
                stamped = msgspec.structs.replace(beat, sent_seconds=time.monotonic())
                with suppress(zmq.Again):  # a client that takes nothing misses nothing new
                    socket.send(encode(stamped), zmq.DONTWAIT)
                if self._stopping.wait(HEARTBEAT_SECONDS):
                    return
