"""disagg-profile-handler: run a request's encode, prefill and decode stages on different endpoints.

    decode-first:   decode → encode, if its decider says so → prefill, if its decider says so
    prefill-first:  encode, if its decider says so → prefill → decode

The decode endpoint is the request's destination; the others are told to it in the headers
`x-prefiller-host-port` (the first one picked) and `x-encoder-hosts-ports` (all of them). A stage
whose profile is not configured, whose decider is not named or says no, or that finds no endpoint is
left out: the decode endpoint then does its work as well. Only a decode stage that finds nothing
refuses the request; decode-first, nothing else runs then.

While a later stage runs, the finding `PEER_ENDPOINT_KEY` is the endpoint of the stage that it has
to be near: of decode in decode-first order, of the latest stage that found one in prefill-first.
Deciders see the decode endpoint, or none in prefill-first order, where prefill has no decider: it
runs whenever it has a profile.

Parameters are either `{stageOrder, profiles: {decode, prefill, encode}, deciders: {prefill,
encode}}` or the older `{decodeProfile, prefillProfile, encodeProfile, prefillDeciderPluginName,
encodeDeciderPluginName, deciderPluginName}`, the last of which is another word for the prefill
decider. What was decided is left in `DISAGGREGATION_DECISION_KEY`, why stages were left out in
`SKIPPED_STAGES_KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from picker.framework.attributes import Attributes, DataKey
from picker.framework.disaggregation import (
    DECODE_PROFILE,
    DISAGGREGATION_DECISION_KEY,
    ENCODE_PROFILE,
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
)
from picker.framework.findings import PEER_ENDPOINT_KEY
from picker.framework.interfaces import Decider
from picker.framework.registry import Parameters, PluginType
from picker.types import Candidate, InferenceRequest, SchedulingResult

_DECODE_FIRST = frozenset(("", "decode", "decodefirst"))
_PREFILL_FIRST = frozenset(("prefill", "prefillfirst"))
_ENCODE_DECIDER = "encodeDeciderPluginName"
_FLAT = (
    "decodeProfile",
    "prefillProfile",
    "encodeProfile",
    "prefillDeciderPluginName",
    _ENCODE_DECIDER,
    "deciderPluginName",
)


class StageProfiles(Parameters, frozen=True):
    """`profiles`: the name of each stage's profile."""

    decode: str = DECODE_PROFILE
    prefill: str = PREFILL_PROFILE
    encode: str = ENCODE_PROFILE


class StageDeciders(Parameters, frozen=True):
    """`deciders`: the plugin that decides whether a stage runs; "" for none."""

    prefill: str = ""
    encode: str = ""


class DisaggProfileHandlerParameters(Parameters, frozen=True):
    """`parameters` of a disagg-profile-handler, in both forms."""

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
    """The parameters in one form. `references` are the deciders by the parameter that names them.

    A decider is "" where none is named. `required` and `optional` are profiles by the parameter
    that names them: decode, and those that somebody wrote down or gave a decider.
    """

    decode: str
    prefill: str
    encode: str
    prefill_decider: str
    encode_decider: str
    is_prefill_first: bool = False
    references: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


