"""The open sequences, which clients abort by the ids that they know."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from worker.api.generate.admission import Admission
from worker.api.generate.engine import Engine, OutputStream
from worker.engine.messages import AddRequest, RequestOutput
from worker.errors import RequestError

_BRANCH_PREFIX = re.compile(r"^[0-9]+_")


class OpenSequences:
    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        self._open: dict[str, _ListedStream] = {}

    async def leave(self, request_id: str, has_begun: Callable[[], bool]) -> NoReturn:
        """Wait for the drain, then raise the error of a stream that may continue elsewhere."""
        await self._admission.drains.wait()
        if has_begun():
            self._engine.hand_over(request_id)
        reason = "The stream is to continue at another worker because the server stops"
        raise RequestError(reason, status=503, type="ServiceUnavailableError")

    def open(self, request: AddRequest) -> tuple[OutputStream, ...]:
        streams = self._engine.open(request)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        prefilled = self._admission.queued(num_tokens)
        listed = tuple(_ListedStream(stream, prefilled, self._open) for stream in streams)
        self._open.update((stream.request_id, stream) for stream in listed)
        return listed

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop sequences in one pass by their response's id, the one clients know, or their own."""
        # Clients send the id that they saw, with the prefix of its API.
        wanted = {re.sub("^(resp|msg)_", "", request_id) for request_id in request_ids}
        # Aborting closes streams, which changes the list.
        for sequence_id in tuple(self._open):
            response_id = response_of(sequence_id)
            names = (sequence_id, response_id, own_id(sequence_id))
            if not wanted.isdisjoint(names):
                self._engine.abort(sequence_id)


def response_of(request_id: str) -> str:
    """Return the response's id: requests are `{id}-{index}-{random}`, branches `{n}_{request}`."""
    return _BRANCH_PREFIX.sub("", request_id).rsplit("-", 2)[0]


def own_id(request_id: str) -> str:
    """Return the id of the request's response without its prefix, as the client knows it."""
    return response_of(request_id).partition("-")[2]


class _ListedStream:
    __slots__ = ("_listed", "_prefilled", "_stream", "request_id")

    def __init__(
        self, stream: OutputStream, prefilled: Callable[[], None], listed: dict[str, _ListedStream]
    ) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._prefilled = prefilled
        self._listed = listed

    async def next(self) -> RequestOutput:
        # Any output ends the prefill, an ending included.
        output = await self._stream.next()
        self._prefilled()
        return output

    def close(self) -> None:
        self._prefilled()
        self._listed.pop(self.request_id, None)
        self._stream.close()
