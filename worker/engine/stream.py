"""What one open request has received and its consumer has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from worker.engine.messages import RequestOutput
from worker.errors import EngineDeadError


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """One output that says what two consecutive ones say: tokens and log probabilities in order,
    the rest from `later`, which repeats every other fact of `earlier` (they are running values).
    """
    steps = (one.num_steps for one in (earlier, later) if one.token_ids)
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
        num_steps=sum(steps) or 1,
    )


@dataclass(slots=True)
class RequestStream:
    """Hands one sequence's outputs from the engine's socket to the task that awaits them.

    At most one output is kept: a consumer that lags gets the outputs it missed as one, so a slow
    reader costs no more memory than its own tokens. One consumer at a time. `on_close` is told when
    the consumer closes the stream before its last output has come.
    """

    request_id: str
    on_close: Callable[[RequestStream], None]
    finished: bool = False
    _closed: bool = False
    _pending: RequestOutput | None = None
    _error: EngineDeadError | None = None
    _waiter: asyncio.Future[None] | None = field(default=None, repr=False)

    def push(self, output: RequestOutput) -> None:
        """Take an output from the engine; the one with a `finish_reason` is the last."""
        self._pending = output if self._pending is None else merge(self._pending, output)
        self.finished = output.finish_reason is not None
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """End the stream: whatever was received is still handed out, then `error` is raised."""
        self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        """Wait for new output. Raises EngineDeadError once the engine is gone and all is taken."""
        while True:
            if self._pending is not None:
                output, self._pending = self._pending, None
                return output
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        """Abort the sequence, unless it has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.finished and self._error is None:
            self.on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