class DisaggProfileHandler:
    """Runs up to three stages. Stateless once its deciders are connected."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._prefill_decider: Decider | None = None
        self._encode_decider: Decider | None = None

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
        """The deciders."""
        return self._stages.references

    @property
    def required_profiles(self) -> Mapping[str, str]:
        """That of the decode stage."""
        return self._stages.required

    @property
    def optional_profiles(self) -> Mapping[str, str]:
        """Those of other stages that were named, or given a decider."""
        return self._stages.optional

    def connect(self, plugins: Mapping[str, object]) -> None:
        """Take the deciders. Raises `ValueError` for one that is none."""
        self._prefill_decider = named_decider(plugins, self._stages.prefill_decider)
        self._encode_decider = named_decider(plugins, self._stages.encode_decider)

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        """The next stage; none when all have run that have to."""
        note_failed(attributes, results, (self._stages.encode, self._stages.prefill))
        pick = self._prefill_first if self._stages.is_prefill_first else self._decode_first
        stage = pick(request, frozenset(profiles), results, attributes)
        return () if stage is None else (stage,)

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The decode endpoints, and the other stages' in headers. Raises `RefusedError` 429 when
        decode found none.
        """
        stages = self._stages
        headers = stage_headers(results, stages.prefill, stages.encode)
        return decoded_result(results, stages.decode, headers)

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Leave what was decided where it can be counted."""
        decided = decision(result.profiles, self._stages.prefill, self._stages.encode)
        attributes.put(DISAGGREGATION_DECISION_KEY, decided)

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
        if decode is None or stages.prefill in results:
            return None
        attributes.put(PEER_ENDPOINT_KEY, decode)
        if stages.encode not in results and self._encodes(request, profiles, decode, attributes):
            return stages.encode
        if stages.prefill not in profiles:
            return None
        decider = stages.prefill_decider, self._prefill_decider
        runs = stage_runs(stages.prefill, decider, request, decode, attributes)
        return stages.prefill if runs else None

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
            attributes.put(PEER_ENDPOINT_KEY, peer)
        has_begun = stages.encode in results or stages.prefill in results
        if not has_begun and self._encodes(request, profiles, None, attributes):
            return stages.encode
        if stages.prefill in profiles and stages.prefill not in results:
            return stages.prefill
        return stages.decode

    def _encodes(
        self,
        request: InferenceRequest,
        profiles: frozenset[str],
        decode: Candidate | None,
        attributes: Attributes,
    ) -> bool:
        stages = self._stages
        if stages.encode not in profiles:
            return False
        decider = stages.encode_decider, self._encode_decider
        return stage_runs(stages.encode, decider, request, decode, attributes)


def stages_of(parameters: DisaggProfileHandlerParameters) -> Stages:
    """The stages that either form of the parameters describes.

    Raises `ValueError` for a mixture of the forms, an unknown order, stages that share a profile,
    two prefill deciders, and a prefill decider where prefill is not decided about.
    """
    flat = [name for name, value in zip(_FLAT, _flat_values(parameters), strict=True) if value]
    nested = [
        name
        for name, is_written in (
            ("stageOrder", parameters.stage_order != ""),
            ("profiles", parameters.profiles is not None),
            ("deciders", parameters.deciders is not None),
        )
        if is_written
    ]
    if flat and nested:
        raise ValueError(f"{nested[0]} and {flat[0]} cannot both be given: use one form throughout")
    stages = _flat_stages(parameters) if flat else _nested_stages(parameters)
    if len({stages.decode, stages.prefill, stages.encode}) < 3:
        where = "decodeProfile, prefillProfile and encodeProfile" if flat else "profiles"
        raise ValueError(f"{where}: each stage needs a profile of its own")
    return stages


def _flat_values(parameters: DisaggProfileHandlerParameters) -> tuple[str, ...]:
    return (
        parameters.decode_profile,
        parameters.prefill_profile,
        parameters.encode_profile,
        parameters.prefill_decider_plugin_name,
        parameters.encode_decider_plugin_name,
        parameters.decider_plugin_name,
    )


def _flat_stages(parameters: DisaggProfileHandlerParameters) -> Stages:
    prefill_decider = parameters.prefill_decider_plugin_name
    older = parameters.decider_plugin_name
    if prefill_decider and older and prefill_decider != older:
        raise ValueError("prefillDeciderPluginName and deciderPluginName name two prefill deciders")
    references = {
        "prefillDeciderPluginName": prefill_decider,
        "deciderPluginName": older,
        _ENCODE_DECIDER: parameters.encode_decider_plugin_name,
    }
    prefill = parameters.prefill_profile or PREFILL_PROFILE
    encode = parameters.encode_profile or ENCODE_PROFILE
    decider = prefill_decider or older
    optional = _on_purpose(
        ("prefillProfile", prefill, bool(parameters.prefill_profile or decider)),
        ("encodeProfile", encode, bool(parameters.encode_profile or references[_ENCODE_DECIDER])),
    )
    decode = parameters.decode_profile or DECODE_PROFILE
    return Stages(
        decode,
        prefill,
        encode,
        decider,
        parameters.encode_decider_plugin_name,
        references={word: name for word, name in references.items() if name},
        required={"decodeProfile": decode},
        optional=optional,
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
    references = {"deciders.prefill": deciders.prefill, "deciders.encode": deciders.encode}
    decode = profiles.decode or DECODE_PROFILE
    prefill, encode = profiles.prefill or PREFILL_PROFILE, profiles.encode or ENCODE_PROFILE
    optional = _on_purpose(
        (
            "profiles.prefill",
            prefill,
            is_prefill_first or bool(deciders.prefill) or prefill != PREFILL_PROFILE,
        ),
        (
            "profiles.encode",
            encode,
            bool(deciders.encode) or encode != ENCODE_PROFILE,
        ),
    )
    return Stages(
        decode,
        prefill,
        encode,
        deciders.prefill,
        deciders.encode,
        is_prefill_first,
        {word: name for word, name in references.items() if name},
        {"profiles.decode": decode},
        optional,
    )


def _on_purpose(*named: tuple[str, str, bool]) -> dict[str, str]:
    """The profiles, by parameter, of which the last of the three says that they are meant."""
    return {parameter: profile for parameter, profile, is_meant in named if is_meant}


PLUGIN = PluginType(
    "disagg-profile-handler",
    DisaggProfileHandlerParameters,
    lambda _name, parameters, _services: DisaggProfileHandler(stages_of(parameters)),
)
