"""Answers of requests in the frames of a dialect, and frames that are events with names."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from worker.api.generate.frames import Answer, Delta, Ending, Frames, ResponseHead, encode
from worker.api.generate.open_sequences import own_id
from worker.api.generate.prepared import Prepared
from worker.api.routes.generation import GenerationRoutes
from worker.api.tools.writer import CallDelta


def head_of(generation: GenerationRoutes, kind: str, prepared: Prepared) -> ResponseHead:
    name = own_id(prepared.requests[0].request_id)
    model = generation.checks.config.served_model_names[0]
    return ResponseHead(f"{kind}_{name}", model, int(time.time()))


def answered_by(frames: Frames, prepared: Prepared, *, total_usage: bool = True) -> Prepared:
    shown = replace(prepared.shown, usage=total_usage, continuous_usage=True)
    return replace(prepared, frames=frames, shown=shown)


class NamedEvents(Frames):
    """Frames that are events with names, for APIs whose answer is one list of parts."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._num_chars = 0  # of content, so far
        self._ending: Ending | None = None
        self._events: list[bytes] = []

    def delta(self, delta: Delta) -> bytes:
        self._add(delta)
        if delta.ending is not None:
            self._end(delta.ending)
        return self._take()

    def _add(self, part: Delta | Answer) -> None:
        raise NotImplementedError

    def _end(self, ending: Ending) -> None:
        raise NotImplementedError

    def _emit(self, kind: str, **fields: Any) -> None:
        data = encode({"type": kind, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def _take(self) -> bytes:
        frames, self._events = b"".join(self._events), []
        return frames

    def _in_order(self, part: Delta | Answer) -> Iterator[str | CallDelta]:
        start, taken = self._num_chars, 0
        self._num_chars += len(part.text)
        for call in part.calls:
            before = call.content_before - start
            if before > taken:
                yield part.text[taken:before]
                taken = before
            yield call
        if taken < len(part.text):
            yield part.text[taken:]
