"""disagg-headers-handler: name the prefill and encode endpoints to the decode endpoint.

    x-prefiller-host-port = first endpoint of `prefillProfile`
    x-encoder-hosts-ports = all endpoints of `encodeProfile`, separated by commas

Deprecated: disagg-profile-handler does this by itself. Only needed beside pd-profile-handler and
profile handlers that set no headers. Formerly `prefill-header-handler`.
"""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.plugins._shared.stages import ENCODE_PROFILE, PREFILL_PROFILE, stage_headers
from picker.types import InferenceRequest, SchedulingResult


class DisaggHeadersParameters(Parameters, frozen=True):
    prefill_profile: str = PREFILL_PROFILE
    encode_profile: str = ENCODE_PROFILE


class DisaggHeaders:
    """Sets the headers of both stages. Stateless."""

    def __init__(self, parameters: DisaggHeadersParameters) -> None:
        self._prefill = parameters.prefill_profile or PREFILL_PROFILE
        self._encode = parameters.encode_profile or ENCODE_PROFILE

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """The headers of the stages that found an endpoint."""
        return stage_headers(result.profiles, self._prefill, self._encode)


PLUGIN = PluginType(
    "disagg-headers-handler",
    DisaggHeadersParameters,
    configured(DisaggHeaders),
    deprecated_aliases=("prefill-header-handler",),
    stability=Stability.DEPRECATED,
)
