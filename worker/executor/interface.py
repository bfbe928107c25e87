"""What the engine asks of whatever owns the device."""

from __future__ import annotations

from typing import Protocol

from worker.types import ModelOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps. Stateless but for the KV cache: everything a step needs is in its
    `SchedulerOutput`.
    """

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step to its end. A sequence with `sample` set has exactly one token in the
        result.
        """
        ...

    def shutdown(self) -> None:
        """Give the device back. Idempotent."""
        ...
