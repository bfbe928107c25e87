"""The recent use of a pool by each flow, and the flows that use more than a fair share.

Theory of operation. Use counts less the longer ago it was, by exp(−age / 3 s). Everything fades
alike, so nothing is faded: later use is scaled up instead. A flow is active while one of its
requests waits or is in flight, and for ten seconds more. It is within its share while

    asked / weight  ≤  Σ asked / Σ weights       of the active flows

`asked` is its use. Capacity that stayed unused because places were reserved was not asked for by
the flows with the reservation: it counts as asked for, in proportion to their weights, by the flows
that waited for more than half of the last seconds. (Otherwise a flow that is held back would soon
look like the calmest of all.) Some flow is always within its share, and equal flows all are. A flow
that waited less may exceed its share by a quarter: a burst is not a flood.

A flow that becomes active while others wait has used nothing, and so may catch up. A flow that
comes to a pool with room starts where the others are, as if it had used its share: otherwise a
beginning flood would have the whole pool until it had used as much as the other flows. Operations
take amortised O(log n) for n active flows; changed flows are sorted when the least is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from picker.framework.flow_heap import FlowHeap

FADING_SECONDS = 3.0
MEMORY_SECONDS = 10.0
WAITING_SHARE = 0.5
UNKNOWN_SECONDS = 0.5  # that a new flow is assumed to have waited before its first request
BURST = 1.25  # of its share, the limit of a flow that seldom waits
_MAX_EXPONENT = 40.0  # of the scale; beyond it all uses are rescaled
_TOLERANCE = 1.0 + 1e-9  # equal flows are all within their share, whatever the error of floats


@dataclass(slots=True)
class _Use:
    """The use of an active flow, on the scale of its owner, and the reasons why it is active."""

    weight: float
    used: float = 0.0
    num_in_flight: int = 0
    waits: bool = False
    has_begun: bool = False
    waited: float = 1.0  # share of the last seconds, or of its time as an active flow, up to a time
    since_seconds: float = 0.0
    at_seconds: float = 0.0
    wants_more: bool = False  # than it gets, since it waited most of the time

    def pass_to(self, now_seconds: float) -> None:
        if now_seconds > self.at_seconds:
            known = now_seconds - self.since_seconds + UNKNOWN_SECONDS
            passed = now_seconds - self.at_seconds
            part = math.expm1(-passed / FADING_SECONDS) / math.expm1(-known / FADING_SECONDS)
            self.waited += (self.waits - self.waited) * part
            self.at_seconds = now_seconds


class RecentUse:
    """The recent use of the active flows. The times given never go back.

    `forgotten` is called with each flow that is no longer active.
    """

    def __init__(self, forgotten: Callable[[str], None] = lambda flow: None) -> None:
        self._forgotten = forgotten
        self._active: dict[str, _Use] = {}
        self._idle: dict[str, float] = {}  # since when no request of a flow waits or is in flight
        self._used = 0.0
        self._weights = 0.0
        self._unserved = 0.0  # weights of the flows that want more than they get
        self._by_use: FlowHeap[tuple[bool, float]] = FlowHeap()  # waiting flows
        self._num_waiting = 0
        self._changed: set[str] = set()
        self._began_at = 0.0
        self._now = 0.0
        self.reserved = 0.0  # the share of the pool, below 1; the band sets it

    def __len__(self) -> int:
        return len(self._active)

    def waits(self, flow: str, weight: float, since_seconds: float) -> None:
        self._now = max(self._now, since_seconds)
        use = self._use(flow, weight)
        if not use.waits:
            self._update(use)
            use.waits = True
            self._num_waiting += 1
            self._changed.add(flow)

    def stops_waiting(self, flow: str) -> None:
        use = self._active.get(flow)
        if use is not None and use.waits:
            self._update(use)
            use.waits = False
            self._num_waiting -= 1
            self._by_use.remove(flow)
            self._rest(flow, use)

    def began(self, flow: str, weight: float, tokens: float, now_seconds: float) -> None:
        use = self._use(flow, weight)
        use.num_in_flight += 1
        use.has_begun = True
        self._add(flow, use, tokens, now_seconds)

    def ended(self, flow: str, more_tokens: float, now_seconds: float) -> None:
        """Count the end of a request of `flow`, which used `more_tokens` more than estimated."""
        use = self._active.get(flow)
        if use is not None:
            use.num_in_flight = max(0, use.num_in_flight - 1)
            self._add(flow, use, more_tokens, now_seconds)
            self._rest(flow, use)

    def within_share(self, first: str, now_seconds: float) -> str | None:
        """Return the waiting flow with the least use for its weight if it seldom waits, else
        `first` if within its share, else that with the least use; None if none is within its share.

        Apart from `first`, only flows that have used something count: flows that a client invents
        later never go before `first`, and so cannot deprive it of its turn.
        """
        self._now = now_seconds
        self._forget_idle()
        least = self._least()
        if least is None or not self.is_within_share(least):
            return first if self.is_within_share(first) else None
        if not self._active[least].wants_more:
            return least
        return first if self.is_within_share(first) else least

    def is_within_share(self, flow: str) -> bool:
        """Return whether a flow is within its share as of the last event; an inactive one is."""
        use = self._active.get(flow)
        if use is None or len(self._active) == 1:
            return True
        self._update(use)
        could, asked = self._used / (1.0 - self.reserved), use.used
        if use.wants_more:
            asked += (could - self._used) * use.weight / max(self._unserved, use.weight)
        most = _TOLERANCE if use.wants_more else BURST
        return asked * self._weights <= could * use.weight * most

    def seldom_waits(self, flow: str) -> bool:
        """Return whether no request of `flow` waited during most of the last seconds."""
        use = self._active.get(flow)
        return use is not None and use.waited < WAITING_SHARE

    def forget(self, flow: str) -> None:
        self.stops_waiting(flow)
        use = self._active.pop(flow, None)
        if use is None:
            return
        self._idle.pop(flow, None)
        self._changed.discard(flow)
        self._want(use, False)
        self._forgotten(flow)
        if 2 * use.used <= self._used and 2 * use.weight <= self._weights:
            self._used -= use.used
            self._weights -= use.weight
        else:  # a small difference of large numbers would be inexact
            self._add_up()

    def _add_up(self) -> None:
        self._used = sum(use.used for use in self._active.values())
        self._weights = sum(use.weight for use in self._active.values())

    def _use(self, flow: str, weight: float) -> _Use:
        use = self._active.get(flow)
        if use is None:
            used = 0.0
            # There is room: a flow that starts at zero would have the pool until it caught up.
            if self._weights and not self._num_waiting:
                used = weight * self._used / self._weights
            use = self._active[flow] = _Use(
                weight, used, since_seconds=self._now, at_seconds=self._now
            )
            self._weights += weight
            self._used += used
        self._idle.pop(flow, None)
        return use

    def _add(self, flow: str, use: _Use, tokens: float, now_seconds: float) -> None:
        self._now = now_seconds
        self._update(use)
        used = max(0.0, use.used + tokens * self._scale())
        self._used = max(0.0, self._used + used - use.used)
        use.used = used
        if use.waits:
            self._changed.add(flow)

    def _update(self, use: _Use) -> None:
        """Update whether the flow wants more than it gets."""
        use.pass_to(self._now)
        is_here = use.waits or use.num_in_flight > 0
        self._want(use, is_here and use.waited >= WAITING_SHARE)

    def _want(self, use: _Use, wants_more: bool) -> None:
        if use.wants_more is not wants_more:
            use.wants_more = wants_more
            self._unserved = max(0.0, self._unserved + (use.weight if wants_more else -use.weight))

    def _rest(self, flow: str, use: _Use) -> None:
        if not use.waits and not use.num_in_flight:
            self._update(use)
            self._idle.pop(flow, None)  # moves it to the end, so that the order is by time
            self._idle[flow] = self._now

    def _forget_idle(self) -> None:
        before = self._now - MEMORY_SECONDS
        while self._idle:
            flow = next(iter(self._idle))
            if self._idle[flow] > before:
                return
            self.forget(flow)

    def _least(self) -> str | None:
        for flow in self._changed:
            use = self._active[flow]
            if use.waits and use.has_begun:
                self._by_use.put(flow, (use.wants_more, use.used / use.weight))
        self._changed.clear()
        return self._by_use.first()

    def _scale(self) -> float:
        """Return the factor for tokens that are used now, on the scale of `_Use.used`."""
        self._forget_idle()
        exponent = (self._now - self._began_at) / FADING_SECONDS
        if exponent <= _MAX_EXPONENT:
            return math.exp(exponent)
        factor = math.exp(-min(exponent, 700.0))
        for use in self._active.values():
            use.used *= factor
        self._add_up()
        self._changed.update(self._active)
        self._began_at = self._now
        return 1.0
