"""Takes room back from requests under way that may be stopped, for waiting ones of higher priority.

Theory of operation. Each request under way stands for `credit = saturation / requests under way`.
When a band is held back by its ceiling, and somebody under way who may be stopped has a lower
priority, `ceil((saturation − ceiling) / credit)` of them are stopped, at least one and at most two.
Then nobody is until these are over (or ten seconds have passed) and what that freed has had time to
show in the saturation: what is not seen yet would be taken twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from picker.flowcontrol.removable_heap import RemovableHeap
from picker.flowcontrol.tickets import FlowTicket
from picker.framework.flow import EvictionFilter, EvictionOrder, Rank

MOST_AT_ONCE = 2
CONFIRMATION_SECONDS = 10.0
Policies = tuple[EvictionFilter, EvictionOrder]


class Demand(msgspec.Struct, frozen=True):
    """A band in which somebody waits, held back at `ceiling`."""

    priority: int
    ceiling: float


class Revocation(msgspec.Struct, frozen=True):
    """Who is to be stopped, for whom, and how much saturation that is meant to free."""

    demand: Demand
    victims: Sequence[FlowTicket]
    target: float


class Reclaim:
    """Owns who may be stopped, and who was told to and is not over yet."""

    def __init__(self) -> None:
        self._policies: Policies | None = None
        self._settle_seconds = 0.0
        self._victims: RemovableHeap[Rank, FlowTicket] = RemovableHeap()
        self._told: dict[int, tuple[float, float]] = {}  # by sequence: when, and its credit
        self._cooling_until: float | None = None
        self.target = 0.0  # of the last revocation

    @property
    def pending(self) -> float:
        """Saturation that those who were told to stop stand for."""
        return sum(credit for _, credit in self._told.values())

    @property
    def next_due_seconds(self) -> float | None:
        """When `tick` has something to do."""
        if self._told:
            return min(told for told, _ in self._told.values()) + CONFIRMATION_SECONDS
        return self._cooling_until

    def use(
        self, policies: Policies | None, settle_seconds: float, under_way: Iterable[FlowTicket]
    ) -> None:
        """Go on by other policies; None: nobody is stopped."""
        self._policies = policies
        self._settle_seconds = settle_seconds
        self._victims.clear()
        for ticket in under_way:
            if ticket.item.sequence not in self._told:
                self.entered(ticket)

    def entered(self, ticket: FlowTicket) -> None:
        """A request has left."""
        if self._policies is None or ticket.evict is None:
            return
        evictable, order = self._policies
        if evictable.is_evictable(ticket.item):
            rank = order.rank(ticket.item, ticket.dispatched_at_seconds)
            self._victims.push(rank, ticket.item.sequence, ticket)

    def closed(self, ticket: FlowTicket, now_seconds: float) -> float | None:
        """A request is over: how long after it was told to stop; None when it was not."""
        sequence = ticket.item.sequence
        self._victims.remove(sequence)
        told = self._told.pop(sequence, None)
        if told is None:
            return None
        self._cool(now_seconds)
        return now_seconds - told[0]

    def tick(self, now_seconds: float) -> int:
        """Give up on those who took too long; how many these are."""
        late = [
            sequence
            for sequence, (told, _) in self._told.items()
            if now_seconds - told >= CONFIRMATION_SECONDS
        ]
        for sequence in late:
            del self._told[sequence]
        if late:
            self._cool(now_seconds)
        elif self._cooling_until is not None and now_seconds >= self._cooling_until:
            self._cooling_until = None
        return len(late)

    def choose(
        self, demands: Iterable[Demand], saturation: float, num_under_way: int, now_seconds: float
    ) -> Revocation | None:
        """Whom to stop for the first of `demands`, highest first, that has a use for it.

        Those chosen count as told.
        """
        if self._policies is None or self._told or not num_under_way or saturation <= 0:
            return None
        if self._cooling_until is not None and now_seconds < self._cooling_until:
            return None
        first = self._victims.first()
        for demand in demands:
            if first is None or demand.priority <= first[1].priority:
                return None
            if demand.ceiling > 0 and saturation >= demand.ceiling:
                return self._revoke(demand, saturation, saturation / num_under_way, now_seconds)
        return None

    def _revoke(
        self, demand: Demand, saturation: float, credit: float, now_seconds: float
    ) -> Revocation:
        self.target = saturation - demand.ceiling - self.pending
        wanted = min(MOST_AT_ONCE, max(1, math.ceil(self.target / credit)))
        victims: list[FlowTicket] = []
        while len(victims) < wanted:
            first = self._victims.first()
            if first is None or first[1].priority >= demand.priority:
                break
            victim = first[1]
            self._victims.remove(victim.item.sequence)
            self._told[victim.item.sequence] = (now_seconds, credit)
            victims.append(victim)
        return Revocation(demand, victims, self.target)

    def _cool(self, now_seconds: float) -> None:
        """Wait from the last one on."""
        if not self._told:
            self._cooling_until = now_seconds + self._settle_seconds
