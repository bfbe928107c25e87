"""Profile handlers for disaggregated requests, whose stages run on different endpoints.

disagg-profile-handler: encode, prefill and decode on different endpoints.

    decode-first:   decode → encode, if its decider says so → prefill, if its decider says so
    prefill-first:  encode, if its decider says so → prefill → decode

The decode endpoint is the request's destination; headers name the others: `x-prefiller-host-port`
the first picked prefill endpoint, `x-encoder-hosts-ports` all picked encode endpoints. A stage is
skipped when its profile is not configured, when its decider is not named or declines, and when it
finds no endpoint: the decode endpoint then does its work as well. The request is refused only when
the decode stage finds no endpoint.

While a later stage runs, the attribute `PEER_ENDPOINT_KEY` is the endpoint of the stage that it has
to be near: the decode endpoint in decode-first order, in prefill-first order that of the latest
stage that found one. Deciders get the decode endpoint, or none in prefill-first order, where
prefill has no decider: it runs whenever it has a profile.

Parameters are either `{stageOrder, profiles: {decode, prefill, encode}, deciders: {prefill,
encode}}` or the older flat ones, of which `deciderPluginName` is a synonym for the prefill decider.
The decision is stored in `DISAGGREGATION_DECISION_KEY`, the reasons for skipped stages in
`SKIPPED_STAGES_KEY`.

pd-profile-handler: decode and prefill on different endpoints; see disagg-profile-handler.

    decode → prefill, if the decider `deciderPluginName` says so

`primaryPort` (0: off), where the pod's sidecar listens, replaces the port of the destination; the
header `x-data-parallel-host-port` then names the picked endpoint, to which the sidecar forwards.
Only one endpoint is named then, because the header would be wrong for the next. Deprecated.

disagg-headers-handler: name the prefill and encode endpoints in headers.

    x-prefiller-host-port = first endpoint of `prefillProfile`
    x-encoder-hosts-ports = all endpoints of `encodeProfile`, separated by commas

Deprecated: only needed beside profile handlers that set no headers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picker.framework.attributes import PEER_ENDPOINT_KEY, Attributes
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY, SKIPPED_STAGES_KEY
from picker.framework.interfaces import Decider
from picker.framework.registry import Parameters, PluginType, PortOrZero, Stability
from picker.plugins._shared.stages import (
    DECODE_PROFILE,
    ENCODE_PROFILE,
    PREFILL_PROFILE,
    Results,
    decoded_result,
    disaggregation_decision,
    first_picked,
    named_decider,
    note_failed,
    stage_headers,
    stage_runs,
    through_primary_port,
)
from picker.types import InferenceRequest, SchedulingResult

_DECODE_FIRST = frozenset(("", "decode", "decodefirst"))
_PREFILL_FIRST = frozenset(("prefill", "prefillfirst"))
_NESTED = frozenset(("stageOrder", "profiles", "deciders"))


class StageProfiles(Parameters, frozen=True):
    decode: str = DECODE_PROFILE
    prefill: str = PREFILL_PROFILE
    encode: str = ENCODE_PROFILE


class StageDeciders(Parameters, frozen=True):
    prefill: str = ""
    encode: str = ""


class DisaggProfileHandlerParameters(Parameters, frozen=True):
    stage_order: str = ""
    profiles: StageProfiles | None = None
    deciders: StageDeciders | None = None
    decode_profile: str = ""
    prefill_profile: str = ""
    encode_profile: str = ""
    prefill_decider_plugin_name: str = ""
    encode_decider_plugin_name: str = ""
    decider_plugin_name: str = ""


@dataclass(frozen=True, slots=True)
class Stages:
    """The parameters, whichever form they have.

    `references` maps parameters to the deciders that they name. A decider is "" if none is named,
    `encode` is "" without that stage. `required` and `optional` map parameters to profiles: decode,
    and the profiles that are configured explicitly or have a decider.
    """

    decode: str
    prefill: str
    encode: str
    prefill_decider: str
    encode_decider: str
    references: Mapping[str, str]
    required: Mapping[str, str]
    optional: Mapping[str, str]
    is_prefill_first: bool = False


class DisaggProfileHandler:
    max_profiles: int | None = None  # profiles that it does not know never run
    produces = (PEER_ENDPOINT_KEY, DISAGGREGATION_DECISION_KEY, SKIPPED_STAGES_KEY)

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.references = stages.references
        self.required_profiles = stages.required
        self.optional_profiles = stages.optional
        self._deciders: dict[str, tuple[str, Decider | None]] = {
            stages.prefill: (stages.prefill_decider, None),
            stages.encode: (stages.encode_decider, None),
        }

    def connect(self, plugins: Mapping[str, object]) -> None:
        for stage, (name, _) in self._deciders.items():
            self._deciders[stage] = (name, named_decider(plugins, name))

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        note_failed(attributes, results, (self._stages.encode, self._stages.prefill))
        pick = self._prefill_first if self._stages.is_prefill_first else self._decode_first
        stage = pick(request, frozenset(profiles), results, attributes)
        return () if stage is None else (stage,)

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        stages = self._stages
        headers = stage_headers(results, stages.prefill, stages.encode)
        return decoded_result(results, stages.decode, headers)

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        stages = self._stages
        decided = disaggregation_decision(result.profiles, stages.prefill, stages.encode)
        attributes[DISAGGREGATION_DECISION_KEY] = decided

    def _decode_first(
        self,
        request: InferenceRequest,
        profiles: frozenset[str],
        results: Results,
        attributes: Attributes,
    ) -> str | None:
        stages = self._stages
        if stages.decode not in results:
            return stages.decode
        decode = first_picked(results, stages.decode)
        # Prefill is the last stage, and without a decode endpoint the others are useless.
        if decode is None or stages.prefill in results:
            return None
        attributes[PEER_ENDPOINT_KEY] = decode
        for stage in (stages.encode, stages.prefill):
            if stage not in profiles or stage in results:
                continue
            if stage_runs(stage, self._deciders[stage], request, decode, attributes):
                return stage
        return None

    def _prefill_first(
        self,
        request: InferenceRequest,
        profiles: frozenset[str],
        results: Results,
        attributes: Attributes,
    ) -> str | None:
        stages = self._stages
        if stages.decode in results:
            return None
        peer = first_picked(results, stages.prefill) or first_picked(results, stages.encode)
        if peer is not None:
            attributes[PEER_ENDPOINT_KEY] = peer
        # Encoding after prefill would be too late: its decider is asked only at the beginning.
        has_begun = stages.encode in results or stages.prefill in results
        if stages.encode in profiles and not has_begun:
            decider = self._deciders[stages.encode]
            if stage_runs(stages.encode, decider, request, None, attributes):
                return stages.encode
        if stages.prefill in profiles and stages.prefill not in results:
            return stages.prefill
        return stages.decode


def _handler_of(parameters: DisaggProfileHandlerParameters) -> DisaggProfileHandler:
    """Create the handler from either form of the parameters, which exclude each other."""
    names = zip(parameters.__struct_encode_fields__, parameters.__struct_fields__, strict=True)
    written = [word for word, field in names if getattr(parameters, field) not in ("", None)]
    nested = [word for word in written if word in _NESTED]
    flat = [word for word in written if word not in _NESTED]
    if flat and nested:
        raise ValueError(f"{nested[0]} and {flat[0]} cannot both be given: use one form throughout")
    stages = _flat_stages(parameters) if flat else _nested_stages(parameters)
    if len({stages.decode, stages.prefill, stages.encode}) < 3:
        where = "decodeProfile, prefillProfile and encodeProfile" if flat else "profiles"
        raise ValueError(f"{where}: each stage needs a profile of its own")
    return DisaggProfileHandler(stages)


def _flat_stages(parameters: DisaggProfileHandlerParameters) -> Stages:
    prefill_decider, older = parameters.prefill_decider_plugin_name, parameters.decider_plugin_name
    if prefill_decider and older and prefill_decider != older:
        raise ValueError("prefillDeciderPluginName and deciderPluginName name two prefill deciders")
    encode_decider = parameters.encode_decider_plugin_name
    decode = parameters.decode_profile or DECODE_PROFILE
    prefill = parameters.prefill_profile or PREFILL_PROFILE
    encode = parameters.encode_profile or ENCODE_PROFILE
    has_prefill = bool(parameters.prefill_profile or prefill_decider or older)
    has_encode = bool(parameters.encode_profile or encode_decider)
    return Stages(
        decode,
        prefill,
        encode,
        prefill_decider or older,
        encode_decider,
        references=_named(
            prefillDeciderPluginName=prefill_decider,
            deciderPluginName=older,
            encodeDeciderPluginName=encode_decider,
        ),
        required={"decodeProfile": decode},
        optional=_named(
            prefillProfile=prefill if has_prefill else "",
            encodeProfile=encode if has_encode else "",
        ),
    )


def _nested_stages(parameters: DisaggProfileHandlerParameters) -> Stages:
    profiles = parameters.profiles or StageProfiles()
    deciders = parameters.deciders or StageDeciders()
    order = parameters.stage_order.lower().replace("-", "").replace("_", "")
    if order not in _DECODE_FIRST | _PREFILL_FIRST:
        known = "decode-first, prefill-first"
        raise ValueError(f"stageOrder '{parameters.stage_order}' is unknown, allowed: {known}")
    is_prefill_first = order in _PREFILL_FIRST
    if is_prefill_first and deciders.prefill:
        raise ValueError("deciders.prefill has nothing to decide with stageOrder prefill-first")
    decode = profiles.decode or DECODE_PROFILE
    prefill, encode = profiles.prefill or PREFILL_PROFILE, profiles.encode or ENCODE_PROFILE
    has_prefill = is_prefill_first or deciders.prefill or prefill != PREFILL_PROFILE
    has_encode = deciders.encode or encode != ENCODE_PROFILE
    return Stages(
        decode,
        prefill,
        encode,
        deciders.prefill,
        deciders.encode,
        _named(**{"deciders.prefill": deciders.prefill, "deciders.encode": deciders.encode}),
        {"profiles.decode": decode},
        _named(
            **{
                "profiles.prefill": prefill if has_prefill else "",
                "profiles.encode": encode if has_encode else "",
            }
        ),
        is_prefill_first,
    )


def _named(**names: str) -> dict[str, str]:
    return {parameter: name for parameter, name in names.items() if name}


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
        names = ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName")
        return dict.fromkeys(names, "the decider knows what is cached")


class PdProfileHandler(DisaggProfileHandler):
    def __init__(self, parameters: PdProfileHandlerParameters) -> None:
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
        result = super().process_results(request, results)
        return through_primary_port(result, self._port) if self._port else result


class DisaggHeadersParameters(Parameters, frozen=True):
    prefill_profile: str = PREFILL_PROFILE
    encode_profile: str = ENCODE_PROFILE


class DisaggHeaders:
    def __init__(self, parameters: DisaggHeadersParameters) -> None:
        self._prefill = parameters.prefill_profile or PREFILL_PROFILE
        self._encode = parameters.encode_profile or ENCODE_PROFILE

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        return stage_headers(result.profiles, self._prefill, self._encode)


PLUGINS = (
    PluginType("disagg-profile-handler", _handler_of),
    PluginType("pd-profile-handler", PdProfileHandler, Stability.DEPRECATED),
    PluginType(
        "disagg-headers-handler",
        DisaggHeaders,
        Stability.DEPRECATED,
        deprecated_aliases=("prefill-header-handler",),
    ),
)
