"""Step costs: seconds by the number of tokens, profiled at start and refined by every step.

Only ratios matter, and on a shared machine all step times change together. So two steps in a row
with different numbers of tokens correct the table by half of the difference at each size; the more
pairs a point has seen, the less another one moves it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

from worker.executor.profiling import Points, StepProfile

_MAX_SURPRISE = 0.4  # of a pair's log ratio: more is a late step
_SPEED_RATE = 0.1
_FIRST_WEIGHT, _MAX_WEIGHT = 4.0, 32.0  # pairs that a point of the table counts as

# Before anything is measured: reading the weights takes as long as 24 tokens, a draft of the device
# a tenth of a step.
ASSUMED = StepProfile(steps=tuple((n, (24 + n) / 2500) for n in (1, 64)))
_ASSUMED_DRAFT = 0.1


@dataclass(slots=True)
class _Curve:
    """Seconds by size: linear between the sizes and beyond them, never falling."""

    sizes: list[int]
    measured: list[float]
    weights: list[float] = field(init=False)
    rising: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [_FIRST_WEIGHT] * len(self.sizes)
        self.rebuild()

    @classmethod
    def through(cls, points: Points) -> _Curve:
        return cls([size for size, _ in points], [seconds for _, seconds in points])

    def rebuild(self) -> None:
        # By chance more tokens may have taken less time, which means nothing.
        self.rising = list(accumulate(self.measured, max))

    def at(self, size: float) -> float:
        sizes, seconds = self.sizes, self.rising
        right = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return seconds[left] + slope * (size - sizes[left])

    def correct(self, size: int, change: float) -> None:
        """Multiply the seconds of `size` by up to e^`change`, less after many corrections."""
        i = bisect_left(self.sizes, size)
        if i == len(self.sizes) or self.sizes[i] != size:
            self.measured.insert(i, self.at(size))
            self.sizes.insert(i, size)
            self.weights.insert(i, _FIRST_WEIGHT)
        self.weights[i] = min(_MAX_WEIGHT, self.weights[i] + 1.0)
        self.measured[i] *= math.exp(change / self.weights[i])
        self.rebuild()


class StepCosts:
    """Sole owner of the table of step times. Seconds are those of the profiled machine, whatever
    its speed is now: compare them with each other only.
    """

    def __init__(self, profile: StepProfile = ASSUMED) -> None:
        self._steps = _Curve.through(profile.steps)
        assumed = [(n, _ASSUMED_DRAFT * self._steps.at(n)) for n in (1, 64)]
        self._first_draft = _Curve.through(profile.first_draft or assumed)
        self._next_draft = _Curve.through(profile.next_draft or assumed)
        self._speed = 0.0  # log of how much slower the machine is than when it was profiled
        self._last = (0, 0.0)  # tokens of the last step, and its log time beyond the table's

    @property
    def speed(self) -> float:
        """The number of clock seconds that one second of the table takes now."""
        return math.exp(self._speed)

    def step(self, num_tokens: float) -> float:
        return self._steps.at(num_tokens)

    def extra(self, num_known: int, num_more: int) -> float:
        """Return the seconds that `num_more` tokens add to a step of `num_known`."""
        return self._steps.at(num_known + num_more) - self._steps.at(num_known)

    def drafting(self, num_sequences: int, num_drafts: int) -> float:
        more = self._next_draft.at(num_sequences) * (num_drafts - 1)
        return self._first_draft.at(num_sequences) + more

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn that a step of this many tokens, none of a prompt, took `seconds`."""
        if num_tokens < 1 or not 0.0 < seconds < math.inf:
            return
        slowness = math.log(seconds / self.step(num_tokens))
        self._speed += _SPEED_RATE * (slowness - self._speed)
        last_tokens, last_slowness = self._last
        if last_tokens and last_tokens != num_tokens:
            surprise = slowness - last_slowness
            surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise)) / 2.0
            self._steps.correct(num_tokens, surprise)
            self._steps.correct(last_tokens, -surprise)
            slowness = math.log(seconds / self.step(num_tokens))
        self._last = (num_tokens, slowness)
