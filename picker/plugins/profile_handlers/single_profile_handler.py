"""single-profile-handler: run the only profile; its result is primary.

Refused when the picker starts with more than one profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins._shared.stages import Results, only_result
from picker.types import InferenceRequest, SchedulingResult


class SingleProfileHandler:
    """Runs one profile once. Stateless."""

    max_profiles: int | None = 1

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        return () if results else profiles[:1]

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The picked endpoints of the profile. Raises `RefusedError` 429 when it found none."""
        return only_result(results)


PLUGIN = PluginType("single-profile-handler", Parameters, plain(SingleProfileHandler))
