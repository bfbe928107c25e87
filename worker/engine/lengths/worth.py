"""The worth of a drafted token, by sequence.

Where new requests take the places of finished ones, each token is worth 1/n of a step. In a closed
batch, a sequence that gets ahead saves one row of one later step, and only the last to finish saves
a whole step. Of m sequences that gain g tokens each, with the spread of g chance events, the last
is expected to gain g - s·√g, where s is how far the least of m normal numbers is below their mean
(Blom's approximation).
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

_NEAR = 1.5  # times as fast is about as fast
_HORIZON_STEPS = 100.0  # that answers last
_PATIENCE_STEPS = 16
_MEMORY_PLACES = 6.0
_FIRST_CHANCE, _MIN_CHANCE = 0.75, 0.25


class Newcomers:
    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE
        self._free_since: deque[int] = deque()

    def ended(self, now: int, num_left: int) -> None:
        """Record that a sequence ended at step `now`, with `num_left` still decoding. A request
        that comes after all have ended does not take a place among others.
        """
        self._free_since.append(now)
        if not num_left:
            self.pass_to(now + _PATIENCE_STEPS + 1)

    def came(self, now: int) -> None:
        self.pass_to(now)
        if self._free_since:
            self._free_since.popleft()
            self.chance += (1.0 - self.chance) / _MEMORY_PLACES

    def pass_to(self, now: int) -> None:
        """Count as not taken the places that have stayed free for long."""
        while self._free_since and now - self._free_since[0] > _PATIENCE_STEPS:
            self._free_since.popleft()
            self.chance += (_MIN_CHANCE - self.chance) / _MEMORY_PLACES


def worths(
    paces: Sequence[float], plain: Callable[[int], float], chance_of_newcomer: float
) -> list[float]:
    """Return the worth of a token of each sequence, as a multiple of 1/n of a plain step.

    `paces` are the numbers of tokens that sequences could make in a step, at least 1; `plain` gives
    the seconds of a plain step of 1, …, n sequences.
    """
    num = len(paces)
    if num < 2 or chance_of_newcomer >= 1.0:
        return [1.0] * num
    falling = sorted(-pace for pace in paces)  # the first to end comes first
    whole = plain(num)
    shares: dict[float, float] = {}
    for pace in set(paces):
        first = bisect_left(falling, -pace * _NEAR)
        end = bisect_right(falling, -pace / _NEAR)
        before, after = plain(num - first), plain(num - end) if end < num else 0.0
        alone = num * (before - after) / (end - first) / whole
        alone *= _gain_of_the_last(_HORIZON_STEPS * (pace - 1.0), end - first)
        shares[pace] = chance_of_newcomer + (1.0 - chance_of_newcomer) * alone
    return [shares[pace] for pace in paces]


def _gain_of_the_last(gained: float, num: int) -> float:
    """Return the smallest of several gains that average `gained` tokens, divided by that."""
    below = _least_of(num)
    return max(0.0, 1.0 - below / math.sqrt(gained)) if gained > below * below else 0.0


@lru_cache(maxsize=1024)
def _least_of(num: int) -> float:
    """Return how many standard deviations the least of `num` normal numbers is below the mean."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))
