"""The API's interface to the engine; `EngineClient` implements it."""

from typing import Protocol

from worker.engine.messages import AddRequest, Command, CommandReply, RequestOutput
from worker.types import EngineStats


class OutputStream(Protocol):
    """The outputs of one sequence, for one consumer at a time."""

    @property
    def request_id(self) -> str:
        """The sequence's id: the request's own, or one of its `branch_ids`."""

    async def next(self) -> RequestOutput:
        """Return the tokens since the last call, which are of several steps if the consumer is
        slow. Not called again after an output with a `finish_reason`. Raises `EngineDeadError`.
        """

    def close(self) -> None:
        """Abort the sequence, unless it has ended. Idempotent."""


class Commands(Protocol):
    async def run(self, command: Command) -> CommandReply:
        """Run a command; its `command_id` is replaced. Raises `EngineDeadError`."""


class Engine(Commands, Protocol):
    @property
    def is_alive(self) -> bool: ...

    @property
    def is_progressing(self) -> bool:
        """True if the engine is alive and no step exceeds its budget, as when it is idle."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_waiting_reported(self) -> int:
        """The number of requests that were waiting at the engine's last step."""

    def open(self, request: AddRequest) -> tuple[OutputStream, ...]:
        """Send a request; return a stream for it and for each of its branches, which the caller
        closes. Raises `EngineDeadError`, and `WorkerError` when an id is in use.
        """

    def abort(self, request_id: str) -> None:
        """Stop a sequence: its stream ends with `FinishReason.ABORT`. Unknown ids are ignored."""

    def hand_over(self, request_id: str) -> None:
        """Stop a sequence that continues at another worker, which will ask for its KV."""
