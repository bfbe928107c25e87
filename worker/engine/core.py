"""The engine without its process: schedule, execute, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from worker.engine.messages import AddRequest, RequestOutput, StepOutputs
from worker.engine.scheduler import Scheduler
from worker.executor.interface import Executor


class EngineCore:
    """Runs one scheduler on one executor, a step at a time. `clock` is monotonic, in seconds."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._ended: list[RequestOutput] = []  # refused or aborted since the last step

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to run or to tell."""
        return self._scheduler.has_unfinished or bool(self._ended)

    def add(self, request: AddRequest) -> None:
        """Queue a request. One that can never run is answered by the next `step`."""
        refused = self._scheduler.add(request)
        if refused is not None:
            self._ended.append(refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks now; the next `step` tells. Unknown ids pass."""
        for request_id in request_ids:
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._ended.append(output)

    def step(self) -> StepOutputs | None:
        """Run one step to its end and return all there is to tell; None without work.

        Whatever the executor raises goes through: the KV cache is in doubt then, and the engine
        must end.
        """
        if not self.has_work:
            return None
        outputs, self._ended = self._ended, []
        step = self._scheduler.schedule(self._clock())
        if step is None:
            return StepOutputs(outputs, self._scheduler.stats())
        result = self._executor.execute(step)
        outputs += self._scheduler.update(step, result, self._clock())
        return StepOutputs(outputs, self._scheduler.stats(), step.num_tokens)

    def shutdown(self) -> None:
        """Give the device back."""
        self._executor.shutdown()
