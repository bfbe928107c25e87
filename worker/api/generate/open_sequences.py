"""The engine, with a list of what is open in it: to abort by the ids clients know, and to know how
many prompt tokens wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from worker.api.generate.admission import Admission
from worker.api.generate.engine import Engine, OutputStream
from worker.engine.messages import AddRequest, Command, CommandReply, EngineStats, RequestOutput
from worker.types import FinishReason

# What names one of several sequences of a request: a branch, or one beam at one step.
_SEQUENCE_PREFIX = re.compile(r"^[0-9.]+_")


class OpenSequences:
    """An `Engine` in front of another. Owns the list of what is open: sequence id → stream."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        self._open: dict[str, _ListedStream] = {}

    @property
    def is_alive(self) -> bool:
        """See `Engine.is_alive`."""
        return self._engine.is_alive

    @property
    def is_progressing(self) -> bool:
        """See `Engine.is_progressing`."""
        return self._engine.is_progressing

    @property
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._engine.stats

    @property
    def num_waiting_reported(self) -> int:
        """See `Engine.num_waiting_reported`."""
        return self._engine.num_waiting_reported

    def open(self, request: AddRequest) -> tuple[OutputStream, ...]:
        """See `Engine.open`."""
        streams = self._engine.open(request)
        self._admission.queued(len(request.prompt_token_ids))
        prefilled = _Once(self._admission.prefilled, len(request.prompt_token_ids))
        response_id = response_of(request.request_id)
        listed = tuple(_ListedStream(s, response_id, prefilled, self._open) for s in streams)
        self._open.update((stream.request_id, stream) for stream in listed)
        return listed

    def abort(self, request_id: str) -> None:
        """Stop whatever a client may mean by an id; see `abort_each`."""
        self.abort_each((request_id,))

    def abort_each(self, request_ids: Iterable[str]) -> None:
        """Stop whatever a client may mean by ids: a response's id, that without its prefix (as the
        client gave it in `x-request-id`), or a sequence's own. One look at what is open, however
        many ids there are.
        """
        wanted = frozenset(request_ids)
        for sequence_id, stream in tuple(self._open.items()):
            response_id = stream.response_id
            names = (sequence_id, response_id, response_id.partition("-")[2])
            if not wanted.isdisjoint(names):
                stream.abort_asked = True
                self._engine.abort(sequence_id)

    async def run(self, command: Command) -> CommandReply:
        """See `Engine.run`."""
        return await self._engine.run(command)


def response_of(request_id: str) -> str:
    """The id of the response that a request to the engine belongs to: requests are named after it,
    `{response id}-{index}-{random}`, and sequences after their request, `{number}_{request id}`.
    """
    return _SEQUENCE_PREFIX.sub("", request_id).rsplit("-", 2)[0]


class _Once:
    """Calls a function with an argument, the first time it is called itself."""

    __slots__ = ("_amount", "_function")

    def __init__(self, function: Callable[[int], None], amount: int) -> None:
        self._function = function
        self._amount: int | None = amount

    def __call__(self) -> None:
        if self._amount is not None:
            amount, self._amount = self._amount, None
            self._function(amount)


class _ListedStream:
    """A stream that takes itself off the list. With `abort_asked` it ends as aborted, also where
    the sequence came to its own end before the engine heard of it: a beam search, which is many
    short sequences, must not go on because each of them had just ended.
    """

    __slots__ = ("_listed", "_prefilled", "_stream", "abort_asked", "response_id")

    def __init__(
        self,
        stream: OutputStream,
        response_id: str,
        prefilled: _Once,
        listed: dict[str, _ListedStream],
    ) -> None:
        self.response_id = response_id
        self.abort_asked = False
        self._stream = stream
        self._prefilled = prefilled
        self._listed = listed

    @property
    def request_id(self) -> str:
        """See `OutputStream.request_id`."""
        return self._stream.request_id

    async def next(self) -> RequestOutput:
        """See `OutputStream.next`."""
        output = await self._stream.next()
        self._prefilled()
        if self.abort_asked and output.finish_reason not in (None, FinishReason.ERROR):
            return msgspec.structs.replace(output, finish_reason=FinishReason.ABORT)
        return output

    def close(self) -> None:
        """See `OutputStream.close`."""
        self._prefilled()
        self._listed.pop(self._stream.request_id, None)
        self._stream.close()
