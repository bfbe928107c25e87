"""Runs independent jobs in several processes, with the same results as in one."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Generic, Self, TypeVar, cast

from fleet.errors import FleetError

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class Processes(Generic[J, R]):
    """Owns up to `count` processes, which start once there is more than one job; a context manager
    that ends them. The function, jobs and results are pickled.
    """

    def __init__(self, function: Callable[[J], R], count: int) -> None:
        self._function = function
        self._count = count
        self._workers: list[_Worker] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def results(self, jobs: Sequence[J], ended: Callable[[J], None]) -> Iterator[R]:
        """Yield results in the order of jobs; `ended` gets each ended job. Raises `FleetError`."""
        if min(self._count, len(jobs)) <= 1:
            for job in jobs:
                result = self._function(job)
                ended(job)
                yield result
            return
        while len(self._workers) < min(self._count, len(jobs)):
            self._workers.append(self._begun())
        found, num_yielded = dict[int, R](), 0
        for index, result in self._unordered(jobs):
            ended(jobs[index])
            found[index] = result
            while num_yielded in found:
                yield found.pop(num_yielded)
                num_yielded += 1

    def _unordered(self, jobs: Sequence[J]) -> Iterator[tuple[int, R]]:
        left = iter(enumerate(jobs))
        busy = dict[Connection, tuple[int, _Worker]]()
        idle = list(self._workers)
        while True:
            for worker, (index, job) in zip(idle, left, strict=False):
                _send(worker, job)
                busy[worker.pipe] = index, worker
            idle = []
            if not busy:
                return
            for ready in wait(list(busy)):
                index, worker = busy.pop(cast("Connection", ready))
                result = _received(worker)
                if isinstance(result, FleetError):
                    raise result
                idle.append(worker)
                yield index, cast("R", result)

    def _begun(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._function), daemon=True)
        # It inherits the mask: only this process handles Ctrl-C, and ends the others. Starting the
        # first one starts multiprocessing's tracker, which would undo the mask.
        ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that its death closes the pipe
        self._stack.callback(_end, process, ours)
        return _Worker(process, ours)


def _serve(pipe: Connection, function: Callable[[object], object]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        result: object
        try:
            result = function(job)
        except FleetError as error:
            result = error
        try:
            pipe.send(result)
        except BrokenPipeError:
            return


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)  # sys.exit would end this thread alone


def _send(worker: _Worker, job: object) -> None:
    try:
        worker.pipe.send(job)
    except BrokenPipeError:
        raise _death(worker) from None


def _received(worker: _Worker) -> object:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _death(worker) from None


def _death(worker: _Worker) -> FleetError:
    worker.process.join()
    status = worker.process.exitcode or 0
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return FleetError(
        f"a process of the simulation ended {how}; if memory was short, take --processes 1"
    )


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.terminate()
    process.join()
