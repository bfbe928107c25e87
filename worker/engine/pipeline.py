"""Runs the steps of an executor one after the other, the next one handed in early or not.

Theory of operation ------------------- A step may be submitted before the one in front of it has
ended. Where it then says `takes_pending`, the token is not known yet: the executor takes it from
what the step before drew. The share of a sequence whose draw failed there has no meaning; the
scheduler ends it when it sees that result, and discards its result from the next step.

Steps run strictly in the order of `submit`, each after the one before it has ended. The scheduler
relies on that when it gives away blocks that a step in flight still writes.

No step is run behind one that the device has too little memory for: the tokens that it was to draw
are missing. Only block copies, loads and saves are made, since each is ordered once: so a step that
is taken back leaves nothing to undo.
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
    """Steps in, results out, in the same order. `depth` is how many may be in it at once."""

    depth: int

    def submit(self, step: SchedulerOutput) -> None:
        """Hand in the next step. Never blocks on the executor."""
        ...

    def wait(self) -> ModelOutput:
        """The result of the oldest step that was submitted and not waited for, when it is there.

        Raises `DeviceMemoryError` where it did not run for lack of memory: then no step is left in
        the pipeline, and all block copies are made. Raises whatever else the executor raised; the
        pipeline can only be shut down then.
        """
        ...

    def shutdown(self) -> None:
        """End what runs and give the device back. Idempotent."""
        ...


class InlinePipeline:
    """Runs each step within `wait`, on the caller's thread. Implements `Pipeline`."""

    def __init__(self, executor: Executor, depth: int = 1) -> None:
        self.depth = depth
        self._executor = executor
        self._steps: deque[SchedulerOutput] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        """Hold the step until `wait`."""
        self._steps.append(step)

    def wait(self) -> ModelOutput:
        """Run the oldest step."""
        try:
            return execute(self._executor, self._steps.popleft())
        except DeviceMemoryError:
            while self._steps:
                execute(self._executor, _copies_of(self._steps.popleft()))
            raise

    def shutdown(self) -> None:
        """Drop the steps that were not run."""
        self._steps.clear()
        self._executor.shutdown()


class OverlappedPipeline:
    """Submits the steps on a thread of its own, two deep, and collects them on the caller's, which
    thus works on one step's results while the next one runs. Implements `Pipeline`.
    """

    depth = 2

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._running: deque[Future[Ticket]] = deque()
        self._failure: Exception | None = None  # belongs to the thread, while it has steps

    def submit(self, step: SchedulerOutput) -> None:
        """Hand the step to the thread."""
        self._running.append(self._thread.submit(self._run, step))

    def wait(self) -> ModelOutput:
        """Block until the oldest step has ended."""
        try:
            return self._running.popleft().result().collect()
        except DeviceMemoryError:
            while self._running:  # their results do not count
                with suppress(DeviceMemoryError):
                    self._running.popleft().result().collect()
            self._failure = None
            raise

    def shutdown(self) -> None:
        """Wait for the step that runs, drop the rest."""
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
