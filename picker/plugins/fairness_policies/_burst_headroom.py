"""The room that flows need while they are within their share, learned from their bursts.

Theory of operation. A flow whose requests come independently of each other has about `mean` of them
in flight, and at times more, by a few times √mean. So

    reserved places  =  1 + z · √(requests in flight of calm flows)

A flow is calm while it is within its share. Its number in flight is the mean of the last seconds
(for a new flow, since its first request), and at least the current number. The right z depends on
how soon other requests end, which is unknown beforehand; so it is learned. Each request of a calm
flow that is dispatched while others are held back shows whether it had to wait:

    it waited     z grows by the equivalent of two places
    it did not    z shrinks by a five-hundredth of that

In balance, one request in five hundred waits. z begins so large that the first bursts find room,
and is never larger than `MAX_DEVIATIONS`. No more is reserved than calm flows leave: otherwise
flows that ask for more than half of a pool would have all of it.

Nothing is reserved for a flow that has left: no request of it arrived or ended for ten seconds, or
for `MAX_GAPS` times the gap that contains an average moment (Σ gap² / Σ gap of its last hundred
gaps or so, so that pauses between bursts count in full). A small number n of gaps says less than a
large one, so the limit is (1 + `UNSURE_GAPS` / n) times as long. Every operation takes amortised
O(log n) for n flows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picker.framework.flow_heap import FlowHeap

MEAN_SECONDS = 3.0
MEMORY_SECONDS = 10.0
FIRST_DEVIATIONS = 3.0
MAX_DEVIATIONS = 4.0
MAX_GAPS = 4.0
UNSURE_GAPS = 5.0
UNSEEN_SECONDS = 0.5  # of silence that a new flow is assumed to have had before its first request
GRACE_SECONDS = 0.001  # a shorter wait does not count as one
_STEP_PLACES = 2.0
_MISSED = 0.002  # the share of requests that may have to wait
_REMEMBERED = 0.99  # of earlier gaps, with each new one


@dataclass(slots=True)
class _Load:
    """The number of requests in flight, and its mean up to `at_seconds`."""

    num_in_flight: int = 0
    mean: float = 0.0
    at_seconds: float = 0.0

    def at(self, now_seconds: float) -> float:
        passed = max(0.0, now_seconds - self.at_seconds)
        remembered = math.exp(-passed / MEAN_SECONDS)
        return self.num_in_flight + (self.mean - self.num_in_flight) * remembered

    def move(self, now_seconds: float) -> None:
        self.mean = self.at(now_seconds)
        self.at_seconds = max(self.at_seconds, now_seconds)

    def add(self, other: _Load, sign: int) -> None:
        """Add (sign 1) or subtract (sign −1) another load, as of the time of this one."""
        self.num_in_flight += sign * other.num_in_flight
        self.mean = max(0.0, self.mean + sign * other.at(self.at_seconds))


@dataclass(slots=True)
class _Flow(_Load):
    """The load of one flow, and the gaps between its requests."""

    is_counted: bool = False  # in the sum of calm flows that have not left
    since_seconds: float = 0.0
    arrived_at: float = -math.inf
    num_gaps: float = 0.0
    gaps: float = 0.0
    squared_gaps: float = 0.0

    def move(self, now_seconds: float) -> None:
        """Advance the mean to `now_seconds`; it covers the time since the first request."""
        passed = max(0.0, now_seconds - self.at_seconds)
        known = max(0.0, now_seconds - self.since_seconds) + UNSEEN_SECONDS
        part = math.expm1(-passed / MEAN_SECONDS) / math.expm1(-known / MEAN_SECONDS)
        self.mean += (self.num_in_flight - self.mean) * part
        self.at_seconds = max(self.at_seconds, now_seconds)

    def arrived(self, now_seconds: float) -> None:
        gap = now_seconds - self.arrived_at
        # A longer gap is an absence, not a pause between requests.
        if gap < MEMORY_SECONDS:
            self.num_gaps = self.num_gaps * _REMEMBERED + 1.0
            self.gaps = self.gaps * _REMEMBERED + gap
            self.squared_gaps = self.squared_gaps * _REMEMBERED + gap * gap
        self.arrived_at = now_seconds

    @property
    def longest_gap(self) -> float:
        """The seconds of silence after which the flow counts as having left."""
        if not self.gaps:
            return MEMORY_SECONDS
        max_gaps = MAX_GAPS * (1.0 + UNSURE_GAPS / self.num_gaps)
        return min(MEMORY_SECONDS, max_gaps * self.squared_gaps / self.gaps)


class CalmLoad:
    """The loads of flows, the set of calm flows, and z. The times given never go back."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._calm = _Load()  # of all calm flows that have not left
        self._left_at: FlowHeap[tuple[float]] = FlowHeap()
        self._deviations = FIRST_DEVIATIONS

    def __len__(self) -> int:
        return len(self._flows)

    def began(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        """Count a dispatched request; `is_calm` says whether `flow` is within its share."""
        one = self._flows.get(flow)
        if one is None:
            one = self._flows[flow] = _Flow(at_seconds=now_seconds, since_seconds=now_seconds)
        one.arrived(now_seconds)
        self._change(flow, one, 1, is_calm, now_seconds)

    def ended(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        one = self._flows.get(flow)
        if one is not None and one.num_in_flight:
            self._change(flow, one, -1, is_calm, now_seconds)

    def forget(self, flow: str) -> None:
        one = self._flows.pop(flow, None)
        if one is not None:
            self._drop(flow, one)

    def learn(self, waited_seconds: float) -> None:
        """Adjust z after a calm flow's request was dispatched while others were held back."""
        step = _STEP_PLACES / math.sqrt(max(1.0, self._calm.mean))
        change = step if waited_seconds > GRACE_SECONDS else -_MISSED * step
        self._deviations = min(max(0.0, self._deviations + change), MAX_DEVIATIONS)

    def places(self, now_seconds: float, num_places: float = math.inf) -> float:
        """Return how many of the pool's places to reserve; 0 without a calm flow."""
        left_at, calm = self._left_at, self._calm
        while (flow := left_at.first()) is not None:
            at = left_at.key(flow)
            if at is None or at[0] > now_seconds:
                mean = calm.at(now_seconds)
                # A sudden crowd counts at once, not only when the mean has followed.
                typical = max(mean, calm.num_in_flight)
                wanted = 1.0 + self._deviations * math.sqrt(typical)
                return min(wanted, max(1.0, num_places - mean))
            self._drop(flow, self._flows[flow])
        return 0.0

    def _change(self, flow: str, one: _Flow, by: int, is_calm: bool, now_seconds: float) -> None:
        expected = one.at(now_seconds)
        one.move(now_seconds)
        self._calm.move(now_seconds)
        if one.is_counted:
            # A new flow's mean moves faster than that of the sum, which has to follow.
            self._calm.mean = max(0.0, self._calm.mean + one.mean - expected)
        if is_calm and not one.is_counted:
            one.is_counted = True
            self._calm.add(one, 1)
        elif one.is_counted and not is_calm:
            self._drop(flow, one)
        one.num_in_flight += by
        if is_calm:
            self._calm.num_in_flight += by
            self._left_at.put(flow, (now_seconds + one.longest_gap,))

    def _drop(self, flow: str, one: _Flow) -> None:
        if one.is_counted:
            one.is_counted = False
            self._left_at.remove(flow)
            self._calm.add(one, -1)
