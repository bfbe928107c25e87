"""The worker's error tree, split by who is at fault."""

from dataclasses import dataclass

# The exit status of a process that an injected crash ends.
CRASH_STATUS = 70


class WorkerError(Exception): ...


class ConfigError(WorkerError):
    """Flags or environment that cannot work; the message names the flag and the fix."""


class ModelError(WorkerError):
    """A checkpoint or tokenizer that cannot be loaded; the message names file, key and reason."""


class DeviceMemoryError(WorkerError):
    """The device ran out of memory in a step, of which only the block copies took effect."""


class EngineDeadError(WorkerError):
    """The engine process ended; no request can be served until it is back."""


class IntegrityError(WorkerError):
    """Bookkeeping contradicts itself: a bug, and its state can no longer be trusted."""


class UnknownSequenceError(WorkerError):
    """A sequence id that holds no blocks."""


class KvTransferError(WorkerError):
    """KV could not be fetched from another engine; it is computed instead."""


@dataclass(eq=False)
class RequestError(WorkerError):
    """The client's request is wrong. `param` names the field, `status` is the HTTP status."""

    message: str
    param: str | None = None
    status: int = 400
    type: str = "BadRequestError"

    def __post_init__(self) -> None:
        super().__init__(self.message)


def root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of an exception group: the failure that ended a task group."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
