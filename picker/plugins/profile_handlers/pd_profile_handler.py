"""pd-profile-handler: decode and prefill on different endpoints; the older disagg-profile-handler.

    decode → prefill, if the decider `deciderPluginName` says so

With `primaryPort` (0: off) the destination's port is replaced by it, and the header
`x-data-parallel-host-port` names the endpoint that was picked: the sidecar of the pod listens at
the one and hands over to the other. Only one endpoint is named then, as the header would be wrong
for the next. The header `x-prefiller-host-port` is set here already; a disagg-headers-handler
beside it, which the reference needs for that, sets the same.

Deprecated.
"""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.registry import Parameters, PluginType, PortOrZero, Stability, configured
from picker.plugins._shared.stages import (
    DECODE_PROFILE,
    PREFILL_PROFILE,
    Results,
    through_primary_port,
)
from picker.plugins.profile_handlers.disagg_profile_handler import DisaggProfileHandler, Stages
from picker.types import InferenceRequest, SchedulingResult

DEFAULT_DECIDER = "prefix-based-pd-decider"


class PdProfileHandlerParameters(Parameters, frozen=True):
    decode_profile: str = DECODE_PROFILE
    prefill_profile: str = PREFILL_PROFILE
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""
    prefix_match_info_producer_name: str = ""
    primary_port: PortOrZero = 0
    decider_plugin_name: str = DEFAULT_DECIDER

    @property
    def without_effect(self) -> Mapping[str, str]:
        """What concerns cached prefixes."""
        names = ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName")
        return dict.fromkeys(names, "the decider knows what is cached")


class PdProfileHandler(DisaggProfileHandler):
    """Runs up to two stages, decode first."""

    def __init__(self, parameters: PdProfileHandlerParameters) -> None:
        """Raises `ValueError` for stages that share a profile."""
        decode = parameters.decode_profile or DECODE_PROFILE
        prefill = parameters.prefill_profile or PREFILL_PROFILE
        if decode == prefill:
            raise ValueError("prefillProfile must be another profile than decodeProfile")
        self._port = parameters.primary_port
        decider = parameters.decider_plugin_name or DEFAULT_DECIDER
        super().__init__(
            Stages(
                decode,
                prefill,
                encode="",
                prefill_decider=decider,
                encode_decider="",
                references={"deciderPluginName": decider},
                required={"decodeProfile": decode},
                optional={"prefillProfile": prefill},
            )
        )

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The decode endpoints, or the primary port in front of the first. Raises `RefusedError`
        429 when decode found none.
        """
        result = super().process_results(request, results)
        return through_primary_port(result, self._port) if self._port else result


PLUGIN = PluginType(
    "pd-profile-handler",
    PdProfileHandlerParameters,
    configured(PdProfileHandler),
    stability=Stability.DEPRECATED,
)
