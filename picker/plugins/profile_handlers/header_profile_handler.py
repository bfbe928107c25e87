"""header-profile-handler: a request header names the profile to run.

    profile = the only one, when there is one
              headers[headerName] without blanks around it, else defaultProfile

A blank header is no header. A name that is no profile runs none, and the request is refused (429).
Meant for several pickers in a row, each deciding one stage of a disaggregated request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.plugins._shared.stages import DECODE_PROFILE, Results, only_result
from picker.types import InferenceRequest, SchedulingResult

DEFAULT_HEADER = "EPP-Profile"


class HeaderProfileHandlerParameters(Parameters, frozen=True):
    header_name: str = DEFAULT_HEADER
    default_profile: str = DECODE_PROFILE


class HeaderProfileHandler:
    """Runs the profile that is named. Stateless."""

    max_profiles: int | None = None
    required_profiles: Mapping[str, str] = MappingProxyType({})  # a request may name any

    def __init__(self, parameters: HeaderProfileHandlerParameters) -> None:
        self._header = (parameters.header_name.strip() or DEFAULT_HEADER).lower()
        self._default = parameters.default_profile.strip() or DECODE_PROFILE
        is_chosen = self._default != DECODE_PROFILE
        self.optional_profiles = {"defaultProfile": self._default} if is_chosen else {}

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        """The named profile, unless one ran."""
        if results:
            return ()
        if len(profiles) == 1:
            return profiles
        name = request.headers.get(self._header, "").strip() or self._default
        return (name,) if name in profiles else ()

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The picked endpoints of the profile. Raises `RefusedError` 429 when it found none."""
        return only_result(results)


PLUGIN = PluginType(
    "header-profile-handler",
    HeaderProfileHandlerParameters,
    configured(HeaderProfileHandler),
    stability=Stability.ALPHA,
)
