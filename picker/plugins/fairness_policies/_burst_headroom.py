"""How much room flows within their share need: as much as their bursts have taken.

Theory of operation. A flow whose requests come independently of each other has about `mean` of them
under way, and now and then some roots of that more. So

    places kept  =  1 + z · √(what calm flows have under way)

A flow is calm while it is within its share. What it has under way is its mean of the last seconds
(of a new flow, since it came), and at least what it has now. How large z has to be depends on how
soon others make room, which is not known beforehand; so it is learned. Of each request of a calm
flow that goes while others are held back it is seen whether it had to wait:

    it waited     z grows by what two more places come to
    it did not    z shrinks by a five-hundredth of that

Where that balances, one request in five hundred waits. z begins so large that the first bursts find
room, and is never larger than `MOST_DEVIATIONS`. And no more is kept than calm flows leave: else
those who ask for more than half of a pool would have all of it.

Nothing is kept for a flow that has gone: of which nothing has come or ended for `MOST_GAPS` times
the gap between two requests that one would usually be in (Σ gap² / Σ gap, of its last hundred or
so, so that pauses between bursts count as what they are), or for ten seconds. Of few gaps less is
known than of many: of n it is (1 + `UNSURE_GAPS` / n) times as long. Everything takes amortised
O(log n) of the flows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picker.framework.flow_heap import FlowHeap

MEAN_SECONDS = 3.0
MEMORY_SECONDS = 10.0
FIRST_DEVIATIONS = 3.0
MOST_DEVIATIONS = 4.0
MOST_GAPS = 4.0
UNSURE_GAPS = 5.0
UNSEEN_SECONDS = 0.5  # for which a new flow is taken to have asked for nothing before it came
GRACE_SECONDS = 0.001  # one that waits no longer has found room
_STEP_PLACES = 2.0
_MISSED = 0.002  # the part of requests that may have to wait
_REMEMBERED = 0.99  # of gaps, with each one


@dataclass(slots=True)
class _Load:
    """What is under way, and the mean of it up to a time."""

    num_under_way: int = 0
    mean: float = 0.0
    at_seconds: float = 0.0

    def at(self, now_seconds: float) -> float:
        """The mean now."""
        passed = max(0.0, now_seconds - self.at_seconds)
        remembered = math.exp(-passed / MEAN_SECONDS)
        return self.num_under_way + (self.mean - self.num_under_way) * remembered

    def move(self, now_seconds: float) -> None:
        """Know the mean up to now."""
        self.mean = self.at(now_seconds)
        self.at_seconds = max(self.at_seconds, now_seconds)

    def add(self, other: _Load, sign: int) -> None:
        """Count another as well, or no more, as of the time of this one."""
        self.num_under_way += sign * other.num_under_way
        self.mean = max(0.0, self.mean + sign * other.at(self.at_seconds))


@dataclass(slots=True)
class _Flow(_Load):
    """What one flow has under way, and how its requests come."""

    is_counted: bool = False  # among those that are calm and may come any moment
    since_seconds: float = 0.0
    came_at: float = -math.inf
    num_gaps: float = 0.0
    gaps: float = 0.0
    squared_gaps: float = 0.0

    def move(self, now_seconds: float) -> None:
        """Know the mean up to now, of the time for which it is known."""
        passed = max(0.0, now_seconds - self.at_seconds)
        known = max(0.0, now_seconds - self.since_seconds) + UNSEEN_SECONDS
        part = math.expm1(-passed / MEAN_SECONDS) / math.expm1(-known / MEAN_SECONDS)
        self.mean += (self.num_under_way - self.mean) * part
        self.at_seconds = max(self.at_seconds, now_seconds)

    def came(self, now_seconds: float) -> None:
        """A request of it did."""
        gap = now_seconds - self.came_at
        if gap < MEMORY_SECONDS:
            self.num_gaps = self.num_gaps * _REMEMBERED + 1.0
            self.gaps = self.gaps * _REMEMBERED + gap
            self.squared_gaps = self.squared_gaps * _REMEMBERED + gap * gap
        self.came_at = now_seconds

    @property
    def longest_gap(self) -> float:
        """After which it is taken to have gone."""
        if not self.gaps:
            return MEMORY_SECONDS
        most_gaps = MOST_GAPS * (1.0 + UNSURE_GAPS / self.num_gaps)
        return min(MEMORY_SECONDS, most_gaps * self.squared_gaps / self.gaps)


class CalmLoad:
    """Owns what each flow has under way, which of them are calm, and what was learned of bursts.

    Times never go back.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._calm = _Load()  # of all that are calm and have not gone
        self._gone_at: FlowHeap[tuple[float]] = FlowHeap()
        self._deviations = FIRST_DEVIATIONS

    def __len__(self) -> int:
        """Flows that are known."""
        return len(self._flows)

    def began(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        """A request of `flow` is under way, which is within its share, or not."""
        one = self._flows.get(flow)
        if one is None:
            one = self._flows[flow] = _Flow(at_seconds=now_seconds, since_seconds=now_seconds)
        one.came(now_seconds)
        self._change(flow, one, 1, is_calm, now_seconds)

    def ended(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        """It is over."""
        one = self._flows.get(flow)
        if one is not None and one.num_under_way:
            self._change(flow, one, -1, is_calm, now_seconds)

    def forget(self, flow: str) -> None:
        """Do not know `flow` any more."""
        one = self._flows.pop(flow, None)
        if one is not None:
            self._drop(flow, one)

    def learn(self, waited_seconds: float) -> None:
        """A request of a calm flow goes while others are held back, after so long."""
        step = _STEP_PLACES / math.sqrt(max(1.0, self._calm.mean))
        change = step if waited_seconds > GRACE_SECONDS else -_MISSED * step
        self._deviations = min(max(0.0, self._deviations + change), MOST_DEVIATIONS)

    def places(self, now_seconds: float, num_places: float = math.inf) -> float:
        """How many of the pool's to keep free; 0 while no calm flow is there."""
        gone_at, calm = self._gone_at, self._calm
        while (flow := gone_at.first()) is not None:
            at = gone_at.key(flow)
            if at is None or at[0] > now_seconds:
                mean = calm.at(now_seconds)
                typical = max(mean, calm.num_under_way)
                wanted = 1.0 + self._deviations * math.sqrt(typical)
                return min(wanted, max(1.0, num_places - mean))
            self._drop(flow, self._flows[flow])
        return 0.0

    def _change(self, flow: str, one: _Flow, by: int, is_calm: bool, now_seconds: float) -> None:
        expected = one.at(now_seconds)
        one.move(now_seconds)
        self._calm.move(now_seconds)
        if one.is_counted:
            self._calm.mean = max(0.0, self._calm.mean + one.mean - expected)
        if is_calm and not one.is_counted:
            one.is_counted = True
            self._calm.add(one, 1)
        elif one.is_counted and not is_calm:
            self._drop(flow, one)
        one.num_under_way += by
        if is_calm:
            self._calm.num_under_way += by
            self._gone_at.put(flow, (now_seconds + one.longest_gap,))

    def _drop(self, flow: str, one: _Flow) -> None:
        if one.is_counted:
            one.is_counted = False
            self._gone_at.remove(flow)
            self._calm.add(one, -1)
