"""The stages of a disaggregated request, for the profile handlers that run them."""

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import (
    DATA_PARALLEL_HEADER,
    ENCODERS_HEADER,
    PREFILLER_HEADER,
    SKIPPED_STAGES_KEY,
    DisaggregationDecision,
)
from picker.framework.interfaces import Decider
from picker.types import Candidate, InferenceRequest, ProfileResult, SchedulingResult

DECODE_PROFILE = "decode"
PREFILL_PROFILE = "prefill"
ENCODE_PROFILE = "encode"

Results = Mapping[str, ProfileResult | None]


def first_picked(results: Results, profile: str) -> Candidate | None:
    """Return the first endpoint that `profile` picked, if it ran and picked any."""
    result = results.get(profile)
    return result.picked[0].candidate if result is not None and result.picked else None


def prompt_readers(result: SchedulingResult) -> list[tuple[ProfileResult, Candidate]]:
    """Return the results of the primary profile and of `prefill` with their first endpoints."""
    readers = []
    # Both may be the same profile, whose endpoint then counts once.
    for name in dict.fromkeys((result.primary_profile, PREFILL_PROFILE)):
        profile = result.profiles.get(name)
        if profile is not None and profile.picked:
            readers.append((profile, profile.picked[0].candidate))
    return readers


def disaggregation_decision(results: Results, prefill: str, encode: str) -> DisaggregationDecision:
    """Return which stages found an endpoint; `prefill` and `encode` are names of profiles."""
    words = [
        word
        for word, profile in (("encode", encode), ("prefill", prefill))
        if first_picked(results, profile) is not None
    ]
    return DisaggregationDecision("-".join((*words, "decode")) if words else "decode-only")


def stage_headers(results: Results, prefill: str, encode: str) -> dict[str, str]:
    """Return the headers that name the first prefill endpoint and all encode endpoints.

    A stage without an endpoint has no header; a client's header of that name is always removed.
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
    """Choose the endpoints of the profile `decode`. Raises `RefusedError` (429) if it has none."""
    result = results.get(decode)
    if result is None or not result.picked:
        raise RefusedError(
            Code.RESOURCE_EXHAUSTED,
            "no decode worker is available",
            reference="failed to find available decode workers",
        )
    # A profile without a result is absent, as if it had not run.
    found = {name: each for name, each in results.items() if each is not None}
    endpoints = tuple([scored.candidate.endpoint for scored in result.picked])
    return SchedulingResult(endpoints, decode, found, set_headers=headers)


def through_primary_port(result: SchedulingResult, port: int) -> SchedulingResult:
    """Return a result that is routed through the pod's sidecar, which listens at `port`.

    A header names the endpoint that the sidecar forwards to. It would be wrong for any other pod,
    so the destination has no fallbacks.
    """
    first = result.endpoints[0]
    headers = {**result.set_headers, DATA_PARALLEL_HEADER: first.host_port}
    return replace(result, endpoints=(replace(first, port=port),), set_headers=headers)


def named_decider(plugins: Mapping[str, object], name: str) -> Decider | None:
    """Return the decider called `name`, None for "". Raises `ValueError` if it is no decider."""
    if not name:
        return None
    plugin = plugins.get(name)
    if not isinstance(plugin, Decider):
        raise ValueError(f"'{name}' is not a decider")
    return plugin


@runtime_checkable
class ExplainsRefusal(Protocol):
    """A decider that can explain why it declines a stage."""

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        """Return why `should_run` returned False; called only right after that."""


def stage_runs(
    stage: str,
    decider: tuple[str, Decider | None],
    request: InferenceRequest,
    picked: Candidate | None,
    attributes: Attributes,
) -> bool:
    """Return whether `decider`, a name and its plugin, wants the stage; note the reason if not."""
    name, decides = decider
    if decides is None:
        note_skipped(attributes, stage, "no decider is configured that could ask for it")
        return False
    if decides.should_run(request, picked, attributes):
        return True
    why = f"{name} said no"
    if isinstance(decides, ExplainsRefusal):
        why = f"{why}: {decides.why_not(request, picked, attributes)}"
    note_skipped(attributes, stage, why)
    return False


def note_skipped(attributes: Attributes, stage: str, why: str) -> None:
    known = attributes.get(SKIPPED_STAGES_KEY)
    attributes[SKIPPED_STAGES_KEY] = {stage: why} if known is None else {**known, stage: why}


def note_failed(attributes: Attributes, results: Results, stages: Iterable[str]) -> None:
    for stage in stages:
        if stage in results and first_picked(results, stage) is None:
            note_skipped(attributes, stage, "no endpoint was found for it")


def only_result(results: Results) -> SchedulingResult:
    """Return the picks of the only profile with any. Raises `RefusedError` (429) without picks."""
    for name, result in results.items():
        if result is not None and result.picked:
            endpoints = tuple([scored.candidate.endpoint for scored in result.picked])
            return SchedulingResult(endpoints, name, {name: result})
    raise RefusedError(
        Code.RESOURCE_EXHAUSTED,
        "no endpoint could be chosen",
        reference="failed to find target endpoint",
    )
