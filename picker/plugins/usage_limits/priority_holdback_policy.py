"""priority-holdback-policy: the lower a priority, the less of the pool it may fill.

With the n priorities counted from the highest, i = 0, to the lowest:

    domain rank     ceiling = maxCeiling − i · (maxCeiling − minCeiling) / (n − 1)
    domain value    ceiling = minCeiling + (p − lowest) / (highest − lowest)
                              · (maxCeiling − minCeiling)

A single priority may fill the pool to `maxCeiling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from picker.framework.registry import Parameters, PluginType, Stability, configured


class PriorityHoldbackPolicyParameters(Parameters, frozen=True):
    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_ceiling: float = 1.0
    domain: Literal["rank", "value"] = "rank"
    shape: Literal["linear"] = "linear"


class PriorityHoldbackPolicy:
    """Ceilings on a straight line. Stateless."""

    def __init__(self, parameters: PriorityHoldbackPolicyParameters) -> None:
        """Raises `ValueError` for a maxCeiling out of range."""
        self._least, self._greatest = parameters.min_ceiling, parameters.max_ceiling
        if not self._least < self._greatest <= 1:
            text = f"maxCeiling must be above minCeiling and at most 1, got {self._greatest}"
            raise ValueError(text)
        self._by_value = parameters.domain == "value"

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        spread, last = self._greatest - self._least, len(priorities) - 1
        if last < 1:
            return [self._greatest] * len(priorities)
        if self._by_value:
            lowest, span = priorities[-1], priorities[0] - priorities[-1]
            return [self._least + (one - lowest) / span * spread for one in priorities]
        return [self._greatest - place * spread / last for place in range(len(priorities))]


PLUGIN = PluginType(
    "priority-holdback-policy",
    PriorityHoldbackPolicyParameters,
    configured(PriorityHoldbackPolicy),
    stability=Stability.ALPHA,
)
