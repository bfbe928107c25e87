"""What one open request has received and its consumer has not taken yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from worker.engine.messages import RequestOutput
from worker.errors import EngineDeadError


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """One output that says what two consecutive ones say: tokens in order, the rest from `later`.

    `later` repeats every fact of `earlier` (the engine sends running values), so only the tokens
    have to be joined.
    """
    return RequestOutput(
        request_id=later.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        finish_reason=later.finish_reason,
        stop_token_id=later.stop_token_id,
        num_cached_tokens=later.num_cached_tokens,
        scheduled_seconds=later.scheduled_seconds,
        first_token_seconds=later.first_token_seconds,
        last_token_seconds=later.last_token_seconds,
        num_preemptions=later.num_preemptions,
        error=later.error,
    )


@dataclass(slots=True)
class RequestStream:
    """Hands one request's outputs from the engine's socket to the task that awaits them.

    At most one output is kept: a consumer that lags gets the outputs it missed as one, so a slow
    reader costs no more memory than its own tokens. One consumer at a time.
    """

    request_id: str
    finished: bool = False
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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
