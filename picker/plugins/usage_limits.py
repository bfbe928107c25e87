"""Usage limits: how full the pool may be for each priority (`framework.flow.UsageLimitPolicy`).

static-usage-limit-policy: every priority may fill the pool to the same `threshold` (1.0).

priority-holdback-policy: the lower a priority, the less of the pool it may fill. With the n
priorities counted from the highest, i = 0, to the lowest:

    domain rank     ceiling = maxCeiling − i · (maxCeiling − minCeiling) / (n − 1)
    domain value    ceiling = minCeiling + (p − lowest) / (highest − lowest)
                              · (maxCeiling − minCeiling)

soft-reflective-ceiling-policy: lower priorities less often the fuller the pool. With saturation s
and the n priorities counted from the highest, i = 0, to the lowest:

    i = 0           ceiling = 1
    i > 0           c = 1 − i · s / (n − 1)
                    s < c       ceiling = 1
                    s ≥ 1       ceiling = 0
                    otherwise   ceiling = 1 at every round(s / (1 − s))-th call, else 0
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from picker.framework.registry import Parameters, PluginType, PositiveFloat, Stability


class StaticUsageLimitPolicy(Parameters, frozen=True):
    threshold: PositiveFloat = 1.0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return [self.threshold] * len(priorities)


class PriorityHoldbackPolicyParameters(Parameters, frozen=True):
    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_ceiling: float = 1.0
    domain: Literal["rank", "value"] = "rank"
    shape: Literal["linear"] = "linear"


class PriorityHoldbackPolicy:
    def __init__(self, parameters: PriorityHoldbackPolicyParameters) -> None:
        self._least, self._greatest = parameters.min_ceiling, parameters.max_ceiling
        if not self._least < self._greatest <= 1:
            text = f"maxCeiling must be above minCeiling and at most 1, got {self._greatest}"
            raise ValueError(text)
        self._by_value = parameters.domain == "value"

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        spread, last = self._greatest - self._least, len(priorities) - 1
        # A single priority has no lower ones to hold back, and the line no second point.
        if last < 1:
            return [self._greatest] * len(priorities)
        if self._by_value:
            lowest, span = priorities[-1], priorities[0] - priorities[-1]
            return [self._least + (one - lowest) / span * spread for one in priorities]
        return [self._greatest - place * spread / last for place in range(len(priorities))]


OPEN, SHUT = 1.0, 0.0


class SoftReflectiveCeilingPolicy:
    def __init__(self) -> None:
        self._calls = 0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        self._calls += 1
        last, ceilings = len(priorities) - 1, [OPEN] * len(priorities)
        for place in range(1, len(priorities)):
            if saturation >= 1.0 - place * saturation / last:
                ceilings[place] = OPEN if self._is_its_turn(saturation) else SHUT
        return ceilings

    def _is_its_turn(self, saturation: float) -> bool:
        """Return whether this call opens the ceiling; only called for saturations from 0.5 up."""
        if not saturation < 1.0:
            return False
        every = math.floor(saturation / (1.0 - saturation) + 0.5)
        return self._calls % max(1, every) == 0


PLUGINS = (
    PluginType("static-usage-limit-policy", StaticUsageLimitPolicy),
    PluginType("priority-holdback-policy", PriorityHoldbackPolicy, Stability.ALPHA),
    PluginType("soft-reflective-ceiling-policy", SoftReflectiveCeilingPolicy, Stability.ALPHA),
)
