"""Who has used how much of a pool lately, and who of them uses more than a fair share.

Theory of operation. What a flow used counts the less the longer ago it was, by exp(−age / 3 s).
Everything fades alike, so nothing is faded: what comes later counts more instead. A flow is active
while anything of it waits or is under way, and for ten seconds more. It is within its share while

    used / weight  ≤  Σ used / Σ weights         of the flows that are active

Some flow always is, and of equal ones all are. Everything takes amortised O(log n) of the active
flows; those that have changed are put in order when somebody asks for the least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picker.framework.flow_heap import FlowHeap

FADING_SECONDS = 3.0
MEMORY_SECONDS = 10.0
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


class RecentUse:
    """Owns what the active flows used lately. Times never go back."""

    def __init__(self) -> None:
        self._active: dict[str, _Use] = {}
        self._idle: dict[str, float] = {}  # since when nothing of a flow waits or is under way
        self._used = 0.0
        self._weights = 0.0
        self._by_use: FlowHeap[tuple[float]] = FlowHeap()  # flows that wait
        self._changed: set[str] = set()
        self._began_at = 0.0
        self._now = 0.0

    def __len__(self) -> int:
        """Flows that count as active."""
        return len(self._active)

    def waits(self, flow: str, weight: float) -> None:
        """Something of `flow` waits from now on."""
        use = self._use(flow, weight)
        if not use.waits:
            use.waits = True
            self._changed.add(flow)

    def waits_no_more(self, flow: str) -> None:
        """Nothing of `flow` waits any more."""
        use = self._active.get(flow)
        if use is not None and use.waits:
            use.waits = False
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
        """A flow that waits and is within its share: `first` if that is, else the one that used
        least for its weight, of those that have used anything; None when none is.

        So flows that are made up as time goes on never go before `first`, and cannot keep it from
        its turn.
        """
        self._now = now_seconds
        self._forget_idle()
        if self._is_within_share(first):
            return first
        least = self._least()
        return least if least is not None and self._is_within_share(least) else None

    def forget(self, flow: str) -> None:
        """Do not know `flow` any more."""
        self.waits_no_more(flow)
        use = self._active.pop(flow, None)
        if use is None:
            return
        self._idle.pop(flow, None)
        self._changed.discard(flow)
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
            use = self._active[flow] = _Use(weight)
            self._weights += weight
        self._idle.pop(flow, None)
        return use

    def _add(self, flow: str, use: _Use, tokens: float, now_seconds: float) -> None:
        self._now = now_seconds
        used = max(0.0, use.used + tokens * self._scale())
        self._used = max(0.0, self._used + used - use.used)
        use.used = used
        if use.waits:
            self._changed.add(flow)

    def _rest(self, flow: str, use: _Use) -> None:
        if not use.waits and not use.num_under_way:
            self._idle.pop(flow, None)  # to the end
            self._idle[flow] = self._now

    def _forget_idle(self) -> None:
        before = self._now - MEMORY_SECONDS
        while self._idle:
            flow = next(iter(self._idle))
            if self._idle[flow] > before:
                return
            self.forget(flow)

    def _is_within_share(self, flow: str) -> bool:
        use = self._active.get(flow)
        if use is None or len(self._active) == 1:
            return True
        return use.used * self._weights <= self._used * use.weight * _TOLERANCE

    def _least(self) -> str | None:
        for flow in self._changed:
            use = self._active[flow]
            if use.waits and use.has_begun:
                self._by_use.put(flow, (use.used / use.weight,))
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
