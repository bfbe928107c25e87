"""Remembers the last requests: how each was decided and how it ended.

Theory of operation. A request that is under way is remembered by the decision that its exchange
holds anyway; when it is over, what is worth keeping of it goes into a ring. Nothing is put into a
form that people can read before somebody asks. Looking a request up walks the ring from its newest
end, which for ten thousand takes less than a millisecond and costs a request nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator

from picker.requestcontrol.observer import Decision, Outcome
from picker.requestcontrol.record_keeping import (
    MAX_NAME,
    Decided,
    Kept,
    KeptProfile,
    Names,
    kept_decision,
    kept_filters,
    kept_profiles,
    kept_refusal,
    short,
    shortened,
)
from picker.requestcontrol.record_showing import summary_of, view_of
from picker.requestcontrol.record_views import RecordSummary, RecordView
from picker.types import InferenceRequest

DEFAULT_CAPACITY = 10_000
# A decision is alone when none was so short a time before it; see `record_keeping`.
ALONE_SECONDS = 0.005


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
        self._clock, self._unix_time = clock, unix_time
        self._over: deque[Kept] = deque(maxlen=capacity)
        self._under_way: dict[int, Decision | InferenceRequest] = {}
        self._packed_at = 0.0

    # What happens

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Show it as waiting."""
        self._under_way[number] = request

    def decided(self, decision: Decision) -> None:
        """Show it as under way."""
        self._under_way[decision.number] = decision

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Nothing is kept of it."""

    def finished(self, outcome: Outcome) -> None:
        """Keep what is worth it."""
        known = self._under_way.pop(outcome.number, None)
        self._over.append(self._kept(outcome, known if isinstance(known, Decision) else None))

    def plugin_failed(self, plugin: str) -> None:
        """Nothing is kept of it."""

    # What is asked

    @property
    def size(self) -> int:
        """How many requests are remembered."""
        return len(self._over) + len(self._under_way)

    def last(self, limit: int) -> list[RecordSummary]:
        """The requests that came last, the newest first."""
        newest = heapq.nlargest(limit, self._all(), key=_received)
        return [summary_of(kept) for kept in newest]

    def find(self, request_id: str | None) -> RecordView | None:
        """The request of this id, the newest of several; for None the one that came last."""
        if request_id is None:
            newest = max(self._all(), key=_received, default=None)
            return None if newest is None else view_of(newest)
        wanted = shortened(request_id)
        for kept in self._all():
            if kept.request_id == wanted:
                return view_of(kept)
        return None

    def _all(self) -> Iterator[Kept]:
        """Those under way first, then those that ended last; newer ones before older ones."""
        now, unix = self._clock(), self._unix_time()
        for known in reversed(tuple(self._under_way.values())):
            if isinstance(known, Decision):
                yield _under_way(known, now, unix)
            else:
                yield _waiting(known, now, unix)
        yield from reversed(tuple(self._over))

    def _kept(self, outcome: Outcome, decision: Decision | None) -> Kept:
        request, refusal, seconds = outcome.request, outcome.refusal, outcome.seconds
        names = (
            outcome.request_id,
            outcome.incoming_model,
            outcome.target_model,
            outcome.fairness_id,
            "" if request is None else request.objective,
        )
        decided: Decided | None = None
        profiles: tuple[KeptProfile, ...] = ()
        if decision is not None:
            is_alone = decision.at_seconds >= self._packed_at + ALONE_SECONDS
            if is_alone:
                self._packed_at = decision.at_seconds
            decided, profiles = kept_decision(decision), kept_profiles(decision, is_alone)
        # By name fields take several times as long.
        return Kept(
            *(names if sum(map(len, names)) <= MAX_NAME else short(names)),
            outcome.priority,
            0 if request is None else request.size_bytes,
            self._unix_time() - seconds,
            seconds,
            outcome.queue_seconds,
            outcome.cause,
            outcome.response_status,
            outcome.served_by,
            outcome.endpoint_key,
            outcome.usage,
            outcome.response,
            None if refusal is None else kept_refusal(refusal),
            decided,
            profiles or kept_filters(refusal),
        )


def _received(kept: Kept) -> float:
    return kept.received_unix_seconds


def _waiting(request: InferenceRequest, now: float, unix: float) -> Kept:
    """A request that waits to be decided."""
    seconds = now - request.received_at_seconds
    return Kept(
        *_names(request),
        priority=request.priority,
        size_bytes=request.size_bytes,
        received_unix_seconds=unix - seconds,
        seconds=seconds,
        queue_seconds=seconds,
    )


def _under_way(decision: Decision, now: float, unix: float) -> Kept:
    """A request whose response is still to come or to end."""
    request, result = decision.request, decision.result
    seconds = now - decision.received_at_seconds
    chosen = None
    if result is not None:
        chosen = result.endpoints[0].key
    names = (shortened(decision.request_id), "", "", "", "") if request is None else _names(request)
    return Kept(
        *names,
        priority=0 if request is None else request.priority,
        size_bytes=decision.size_bytes,
        received_unix_seconds=unix - seconds,
        seconds=seconds,
        queue_seconds=decision.queue_seconds,
        endpoint_key=chosen or _at(decision),
        decided=kept_decision(decision),
        profiles=kept_profiles(decision, is_alone=False),
    )


def _names(request: InferenceRequest) -> Names:
    return short(
        (
            request.request_id,
            request.incoming_model,
            request.target_model,
            request.fairness_id,
            request.objective,
        )
    )


def _at(decision: Decision) -> str | None:
    """The endpoint that a request without a body was sent to."""
    for candidate in decision.candidates:
        if candidate.endpoint.host_port == decision.destination:
            return candidate.key
    return None
