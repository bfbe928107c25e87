"""What scheduling a step ahead saves, and sizes that are alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_ASSUMED_AHEAD = 0.985  # of the time of a step that is not scheduled ahead
_ASSUMED_WEIGHT = 24.0  # steps of each kind that count as much as that assumption
_LEAD_WINDOW = 64  # steps of each kind that tell
_MIN_MERGED = 32  # smaller sizes have a bucket of their own


def bucket(size: int) -> int:
    """The knot of a size: every size below 32 has its own, then there are sixteen to an octave."""
    if size < _MIN_MERGED:
        return size
    shift = size.bit_length() - 5
    return (shift << 4) + (size >> shift)


class Lead:
    """How long a step takes that was scheduled ahead, as a part of what it takes otherwise; owns
    the steps that tell, and when which sizes were seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # by bucket: when last, and how often
        self._ahead: deque[float] = deque(maxlen=_LEAD_WINDOW)
        self._waited: deque[float] = deque(maxlen=_LEAD_WINDOW)
        self.factor = _ASSUMED_AHEAD

    def seen(self, size: int) -> tuple[int, int]:
        """When a size about this one (within an eighth) was last run ahead, and how often: 0, 0 for
        never.
        """
        first, last = bucket(max(1, size - size // 8)), bucket(size + size // 8)
        near = [self._seen[key] for key in range(first, last + 1) if key in self._seen]
        return max((clock for clock, _ in near), default=0), sum(count for _, count in near)

    def note_ahead(self, size: int, clock: int) -> None:
        """A step of this size was scheduled ahead."""
        key = bucket(size)
        self._seen[key] = clock, self._seen.get(key, (0, 0))[1] + 1

    def observe(self, size: int, residual: float, is_ahead: bool) -> None:
        """A step took longer than the curve says, by this factor (its logarithm)."""
        if is_ahead:
            self._ahead.append(residual)
        elif bucket(size) in self._seen:  # else the curve is that of such steps alone
            self._waited.append(residual)
        count = min(len(self._ahead), len(self._waited))
        if count:
            saved = min(0.0, _middle(self._ahead) - _middle(self._waited))
            assumed = _ASSUMED_WEIGHT * math.log(_ASSUMED_AHEAD)
            self.factor = math.exp((assumed + count * saved) / (_ASSUMED_WEIGHT + count))


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
