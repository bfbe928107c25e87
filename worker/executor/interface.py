"""The interface between the engine and what owns the device."""

from __future__ import annotations

from typing import Protocol

from worker.types import ModelOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps. Stateless but for the KV cache: everything a step needs is in its
    `SchedulerOutput`.
    """

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step to its end. Every sequence with `samples` has exactly as many draws in the
        result, or stands in `failed`. `takes_pending` is never set: the pipeline has filled in the
        token. Called from one thread at a time, not always the same one.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 the KV cache (and the device's copy of the weights), level 2
        the weights too. Only between steps; `execute` must not be called until `wake`.
        """
        ...

    def wake(self, tags: frozenset[str]) -> None:
        """Take back "weights", "kv_cache" or both after `sleep`; the KV cache comes back empty."""
        ...

    def shutdown(self) -> None:
        """Give the device back. Idempotent."""
        ...
