"""Processes that take a core away from others."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def counts_waits() -> bool:
    """The kernel says how long a thread waited for a core."""
    return Path("/proc/self/schedstat").exists()


def crowded_core() -> int:
    """The core that all loops share."""
    return min(os.sched_getaffinity(0))


def crowd(process_id: int) -> None:
    """Move every thread of a process to that core."""
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {crowded_core()})


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[list[int]]:
    """Endless loops on one and the same core, each in a process; their ids, when all run."""
    code = f"import os; os.sched_setaffinity(0, {{{crowded_core()}}})\nprint(flush=True)\n"
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(number):
            process = subprocess.Popen(
                [sys.executable, "-Sc", code + "while True: pass"], stdout=subprocess.PIPE
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            process.stdout.readline()
        yield [process.pid for process in running]


def cpu_seconds(process_id: int) -> float:
    """CPU seconds of a process's first thread so far."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0]) / 1e9


def run_for(process_id: int, seconds: float) -> None:
    """Wait until a process has run for so long. Raises OSError when it ends before."""
    enough = cpu_seconds(process_id) + seconds
    while cpu_seconds(process_id) < enough:
        time.sleep(0.01)
