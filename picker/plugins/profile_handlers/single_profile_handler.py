"""single-profile-handler: run the only profile; its result is primary.

Refused when the picker starts with more than one profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType
from picker.types import InferenceRequest, ProfileResult, SchedulingResult


class SingleProfileHandler:
    """Runs one profile once. Stateless."""

    @property
    def max_profiles(self) -> int | None:
        """One."""
        return 1

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        """The profile, unless it ran."""
        return () if results else profiles[:1]

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """The picked endpoints of the profile. Raises `RefusedError` 429 when it found none."""
        for name, result in results.items():
            if result is not None and result.picked:
                endpoints = tuple(scored.candidate.endpoint for scored in result.picked)
                return SchedulingResult(endpoints, name, _found(results))
        raise RefusedError(Code.RESOURCE_EXHAUSTED, "failed to find target endpoint")


def _found(results: Mapping[str, ProfileResult | None]) -> Mapping[str, ProfileResult]:
    """The profiles that found something."""
    return {name: result for name, result in results.items() if result is not None}


PLUGIN = PluginType(
    "single-profile-handler",
    Parameters,
    lambda _name, _parameters, _services: SingleProfileHandler(),
)
