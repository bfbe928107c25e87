"""What plugins share about requests whose encode, prefill and decode stages run on different
endpoints: roles of endpoints, names of profiles, and the headers that tell the stages' endpoints.

The decode endpoint gets the request; its sidecar asks the others, which it finds in the headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Decider
from picker.types import Candidate, InferenceRequest, ProfileResult, SchedulingResult

ROLE_LABEL = "llm-d.ai/role"
DECODE_ROLES = frozenset(("decode", "prefill-decode", "both", "encode-prefill-decode"))
PREFILL_ROLES = frozenset(
    ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
)
ENCODE_ROLES = frozenset(("encode", "encode-prefill", "encode-prefill-decode"))

DECODE_PROFILE = "decode"
PREFILL_PROFILE = "prefill"
ENCODE_PROFILE = "encode"

PREFILLER_HEADER = "x-prefiller-host-port"
ENCODERS_HEADER = "x-encoder-hosts-ports"
DATA_PARALLEL_HEADER = "x-data-parallel-host-port"
MAX_PORT = 65535

Results = Mapping[str, ProfileResult | None]


class DisaggregationDecision(Enum):
    """Which stages of a request got an endpoint of their own; the word of the decision metrics."""

    DECODE_ONLY = "decode-only"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_DECODE = "encode-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


# What the profile handler decided, for whoever counts decisions; written when the request leaves.
DISAGGREGATION_DECISION_KEY: DataKey[DisaggregationDecision] = DataKey(
    "DisaggregationDecision", "disagg-profile-handler"
)

# Why stages were left out, by the names of their profiles; for people.
SKIPPED_STAGES = "SkippedStages"
SKIPPED_STAGES_KEY: DataKey[Mapping[str, str]] = DataKey(SKIPPED_STAGES, "disagg-profile-handler")


def first_picked(results: Results, profile: str) -> Candidate | None:
    """The best endpoint that `profile` picked; None when it did not run or found nothing."""
    result = results.get(profile)
    return result.picked[0].candidate if result is not None and result.picked else None


def decision(results: Results, prefill: str, encode: str) -> DisaggregationDecision:
    """Which stages found an endpoint, given the names of their profiles."""
    words = [
        word
        for word, profile in (("encode", encode), ("prefill", prefill))
        if first_picked(results, profile) is not None
    ]
    return DisaggregationDecision("-".join((*words, "decode")) if words else "decode-only")


def stage_headers(results: Results, prefill: str, encode: str) -> dict[str, str]:
    """The request's headers: the first prefill endpoint, and all encode endpoints.

    A stage that found nothing has none; whatever a client sent by these names never leaves.
    """
    headers: dict[str, str] = {}
    prefiller = first_picked(results, prefill)
    if prefiller is not None:
        headers[PREFILLER_HEADER] = prefiller.endpoint.host_port
    encoders = results.get(encode)
    if encoders is not None and encoders.picked:
        headers[ENCODERS_HEADER] = ",".join(
            scored.candidate.endpoint.host_port for scored in encoders.picked
        )
    return headers


def decoded_result(results: Results, decode: str, headers: Mapping[str, str]) -> SchedulingResult:
    """The decision for the endpoints that the profile `decode` picked, with headers to set.

    Raises `RefusedError` 429 when it picked none.
    """
    result = results.get(decode)
    if result is None or not result.picked:
        raise RefusedError(Code.RESOURCE_EXHAUSTED, "failed to find available decode workers")
    endpoints = tuple(scored.candidate.endpoint for scored in result.picked)
    found = {name: each for name, each in results.items() if each is not None}
    return SchedulingResult(endpoints, decode, found, headers)


def through_primary_port(result: SchedulingResult, port: int) -> SchedulingResult:
    """The same decision by way of the pod's sidecar, which listens at `port`.

    The header names the endpoint that the sidecar hands over to. It is wrong for any other pod, so
    the destination has no fallbacks.
    """
    first = result.endpoints[0]
    headers = {**result.set_headers, DATA_PARALLEL_HEADER: first.host_port}
    return replace(result, endpoints=(replace(first, port=port),), set_headers=headers)


def named_decider(plugins: Mapping[str, object], name: str) -> Decider | None:
    """The decider called `name`, None for "". Raises `ValueError` when it is none."""
    if not name:
        return None
    plugin = plugins.get(name)
    if not isinstance(plugin, Decider):
        raise ValueError(f"'{name}' is not a decider")
    return plugin


@runtime_checkable
class SaysWhyNot(Protocol):
    """A decider that can give its reason."""

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        """Why `should_run` said no to the same; asked right after it, and not otherwise."""
        ...


def stage_runs(
    stage: str,
    decider: tuple[str, Decider | None],
    request: InferenceRequest,
    picked: Candidate | None,
    attributes: Attributes,
) -> bool:
    """Whether `decider`, given with its name, wants the stage. If not, says why for people."""
    name, decides = decider
    if decides is None:
        note_skipped(attributes, stage, "no decider is configured that could ask for it")
        return False
    if decides.should_run(request, picked, attributes):
        return True
    why = f"{name} said no"
    if isinstance(decides, SaysWhyNot):
        why = f"{why}: {decides.why_not(request, picked, attributes)}"
    note_skipped(attributes, stage, why)
    return False


def note_skipped(attributes: Attributes, stage: str, why: str) -> None:
    """Leave word of a stage that is left out."""
    known = attributes.get(SKIPPED_STAGES_KEY)
    attributes.put(SKIPPED_STAGES_KEY, {stage: why} if known is None else {**known, stage: why})


def note_failed(attributes: Attributes, results: Results, stages: Iterable[str]) -> None:
    """Leave word of those among `stages` that ran and found no endpoint."""
    for stage in stages:
        if stage in results and first_picked(results, stage) is None:
            note_skipped(attributes, stage, "no endpoint was found for it")
