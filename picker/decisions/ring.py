"""The ring behind `explain`: the last requests with their decisions and outcomes.

Views are made only on demand. A look-up walks the ring, which for ten thousand requests takes about
a millisecond and costs requests nothing.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator

from picker.decisions.decision import Decision, short
from picker.decisions.packing import pack, pack_candidates, pack_refused
from picker.decisions.showing import summary_of, view_of
from picker.decisions.views import RecordSummary, RecordView
from picker.types import FinishCause

# A decision is alone when the last one was at least this long before; see `packing`.
ALONE_SECONDS = 0.005


class DecisionRing:
    """Watches decisions; stores those under way and the last `capacity` that are over."""

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.capacity = capacity
        self._clock, self._unix_time = clock, unix_time
        self._over: deque[Decision] = deque(maxlen=capacity)
        self._under_way: dict[int, Decision] = {}
        self._decided_at = 0.0

    # A watcher of decisions

    def waits(self, decision: Decision) -> None:
        self._under_way[decision.number] = decision

    def decided(self, decision: Decision) -> None:
        at = decision.at_seconds
        decision.is_alone = at - self._decided_at >= ALONE_SECONDS
        self._decided_at = at
        pack(decision)
        self._under_way[decision.number] = decision

    def finished(self, decision: Decision) -> None:
        self._under_way.pop(decision.number, None)
        if not decision.destination:
            if decision.cause is FinishCause.SKIPPED:
                return  # the proxy answers itself or only observes
            pack_refused(decision)
        elif decision.is_alone:
            pack_candidates(decision)
        decision.received_unix_seconds = self._unix_time() - decision.seconds
        self._over.append(decision)

    # Look-ups

    @property
    def size(self) -> int:
        return len(self._over) + len(self._under_way)

    def last(self, limit: int) -> Iterator[RecordSummary]:
        newest = heapq.nlargest(limit, self._all(), key=_received)
        return (summary_of(one, *self._times(one)) for _, one in newest)

    def find(self, request_id: str | None) -> RecordView | None:
        every = self._all()
        if request_id is not None:
            wanted = short(request_id)
            every = (dated for dated in every if short(dated[1].request_id) == wanted)
        newest = max(every, key=_received, default=None)
        return None if newest is None else view_of(newest[1], *self._times(newest[1]))

    def _all(self) -> Iterator[tuple[float, Decision]]:
        """Yield the stored requests with their times of arrival, the newest first, or nearly so."""
        unix = self._unix_time() - self._clock()
        for decision in self._under_way.values():
            yield unix + decision.received_at_seconds, decision
        # The newest first, which saves `heapq.nlargest` most of its sorting.
        for decision in reversed(self._over):
            yield decision.received_unix_seconds, decision

    def _times(self, decision: Decision) -> tuple[float, float]:
        """Return the time of day at which the request arrived, and its duration so far."""
        if decision.cause is not None:
            return decision.received_unix_seconds, decision.seconds
        seconds = self._clock() - decision.received_at_seconds
        return self._unix_time() - seconds, seconds


def _received(dated: tuple[float, Decision]) -> float:
    return dated[0]
