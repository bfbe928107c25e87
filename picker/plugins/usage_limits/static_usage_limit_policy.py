"""static-usage-limit-policy: every priority may fill the pool to the same `threshold` (1.0)."""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.registry import Parameters, PluginType, PositiveFloat, configured


class StaticUsageLimitPolicyParameters(Parameters, frozen=True):
    threshold: PositiveFloat = 1.0


class StaticUsageLimitPolicy:
    """One ceiling for all. Stateless."""

    def __init__(self, parameters: StaticUsageLimitPolicyParameters) -> None:
        self._threshold = parameters.threshold

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """The threshold, as often as there are priorities."""
        return [self._threshold] * len(priorities)


PLUGIN = PluginType(
    "static-usage-limit-policy",
    StaticUsageLimitPolicyParameters,
    configured(StaticUsageLimitPolicy),
)
