"""Remembers the last requests: how each was decided and how it ended.

Theory of operation. What is worth keeping of a decision is packed when it is made, and joined with
the outcome when the request is over; then it goes into a ring. Nothing is put into a form that
people can read before somebody asks. Looking a request up walks the ring, which for ten thousand
takes about a millisecond and costs a request nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from picker.requestcontrol.kept import Decided, Kept
from picker.requestcontrol.observer import Decision, Outcome
from picker.requestcontrol.record_keeping import (
    keep_decision,
    keep_outcome,
    keep_waiting,
    packed_by_itself,
    short,
)
from picker.requestcontrol.record_showing import summary_of, view_of
from picker.requestcontrol.record_views import RecordSummary, RecordView
from picker.types import InferenceRequest

DEFAULT_CAPACITY = 10_000
# A decision is alone when none was so short a time before it; see `record_keeping`.
ALONE_SECONDS = 0.005

# Of a request under way: its id, when it came, how long it waited, where it goes, and when that was
# decided if it was alone. Not the decision itself, which holds on to much that would else be free.
_Leaving: TypeAlias = tuple[str, float, float, str | None, float | None, Decided]
# What waits, what is under way, and what is over.
_Remembered: TypeAlias = InferenceRequest | _Leaving | Kept


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
        self._under_way: dict[int, _Leaving] = {}
        self._packed_at = 0.0

    # What happens

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Show it as waiting."""
        self._waiting[number] = request

    def decided(self, decision: Decision) -> None:
        """Show it as under way."""
        if self._waiting:
            self._waiting.pop(decision.number, None)
        at = decision.at_seconds
        is_alone = at >= self._packed_at + ALONE_SECONDS
        if is_alone:
            self._packed_at = at
        self._under_way[decision.number] = (
            decision.request_id,
            decision.received_at_seconds,
            decision.queue_seconds,
            _chosen(decision),
            at if is_alone else None,
            keep_decision(decision),
        )

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Nothing is kept of it."""

    def finished(self, outcome: Outcome) -> None:
        """Keep how it ended."""
        if self._waiting:
            self._waiting.pop(outcome.number, None)
        received, decided = self._unix_time() - outcome.seconds, None
        known = self._under_way.pop(outcome.number, None)
        if known is not None:
            alone_at, decided = known[4:]
            if alone_at is not None:
                decided = packed_by_itself(decided, alone_at)
        self._over.append(keep_outcome(outcome, received, decided))

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
            yield unix + leaving[1], leaving
        for kept in reversed(self._over):
            yield kept.received_unix_seconds, kept

    def _kept(self, one: _Remembered) -> Kept:
        """The record, as far as it goes."""
        if isinstance(one, Kept):
            return one
        now, unix = self._clock(), self._unix_time()
        if isinstance(one, InferenceRequest):
            seconds = now - one.received_at_seconds
            name, (packed, seen) = short(one.request_id), keep_waiting(one)
            return Kept(name, unix - seconds, packed, seen, seconds, queue_seconds=seconds)
        request_id, received_at_seconds, queue_seconds, endpoint_key, _, (packed, seen) = one
        seconds = now - received_at_seconds
        return Kept(
            short(request_id),
            unix - seconds,
            packed,
            seen,
            seconds,
            queue_seconds,
            endpoint_key=endpoint_key,
        )


def _received(dated: tuple[float, _Remembered]) -> float:
    return dated[0]


def _id_of(one: _Remembered) -> str:
    if isinstance(one, Kept):
        return one.request_id
    return short(one[0] if isinstance(one, tuple) else one.request_id)


def _chosen(decision: Decision) -> str | None:
    if decision.result is not None:
        return decision.result.endpoints[0].key
    for candidate in decision.candidates:
        if candidate.endpoint.host_port == decision.destination:
            return candidate.key
    return None
