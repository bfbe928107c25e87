"""The ring behind `explain`: the last requests, how each was decided and how it ended.

Theory of operation. What is kept is the decision itself. It is packed when the request leaves and
condensed when it is over, and then goes into a ring. Nothing is put into a form that people can
read before somebody asks. Looking a request up walks the ring, which for ten thousand takes about a
millisecond and costs a request nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator

from picker.decisions.decision import Decision, short
from picker.decisions.packing import pack, pack_candidates, pack_refused
from picker.decisions.showing import summary_of, view_of
from picker.decisions.views import RecordSummary, RecordView
from picker.types import FinishCause

# A decision is alone when none was so short a time before it; see `packing`.
ALONE_SECONDS = 0.005


class DecisionRing:
    """Watches decisions and remembers those under way and the last `capacity` others.

    `clock` is that of the requests, `unix_time` the time of day; both in seconds.
    """

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

    # What happens

    def waits(self, decision: Decision) -> None:
        """Show it as waiting."""
        self._under_way[decision.number] = decision

    def decided(self, decision: Decision) -> None:
        """Show it as under way."""
        at = decision.at_seconds
        decision.is_alone = at - self._decided_at >= ALONE_SECONDS
        self._decided_at = at
        pack(decision)
        self._under_way[decision.number] = decision

    def finished(self, decision: Decision) -> None:
        """Keep it as one of the last."""
        self._under_way.pop(decision.number, None)
        if not decision.destination:
            if decision.cause is FinishCause.SKIPPED:
                return  # the proxy has asked nothing: its own answer passed, or it only observes
            pack_refused(decision)
        elif decision.is_alone:
            pack_candidates(decision)
        decision.received_unix_seconds = self._unix_time() - decision.seconds
        self._over.append(decision)

    # What is asked

    @property
    def size(self) -> int:
        """How many requests are remembered."""
        return len(self._over) + len(self._under_way)

    def last(self, limit: int) -> Iterator[RecordSummary]:
        """The requests that came last, the newest first, each as it is when it is asked for."""
        newest = heapq.nlargest(limit, self._all(), key=_received)
        return (summary_of(one, *self._times(one)) for _, one in newest)

    def find(self, request_id: str | None) -> RecordView | None:
        """The request of this id, the newest of several; for None the one that came last."""
        every = self._all()
        if request_id is not None:
            wanted = short(request_id)
            every = (dated for dated in every if short(dated[1].request_id) == wanted)
        newest = max(every, key=_received, default=None)
        return None if newest is None else view_of(newest[1], *self._times(newest[1]))

    def _all(self) -> Iterator[tuple[float, Decision]]:
        """Those under way, and those that are over; and when each came.

        The newest of these come first, or nearly so, which saves a search for a few much sorting.
        """
        unix = self._unix_time() - self._clock()
        for decision in self._under_way.values():
            yield unix + decision.received_at_seconds, decision
        for decision in reversed(self._over):
            yield decision.received_unix_seconds, decision

    def _times(self, decision: Decision) -> tuple[float, float]:
        """When it came, by the time of day, and how long it took, or takes so far."""
        if decision.cause is not None:
            return decision.received_unix_seconds, decision.seconds
        seconds = self._clock() - decision.received_at_seconds
        return self._unix_time() - seconds, seconds


def _received(dated: tuple[float, Decision]) -> float:
    return dated[0]
