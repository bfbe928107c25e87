"""Runs the steps of an executor strictly in the order of `submit`, ahead of their results or not.

The scheduler relies on that order when it gives away blocks that a step in flight still writes.
After a step that lacked memory no later step is run, as tokens are missing. Only the block copies,
loads and saves are made, since each is ordered once.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from worker.errors import DeviceMemoryError
from worker.executor.interface import Executor, Ticket, execute
from worker.types import ModelOutput, SchedulerOutput


class Pipeline(Protocol):
    depth: int

    def submit(self, step: SchedulerOutput) -> None:
        """Queue the next step. Never blocks on the executor."""

    def wait(self) -> ModelOutput:
        """Wait for the oldest step that was submitted and not waited for; return its result.

        Raises `DeviceMemoryError` if it did not run for lack of memory: then no step is left in the
        pipeline, and all block copies are made. After any other error the pipeline can only be shut
        down.
        """

    def shutdown(self) -> None:
        """End the steps that run and give the device back. Idempotent."""


class InlinePipeline:
    """Runs each step within `wait`, on the caller's thread. Implements `Pipeline`."""

    def __init__(self, executor: Executor, depth: int = 1) -> None:
        self.depth = depth
        self._executor = executor
        self._steps: deque[SchedulerOutput] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        self._steps.append(step)

    def wait(self) -> ModelOutput:
        try:
            return execute(self._executor, self._steps.popleft())
        except DeviceMemoryError:
            while self._steps:
                execute(self._executor, _copies_of(self._steps.popleft()))
            raise

    def shutdown(self) -> None:
        self._steps.clear()
        self._executor.shutdown()


class OverlappedPipeline:
    """Submits steps on its own thread, two deep; collects them on the caller's. A `Pipeline`."""

    depth = 2

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._running: deque[Future[Ticket]] = deque()
        self._failure: Exception | None = None  # belongs to the thread, while it has steps

    def submit(self, step: SchedulerOutput) -> None:
        self._running.append(self._thread.submit(self._run, step))

    def wait(self) -> ModelOutput:
        try:
            return self._running.popleft().result().collect()
        except DeviceMemoryError:
            while self._running:  # their results do not count
                with suppress(DeviceMemoryError):
                    self._running.popleft().result().collect()
            self._failure = None
            raise

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._running.clear()
        self._executor.shutdown()

    def _run(self, step: SchedulerOutput) -> Ticket:
        if self._failure is not None:
            if isinstance(self._failure, DeviceMemoryError):
                self._executor.submit(_copies_of(step))
            raise self._failure
        try:
            return self._executor.submit(step)
        except Exception as error:
            self._failure = error
            raise


def _copies_of(step: SchedulerOutput) -> SchedulerOutput:
    return replace(step, sequences=())
