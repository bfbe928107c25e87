"""Evicts in-flight requests to make room for waiting ones of higher priority.

No more are evicted until the last ones are over (or ten seconds have passed) and the saturation has
had time to show the effect; else the same room would be reclaimed twice.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from picker.flowcontrol.removable_heap import RemovableHeap
from picker.flowcontrol.waiting import FlowTicket
from picker.framework.flow import EvictionFilter, EvictionOrder, Rank

MAX_AT_ONCE = 2  # the load that an eviction frees is an estimate
CONFIRMATION_SECONDS = 10.0
Policies = tuple[EvictionFilter, EvictionOrder]


class Revocation(msgspec.Struct, frozen=True):
    priority: int
    victims: Sequence[FlowTicket]
    target: float


class Reclaim:
    """Owns the evictable requests, and the evicted ones that are not over yet."""

    def __init__(self) -> None:
        self._policies: Policies | None = None
        self._settle_seconds = 0.0
        self._victims: RemovableHeap[Rank, FlowTicket] = RemovableHeap()
        self._evicted: dict[int, tuple[float, float]] = {}  # time and credit, by sequence number
        self._cooling_until: float | None = None

    @property
    def pending(self) -> float:
        return sum(credit for _, credit in self._evicted.values())

    @property
    def next_due_seconds(self) -> float | None:
        if self._evicted:
            return min(at for at, _ in self._evicted.values()) + CONFIRMATION_SECONDS
        return self._cooling_until

    def use(
        self, policies: Policies | None, settle_seconds: float, under_way: Iterable[FlowTicket]
    ) -> None:
        self._policies = policies
        self._settle_seconds = settle_seconds
        self._victims.clear()
        for ticket in under_way:
            if ticket.item.sequence not in self._evicted:
                self.entered(ticket)

    def entered(self, ticket: FlowTicket) -> None:
        if self._policies is None or ticket.evict is None:
            return
        evictable, order = self._policies
        if evictable.is_evictable(ticket.item):
            rank = order.rank(ticket.item, ticket.dispatched_at_seconds)
            self._victims.push(rank, ticket.item.sequence, ticket)

    def closed(self, ticket: FlowTicket, now_seconds: float) -> float | None:
        """Remove a request that is over; return the seconds since its eviction, if any."""
        sequence = ticket.item.sequence
        self._victims.remove(sequence)
        evicted = self._evicted.pop(sequence, None)
        if evicted is None:
            return None
        self._cool(now_seconds)
        return now_seconds - evicted[0]

    def tick(self, now_seconds: float) -> int:
        """Stop waiting for evicted requests that take too long; return their number."""
        late = [
            sequence
            for sequence, (at, _) in self._evicted.items()
            if now_seconds - at >= CONFIRMATION_SECONDS
        ]
        for sequence in late:
            del self._evicted[sequence]
        if late:
            self._cool(now_seconds)
        elif self._cooling_until is not None and now_seconds >= self._cooling_until:
            self._cooling_until = None
        return len(late)

    def choose(
        self,
        demands: Iterable[tuple[int, float]],
        saturation: float,
        num_under_way: int,
        now_seconds: float,
    ) -> Revocation | None:
        """Return the evictions for the first of `demands` that would gain from them."""
        if self._policies is None or self._evicted or not num_under_way or saturation <= 0:
            return None
        if self._cooling_until is not None and now_seconds < self._cooling_until:
            return None
        first = self._victims.first()
        for priority, ceiling in demands:
            if first is None or priority <= first[1].priority:
                return None
            if 0 < ceiling <= saturation:
                excess, credit = saturation - ceiling, saturation / num_under_way
                wanted = min(MAX_AT_ONCE, max(1, math.ceil(excess / credit)))
                victims = self._evict(wanted, priority, credit, now_seconds)
                return Revocation(priority, victims, excess)
        return None

    def _evict(
        self, wanted: int, priority: int, credit: float, now_seconds: float
    ) -> list[FlowTicket]:
        victims: list[FlowTicket] = []
        while len(victims) < wanted:
            first = self._victims.first()
            if first is None or first[1].priority >= priority:
                break
            victim = first[1]
            self._victims.remove(victim.item.sequence)
            self._evicted[victim.item.sequence] = (now_seconds, credit)
            victims.append(victim)
        return victims

    def _cool(self, now_seconds: float) -> None:
        if not self._evicted:
            self._cooling_until = now_seconds + self._settle_seconds
