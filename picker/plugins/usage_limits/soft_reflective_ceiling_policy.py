"""soft-reflective-ceiling-policy: the fuller the pool, the less often lower priorities go.

With saturation s and the n priorities counted from the highest, i = 0, to the lowest:

    i = 0           ceiling = 1
    i > 0           c = 1 − i · s / (n − 1)
                    s < c       ceiling = 1
                    s ≥ 1       ceiling = 0
                    otherwise   ceiling = 1 every round(s / (1 − s))-th time it is asked, else 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from picker.framework.registry import Parameters, PluginType, Stability, plain

OPEN, SHUT = 1.0, 0.0


class SoftReflectiveCeilingPolicy:
    """Opens and shuts. Owns the number of times that it was asked."""

    def __init__(self) -> None:
        self._asked = 0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        self._asked += 1
        last, ceilings = len(priorities) - 1, [OPEN] * len(priorities)
        for place in range(1, len(priorities)):
            if saturation >= 1.0 - place * saturation / last:
                ceilings[place] = OPEN if self._is_its_turn(saturation) else SHUT
        return ceilings

    def _is_its_turn(self, saturation: float) -> bool:
        """Of a pool that is between half full (below, every ceiling is above it) and full."""
        if not saturation < 1.0:
            return False
        every = math.floor(saturation / (1.0 - saturation) + 0.5)
        return self._asked % max(1, every) == 0


PLUGIN = PluginType(
    "soft-reflective-ceiling-policy",
    Parameters,
    plain(SoftReflectiveCeilingPolicy),
    stability=Stability.ALPHA,
)
