"""static-usage-limit-policy: every priority may fill the pool to the same `threshold` (1.0)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from picker.framework.registry import Parameters, PluginType, configured, require


class StaticUsageLimitPolicyParameters(Parameters, frozen=True):
    threshold: float = 1.0


class StaticUsageLimitPolicy:
    """One ceiling for all. Stateless."""

    def __init__(self, parameters: StaticUsageLimitPolicyParameters) -> None:
        """Raises `ValueError` for a ceiling below which no pool ever is."""
        self._threshold = parameters.threshold
        require(
            math.isfinite(self._threshold) and self._threshold > 0,
            "threshold",
            "be positive",
            self._threshold,
        )

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """The threshold, as often as there are priorities."""
        return [self._threshold] * len(priorities)


PLUGIN = PluginType(
    "static-usage-limit-policy",
    StaticUsageLimitPolicyParameters,
    configured(StaticUsageLimitPolicy),
)
