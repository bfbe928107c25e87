"""How much room tenants need who stay within their share: as much as their bursts have taken.

Theory of operation. Of whom requests come independently of each other has about `mean` of them
under way, and now and then some roots of that more. So

    places kept  =  1 + z · √(what calm flows have under way)

A flow is calm while it is within its share. What it has under way is its mean of the last seconds,
and at least what it has now. How large z has to be depends on how soon others make room, which
nobody knows beforehand; so it is learned. Of each request of a calm flow that goes while others are
held back it is seen whether it had to wait:

    it waited     z grows by what two more places come to
    it did not    z shrinks by a two-hundredth of that

Where that balances, one request in two hundred waits. z begins so large that the first bursts find
room, and is never larger than `MOST_DEVIATIONS`.

Nothing is kept for those who have gone, and one place for those of whom something is still under
way: once nothing of a calm flow has come or ended for `PATIENCE` times the gap between two requests
that one would usually be in (Σ gap² / Σ gap, of the last hundred or so, so that pauses between
bursts count as what they are), and after ten seconds in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEAN_SECONDS = 3.0
MEMORY_SECONDS = 10.0
FIRST_DEVIATIONS = 2.5
MOST_DEVIATIONS = 4.0
PATIENCE = 3.0
GRACE_SECONDS = 0.001  # whoever waits no longer than that has found room
_STEP_PLACES = 2.0
_MISSED = 0.005  # the part of requests that may have to wait
_REMEMBERED = 0.99  # of gaps, with each one


@dataclass(slots=True)
class _Load:
    """What is under way, and the mean of it up to a time."""

    num_under_way: int = 0
    mean: float = 0.0
    at_seconds: float = 0.0
    is_calm: bool = False

    def at(self, now_seconds: float) -> float:
        """The mean now."""
        passed = max(0.0, now_seconds - self.at_seconds)
        remembered = math.exp(-passed / MEAN_SECONDS)
        return self.num_under_way + (self.mean - self.num_under_way) * remembered

    def move(self, now_seconds: float) -> None:
        """Know the mean up to now."""
        self.mean = self.at(now_seconds)
        self.at_seconds = max(self.at_seconds, now_seconds)


class CalmLoad:
    """Owns what each flow has under way, which of them are calm, and what was learned of bursts.

    Times never go back.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Load] = {}
        self._calm = _Load()  # of all calm flows together
        self._came_at: float | None = None
        self._seen_at = -math.inf  # a request of a calm flow came, or was over
        self._gaps = self._squared_gaps = 0.0
        self._deviations = FIRST_DEVIATIONS

    def __len__(self) -> int:
        """Flows that are known."""
        return len(self._flows)

    def began(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        """A request of `flow` is under way, which is within its share, or not."""
        load = self._judged(flow, is_calm, now_seconds)
        load.num_under_way += 1
        if is_calm:
            self._calm.num_under_way += 1
            self._came(now_seconds)

    def ended(self, flow: str, is_calm: bool, now_seconds: float) -> None:
        """It is over."""
        if flow not in self._flows:
            return
        load = self._judged(flow, is_calm, now_seconds)
        if load.num_under_way:
            load.num_under_way -= 1
            if is_calm:
                self._calm.num_under_way -= 1
                self._seen_at = now_seconds

    def forget(self, flow: str) -> None:
        """Do not know `flow` any more."""
        load = self._flows.pop(flow, None)
        if load is not None and load.is_calm:
            self._leave(load)

    def learn(self, waited_seconds: float) -> None:
        """A request of a calm flow goes while others are held back, after so long."""
        step = _STEP_PLACES / math.sqrt(max(1.0, self._calm.mean))
        change = step if waited_seconds > GRACE_SECONDS else -_MISSED * step
        self._deviations = min(max(0.0, self._deviations + change), MOST_DEVIATIONS)

    def places(self, now_seconds: float) -> float:
        """How many to keep free; 0 while no calm flow is there."""
        calm = self._calm
        if self._comes(now_seconds):
            typical = max(calm.at(now_seconds), calm.num_under_way)
            return 1.0 + self._deviations * math.sqrt(typical)
        return 1.0 if calm.num_under_way else 0.0

    def _comes(self, now_seconds: float) -> bool:
        """Whether something of a calm flow may come any moment."""
        longest = MEMORY_SECONDS
        if self._gaps:
            longest = min(longest, PATIENCE * self._squared_gaps / self._gaps)
        return now_seconds - self._seen_at < longest

    def _came(self, now_seconds: float) -> None:
        if self._came_at is not None:
            gap = now_seconds - self._came_at
            if gap < MEMORY_SECONDS:
                self._gaps = self._gaps * _REMEMBERED + gap
                self._squared_gaps = self._squared_gaps * _REMEMBERED + gap * gap
        self._came_at = self._seen_at = now_seconds

    def _judged(self, flow: str, is_calm: bool, now_seconds: float) -> _Load:
        load = self._flows.get(flow)
        if load is None:
            load = self._flows[flow] = _Load(at_seconds=now_seconds)
        load.move(now_seconds)
        self._calm.move(now_seconds)
        if load.is_calm is not is_calm:
            load.is_calm = is_calm
            if is_calm:
                self._calm.num_under_way += load.num_under_way
                self._calm.mean += load.mean
            else:
                self._leave(load)
        return load

    def _leave(self, load: _Load) -> None:
        calm = self._calm
        calm.num_under_way -= load.num_under_way
        calm.mean = max(0.0, calm.mean - load.at(calm.at_seconds))
