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

from collections.abc import Mapping, Sequence
from typing import Any

from picker.framework.attributes import Attributes, DataKey
from picker.framework.disaggregation import (
    DECODE_PROFILE,
    DISAGGREGATION_DECISION_KEY,
    MAX_PORT,
    PREFILL_PROFILE,
    SKIPPED_STAGES_KEY,
    Results,
    decision,
    decoded_result,
    first_picked,
    named_decider,
    note_failed,
    stage_headers,
    stage_runs,
    through_primary_port,
)
from picker.framework.findings import PEER_ENDPOINT_KEY
from picker.framework.interfaces import Decider
from picker.framework.registry import Parameters, PluginType, Stability
from picker.types import InferenceRequest, SchedulingResult

DEFAULT_DECIDER = "prefix-based-pd-decider"


class PdProfileHandlerParameters(Parameters, frozen=True):
    """`parameters` of a pd-profile-handler."""

    decode_profile: str = DECODE_PROFILE
    prefill_profile: str = PREFILL_PROFILE
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""
    prefix_match_info_producer_name: str = ""
    primary_port: int = 0
    decider_plugin_name: str = DEFAULT_DECIDER

    @property
    def without_effect(self) -> Mapping[str, str]:
        """What concerns cached prefixes."""
        names = ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName")
        return dict.fromkeys(names, "the decider knows what is cached")


class PdProfileHandler:
    """Runs up to two stages. Stateless once its decider is connected."""

    def __init__(self, parameters: PdProfileHandlerParameters) -> None:
        """Raises `ValueError` for a port that is none and for stages that share a profile."""
        self._decode = parameters.decode_profile or DECODE_PROFILE
        self._prefill = parameters.prefill_profile or PREFILL_PROFILE
        if self._decode == self._prefill:
            raise ValueError("prefillProfile must be another profile than decodeProfile")
        self._port = parameters.primary_port
        if not 0 <= self._port <= MAX_PORT:
            raise ValueError(f"primaryPort must be within 0..{MAX_PORT}, got {self._port}")
        self._decider_name = parameters.decider_plugin_name or DEFAULT_DECIDER
        self._decider: Decider | None = None

    @property
    def max_profiles(self) -> int | None:
        """Any number; those it does not know never run."""
        return None

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        """What later stages have to be near, what was decided, and why stages were left out."""
        return (PEER_ENDPOINT_KEY, DISAGGREGATION_DECISION_KEY, SKIPPED_STAGES_KEY)

    @property
    def references(self) -> Mapping[str, str]:
        """The decider."""
        return {"deciderPluginName": self._decider_name}

    @property
    def required_profiles(self) -> Mapping[str, str]:
        """That of the decode stage."""
        return {"decodeProfile": self._decode}

    @property
    def optional_profiles(self) -> Mapping[str, str]:
        """That of the prefill stage, which is what the handler is there for."""
        return {"prefillProfile": self._prefill}

    def connect(self, plugins: Mapping[str, object]) -> None:
        """Take the decider. Raises `ValueError` when it is none."""
        self._decider = named_decider(plugins, self._decider_name)

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        """Decode, then prefill where its decider says so."""
        note_failed(attributes, results, (self._prefill,))
        if self._decode not in results:
            return (self._decode,)
        decode = first_picked(results, self._decode)
        if decode is None or self._prefill in results or self._prefill not in profiles:
            return ()
        attributes.put(PEER_ENDPOINT_KEY, decode)
        decider = self._decider_name, self._decider
        runs = stage_runs(self._prefill, decider, request, decode, attributes)
        return (self._prefill,) if runs else ()

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The decode endpoints, or the primary port in front of the first. Raises `RefusedError`
        429 when decode found none.
        """
        headers = stage_headers(results, self._prefill, encode="")
        result = decoded_result(results, self._decode, headers)
        return through_primary_port(result, self._port) if self._port else result

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Leave what was decided where it can be counted."""
        decided = decision(result.profiles, self._prefill, encode="")
        attributes.put(DISAGGREGATION_DECISION_KEY, decided)


PLUGIN = PluginType(
    "pd-profile-handler",
    PdProfileHandlerParameters,
    lambda _name, parameters, _services: PdProfileHandler(parameters),
    stability=Stability.DEPRECATED,
)
