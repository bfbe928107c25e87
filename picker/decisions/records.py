"""Remembers the last requests: how each was decided and how it ended.

Theory of operation. A record is one object. It is made when the request is decided, and refers to
little that would not exist without it; how the request ended is filled in when it is over, and then
it goes into a ring. Nothing is put into a form that people can read before somebody asks. Looking a
request up walks the ring, which for ten thousand takes about a millisecond and costs a request
nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from msgspec.structs import replace

from picker.decisions.kept import Kept
from picker.decisions.record_keeping import (
    add_outcome,
    keep_decision,
    keep_undecided,
    keep_waiting,
    pack_by_itself,
    short,
)
from picker.decisions.record_showing import summary_of, view_of
from picker.decisions.record_views import RecordSummary, RecordView
from picker.requestcontrol.observer import Decision, Outcome
from picker.types import FinishCause, InferenceRequest

DEFAULT_CAPACITY = 10_000
# A decision is alone when none was so short a time before it; see `record_keeping`.
ALONE_SECONDS = 0.005

# What waits, and what is under way or over.
_Remembered: TypeAlias = InferenceRequest | Kept


class DecisionRecords:
    """A `RequestObserver` that remembers the requests under way and the last `capacity` others.

    `clock` is that of the requests, `unix_time` the time of day; both in seconds.
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.capacity = capacity
        self._clock, self._unix_time = clock, unix_time
        self._over: deque[Kept] = deque(maxlen=capacity)
        self._waiting: dict[int, InferenceRequest] = {}
        self._under_way: dict[int, Kept] = {}
        self._decided_at = 0.0

    # What happens

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Show it as waiting."""
        self._waiting[number] = request

    def decided(self, decision: Decision) -> None:
        """Show it as under way."""
        if self._waiting:
            self._waiting.pop(decision.number, None)
        at = decision.at_seconds
        is_alone = at - self._decided_at >= ALONE_SECONDS
        self._decided_at = at
        self._under_way[decision.number] = keep_decision(decision, is_alone)

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Nothing is kept of it."""

    def finished(self, outcome: Outcome) -> None:
        """Keep how it ended."""
        if self._waiting:
            self._waiting.pop(outcome.number, None)
        kept = self._under_way.pop(outcome.number, None)
        if kept is None:
            if outcome.cause is FinishCause.SKIPPED:
                return  # the proxy has asked nothing: its own answer passed, or it only observes
            kept = keep_undecided(outcome)
        elif kept.is_alone:
            pack_by_itself(kept)
        add_outcome(kept, outcome, self._unix_time() - outcome.seconds)
        self._over.append(kept)

    def plugin_failed(self, plugin: str) -> None:
        """Nothing is kept of it."""

    # What is asked

    @property
    def size(self) -> int:
        """How many requests are remembered."""
        return len(self._over) + len(self._under_way) + len(self._waiting)

    def last(self, limit: int) -> list[RecordSummary]:
        """The requests that came last, the newest first."""
        newest = heapq.nlargest(limit, self._all(), key=_received)
        return [summary_of(self._kept(one)) for _, one in newest]

    def find(self, request_id: str | None) -> RecordView | None:
        """The request of this id, the newest of several; for None the one that came last."""
        every = self._all()
        if request_id is not None:
            wanted = short(request_id)
            every = (dated for dated in every if _id_of(dated[1]) == wanted)
        newest = max(every, key=_received, default=None)
        return None if newest is None else view_of(self._kept(newest[1]))

    def _all(self) -> Iterator[tuple[float, _Remembered]]:
        """Those that wait, those under way, and those that are over; and when each came.

        The newest of these come first, or nearly so, which saves who wants a few much sorting.
        """
        unix = self._unix_time() - self._clock()
        for request in self._waiting.values():
            yield unix + request.received_at_seconds, request
        for leaving in self._under_way.values():
            yield unix + leaving.received_at_seconds, leaving
        for kept in reversed(self._over):
            yield kept.received_unix_seconds, kept

    def _kept(self, one: _Remembered) -> Kept:
        """The record, as far as it goes."""
        if isinstance(one, Kept) and one.cause is not None:
            return one
        seconds = self._clock() - one.received_at_seconds
        since = self._unix_time() - seconds
        if isinstance(one, Kept):
            return replace(one, seconds=seconds, received_unix_seconds=since)
        return keep_waiting(one, seconds, since)


def _received(dated: tuple[float, _Remembered]) -> float:
    return dated[0]


def _id_of(one: _Remembered) -> str:
    return one.request_id if isinstance(one, Kept) else short(one.request_id)
