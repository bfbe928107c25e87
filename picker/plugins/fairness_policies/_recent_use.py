"""How much of a pool each flow has used lately, and which flows use more than a fair share.

Theory of operation. What a flow used counts the less the longer ago it was, by exp(−age / 3 s).
Everything fades alike, so nothing is faded: what comes later counts more instead. A flow is active
while anything of it waits or is under way, and for ten seconds more. It is within its share while

    asked / weight  ≤  Σ asked / Σ weights       of the flows that are active

`asked` is what it used. What the pool could have served and did not, because places were kept free,
was not asked for by those for whom they were kept: it counts as asked by the flows that waited for
more than half of the last seconds, by their weights. (Else a flow that is held back would soon look
like the calmest of all.) Some flow always is within its share, and of equal ones all are. Who did
not wait for so long may be a quarter above it: a burst is no flood.

A flow that becomes active while others wait has used nothing, and so may catch up. One that comes
to a pool with room starts where the others are, as if it had used its share: else a flood that
begins would have the whole pool before it has used as much as those who were there. Everything
takes amortised O(log n) of the active flows; those that have changed are put in order when the
least is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from picker.framework.flow_heap import FlowHeap

FADING_SECONDS = 3.0
MEMORY_SECONDS = 10.0
MOST_OF_THE_TIME = 0.5
UNKNOWN_SECONDS = 0.5  # for which a new flow is taken to have waited before it came
BURST = 1.25  # of its share, which one may have used that does not want more than it gets
_MOST_FADED = 40.0  # exponents, until all that was used is scaled anew
_TOLERANCE = 1.0 + 1e-9


@dataclass(slots=True)
class _Use:
    """What an active flow used, on the scale of its owner, and why it is active."""

    weight: float
    used: float = 0.0
    num_under_way: int = 0
    waits: bool = False
    has_begun: bool = False
    waited: float = 1.0  # for what part of the last seconds, or since it is here, up to a time
    since_seconds: float = 0.0
    at_seconds: float = 0.0
    wants_more: bool = False  # than it gets: it waited most of the time

    def pass_to(self, now_seconds: float) -> None:
        """It has waited, or not, until now."""
        if now_seconds > self.at_seconds:
            known = now_seconds - self.since_seconds + UNKNOWN_SECONDS
            passed = now_seconds - self.at_seconds
            part = math.expm1(-passed / FADING_SECONDS) / math.expm1(-known / FADING_SECONDS)
            self.waited += (self.waits - self.waited) * part
            self.at_seconds = now_seconds


class RecentUse:
    """Owns what the active flows used lately. Times never go back.

    `forgotten` is called with each flow that is active no more.
    """

    def __init__(self, forgotten: Callable[[str], None] = lambda flow: None) -> None:
        self._forgotten = forgotten
        self._active: dict[str, _Use] = {}
        self._idle: dict[str, float] = {}  # since when nothing of a flow waits or is under way
        self._used = 0.0
        self._weights = 0.0
        self._unserved = 0.0  # weights of those who want more than they get
        self._by_use: FlowHeap[tuple[bool, float]] = FlowHeap()  # flows that wait
        self._num_waiting = 0
        self._changed: set[str] = set()
        self._began_at = 0.0
        self._now = 0.0
        self.kept_free = 0.0  # the part of the pool; set by who keeps it, below 1

    def __len__(self) -> int:
        """Flows that count as active."""
        return len(self._active)

    def waits(self, flow: str, weight: float, since_seconds: float) -> None:
        """Something of `flow` waits from now on, or since then."""
        self._now = max(self._now, since_seconds)
        use = self._use(flow, weight)
        if not use.waits:
            self._look_at(use)
            use.waits = True
            self._num_waiting += 1
            self._changed.add(flow)

    def waits_no_more(self, flow: str) -> None:
        """Nothing of `flow` waits any more."""
        use = self._active.get(flow)
        if use is not None and use.waits:
            self._look_at(use)
            use.waits = False
            self._num_waiting -= 1
            self._by_use.remove(flow)
            self._rest(flow, use)

    def began(self, flow: str, weight: float, tokens: float, now_seconds: float) -> None:
        """A request of `flow` is under way, for so many tokens."""
        use = self._use(flow, weight)
        use.num_under_way += 1
        use.has_begun = True
        self._add(flow, use, tokens, now_seconds)

    def ended(self, flow: str, more_tokens: float, now_seconds: float) -> None:
        """A request of `flow` is over, for so many tokens more than it was taken to need."""
        use = self._active.get(flow)
        if use is not None:
            use.num_under_way = max(0, use.num_under_way - 1)
            self._add(flow, use, more_tokens, now_seconds)
            self._rest(flow, use)

    def within_share(self, first: str, now_seconds: float) -> str | None:
        """A flow that waits and is within its share: the one that used least for its weight, if it
        seldom waits; else `first`, if that is; else the one that used least. None when none is. But
        for `first` only flows count that have used anything.

        So flows that are made up as time goes on never go before `first`, and cannot keep it from
        its turn.
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
        """Whether `flow` is, as of the last event; one that is not active is."""
        use = self._active.get(flow)
        if use is None or len(self._active) == 1:
            return True
        self._look_at(use)
        could, asked = self._used / (1.0 - self.kept_free), use.used
        if use.wants_more:
            asked += (could - self._used) * use.weight / max(self._unserved, use.weight)
        most = _TOLERANCE if use.wants_more else BURST
        return asked * self._weights <= could * use.weight * most

    def seldom_waits(self, flow: str) -> bool:
        """Whether `flow` got what it asked for during most of the last seconds."""
        use = self._active.get(flow)
        return use is not None and use.waited < MOST_OF_THE_TIME

    def forget(self, flow: str) -> None:
        """Do not know `flow` any more."""
        self.waits_no_more(flow)
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
        else:  # a small difference of large numbers would be wrong
            self._add_up()

    def _add_up(self) -> None:
        self._used = sum(use.used for use in self._active.values())
        self._weights = sum(use.weight for use in self._active.values())

    def _use(self, flow: str, weight: float) -> _Use:
        use = self._active.get(flow)
        if use is None:
            used = 0.0
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
        self._look_at(use)
        used = max(0.0, use.used + tokens * self._scale())
        self._used = max(0.0, self._used + used - use.used)
        use.used = used
        if use.waits:
            self._changed.add(flow)

    def _look_at(self, use: _Use) -> None:
        """Know whether it wants more."""
        use.pass_to(self._now)
        is_here = use.waits or use.num_under_way > 0
        self._want(use, is_here and use.waited >= MOST_OF_THE_TIME)

    def _want(self, use: _Use, wants_more: bool) -> None:
        if use.wants_more is not wants_more:
            use.wants_more = wants_more
            self._unserved = max(0.0, self._unserved + (use.weight if wants_more else -use.weight))

    def _rest(self, flow: str, use: _Use) -> None:
        if not use.waits and not use.num_under_way:
            self._look_at(use)
            self._idle.pop(flow, None)  # to the end
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
        """What a token of now counts for."""
        self._forget_idle()
        exponent = (self._now - self._began_at) / FADING_SECONDS
        if exponent <= _MOST_FADED:
            return math.exp(exponent)
        factor = math.exp(-min(exponent, 700.0))
        for use in self._active.values():
            use.used *= factor
        self._add_up()
        self._changed.update(self._active)
        self._began_at = self._now
        return 1.0
