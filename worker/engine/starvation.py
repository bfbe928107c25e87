"""For how long a process was kept from running: it was ready, and the cores were taken.

Theory of operation
-------------------
By the wall clock a starved process looks like a hung one. The kernel keeps two sums for each
thread: the time it ran, and the time it was ready to run and waited for a core. In all other time
it slept: until a lock, a device or another thread let it go on. Over an interval

    counted = max(CPU time of the busiest thread, interval - waits of all threads)
    starved = interval - counted

The waits are those of all threads because a step needs several of them: while one that it needs
waits for a core, the others sleep at a barrier, and seem to be stuck. The busiest thread's CPU time
counts in any case: an endless loop on a busy machine waits most of the time as well, and is found
when its own CPU time is beyond the budget. It is the busiest one's and not the sum, because threads
that share a step take, on a quiet machine, as long as the one with the largest share.

So on a quiet machine everything counts: a thread that hangs sleeps, one in an endless loop runs,
and one that was stopped by a signal does neither. A thread that is throttled by the CPU quota of
its cgroup is ready, thus waits.

The kernel adds a wait to its sum when the wait ends, which may be seconds later. A thread that is
ready at both ends of an interval therefore counts as having waited whenever it did not run. The
sum of a later interval then contains that wait again; a thread's waits are bounded by what its CPU
time leaves of the interval, so that less than one interval is wrongly taken for starved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Of one thread: how long it has run and waited for a core since it began, and whether it runs
    or waits now.
    """

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
    """For how much of the interval between two readings a process was kept from running. Pure.

    `stopped_seconds` of it are known to be lost for another reason. Without both readings that is
    all there is to know.
    """
    if before is None or after is None:
        return min(stopped_seconds, elapsed_seconds)
    busiest = waited = 0.0
    for thread_id, now in after.items():
        then = before.get(thread_id, _BEGINNING)
        cpu = now.cpu_seconds - then.cpu_seconds
        idle = max(0.0, elapsed_seconds - cpu)
        is_waiting = then.is_ready and now.is_ready
        waited += idle if is_waiting else min(idle, now.waited_seconds - then.waited_seconds)
        busiest = max(busiest, cpu)
    return max(0.0, min(max(waited, stopped_seconds), elapsed_seconds - busiest))


def read_threads(tasks: str, but: int | None = None) -> Threads | None:
    """The times of all threads of a process, `but` one; `tasks` is its directory `/proc/PID/task`.
    None where the kernel does not say: on another system than Linux, without scheduler statistics,
    and when there is no such process.
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
                state = file.read().rpartition(b") ")[2][:1]
        except (OSError, ValueError):  # the thread has ended, or the kernel keeps no such sums
            continue
        times = ThreadTimes(int(cpu) * _NANOSECOND, int(waited) * _NANOSECOND, state == b"R")
        threads[int(name)] = times
    # A kernel that keeps no sums may show zeros instead of no file.
    if not any(times.cpu_seconds for times in threads.values()):
        return None
    return {thread_id: times for thread_id, times in threads.items() if thread_id != but}
