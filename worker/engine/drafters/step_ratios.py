"""What scheduling a step ahead saves, and sizes that are alike.

Theory of operation
-------------------
On a shared machine the speed of a moment differs from that of the next by more than scheduling
ahead saves. So only steps in a row are compared, of one size, of which one was scheduled ahead and
the other one was not. The median of such pairs is weighed against what is assumed, each by how sure
it is: on a noisy machine many pairs are needed, on a quiet one, or where much is saved, a few.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_ASSUMED_AHEAD = 0.985  # of the time of a step that is not scheduled ahead
_ASSUMED_SPREAD = 0.015  # of that assumption: standard deviation of its logarithm
_LEAD_WINDOW = 64  # pairs that tell
_LEAST_PAIRS = 9  # of which the middle one is none of a late step or two
_ASSUMED_NOISE, _NOISE_WEIGHT = 0.15, 4.0  # spread of a pair, and the pairs it counts as
_NEWS_SPREADS = 4.0  # standard errors that are chance
_OF_MEDIAN = 1.57  # variance of a median of many, by that of a mean
_OF_DEVIATION = 1.48  # standard deviation by median deviation
_MIN_MERGED = 32  # smaller sizes have a bucket of their own


def bucket(size: int) -> int:
    """The knot of a size: every size below 32 has its own, then there are sixteen to an octave."""
    if size < _MIN_MERGED:
        return size
    shift = size.bit_length() - 5
    return (shift << 4) + (size >> shift)


class Lead:
    """How long a step takes that was scheduled ahead, as a part of what it takes otherwise; owns
    the pairs of steps that tell, and when which sizes were seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # by bucket: when last, and how often
        self._pairs: deque[float] = deque(maxlen=_LEAD_WINDOW)
        self._last = (0, 0, 0.0, False)  # clock, size, seconds, whether it was ahead
        self.factor = _ASSUMED_AHEAD

    def seen(self, size: int) -> tuple[int, int]:
        """When a size about this one (within an eighth) was last run ahead, and how often: 0, 0 for
        never.
        """
        first, last = bucket(max(1, size - size // 8)), bucket(size + size // 8)
        near = [self._seen[key] for key in range(first, last + 1) if key in self._seen]
        return max((clock for clock, _ in near), default=0), sum(count for _, count in near)

    def observe(self, size: int, seconds: float, is_ahead: bool, clock: int) -> None:
        """A step of this size took so long, at tick `clock`."""
        before, its_size, its_seconds, was_ahead = self._last
        self._last = clock, size, seconds, is_ahead
        if is_ahead:
            key = bucket(size)
            self._seen[key] = clock, self._seen.get(key, (0, 0))[1] + 1
        if before != clock - 1 or its_size != size or was_ahead == is_ahead:
            return
        ratio = math.log(seconds) - math.log(its_seconds)
        self._pairs.append(ratio if is_ahead else -ratio)
        if len(self._pairs) >= _LEAST_PAIRS:
            self.factor = self._estimate()

    def _estimate(self) -> float:
        saved = _middle(self._pairs)
        spread = _OF_DEVIATION * _middle(abs(one - saved) for one in self._pairs)
        number = len(self._pairs)
        spread += (_ASSUMED_NOISE - spread) * _NOISE_WEIGHT / (_NOISE_WEIGHT + number)
        variance = _OF_MEDIAN * spread**2 / number
        news = min(0.0, saved) - math.log(_ASSUMED_AHEAD)
        # What is further off than chance explains says how wrong the assumption is.
        doubt = max(_ASSUMED_SPREAD**2, news**2 - _NEWS_SPREADS**2 * variance)
        return _ASSUMED_AHEAD * math.exp(news * doubt / (doubt + variance))


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
