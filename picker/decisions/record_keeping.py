"""What is kept of a request, in little memory and little time.

Theory of operation. A record refers to names and numbers that exist anyway; what scorers said of
every candidate is packed as soon as the decision is made, while it is still in the processor's
caches: bytes are quick to make, to keep and to throw away. What was known of the candidates is not
packed: it would have to be read number by number. So in a crowd a record keeps the candidates
themselves, which it shares with the records around it, because endpoints are scraped only so often;
in a tuple, at which the garbage collector looks no more than once. A decision that comes alone
shares hardly anything; its candidates are packed when the request is over, which nobody waits for.
Of very many candidates only the best are kept. Decisions with filters or several profiles are
packed as a whole. No prompt, no body and no header is kept, nor what plugins found; and no refusal
itself, which would hold on to all that was in reach where it was raised.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from picker.decisions.kept import (
    NO_STAGES,
    Kept,
    KeptProfile,
    KeptProfiles,
    PackedCandidates,
    Seen,
)
from picker.decisions.profile_keeping import (
    MAX_CANDIDATES,
    best_of,
    encode,
    found_nothing,
    keep_profile,
    named_filters,
    packed_candidates,
)
from picker.decisions.record_views import RefusalView
from picker.errors import RefusedError
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import SKIPPED_STAGES
from picker.prefix.match import MATCH_INFO
from picker.requestcontrol.observer import Decision, Outcome
from picker.scheduling.profile import FilteredOutError
from picker.types import (
    InferenceRequest,
    SchedulingResult,
    ScoredCandidates,
)

MAX_NAME = 200  # characters of what clients name
MAX_MESSAGE = 500
_profiles = msgspec.msgpack.Decoder(list[KeptProfile])
_scores = msgspec.msgpack.Decoder(list[list[float | bool]])


def keep_decision(decision: Decision, is_alone: bool) -> Kept:
    """What is kept of a decision. In one piece: what it would call is seldom in the caches."""
    result = decision.result
    if result is None or (request := decision.request) is None:
        return _without_profiles(decision, is_alone, _key_of(decision))
    primary, profiles = result.primary_profile, result.profiles
    one = profiles.get(primary)
    if one is None or len(profiles) != 1 or len(one.picked) != 1:
        return _with_profiles(decision, request, result, is_alone)
    steps, scored = one.steps, one.scored
    if steps is None or steps.filters or type(scored) is not ScoredCandidates:
        return _with_profiles(decision, request, result, is_alone)
    candidates, scores, tied = scored.candidates, steps.scores, None
    num_scored = len(candidates)
    if num_scored > MAX_CANDIDATES:
        candidates, scores, tied = best_of(one, candidates, scores)
    key = result.endpoints[0].key
    matched, stages = _found(decision.attributes, key, request)
    request_id, incoming = decision.request_id, decision.incoming_model
    target, fairness_id, objective = decision.target_model, request.fairness_id, request.objective
    if len(request_id) + len(incoming) + len(target) + len(fairness_id) + len(objective) > MAX_NAME:
        request_id, incoming, target = short(request_id), short(incoming), short(target)
        fairness_id, objective = short(fairness_id), short(objective)
    return Kept(
        request_id,
        incoming,
        target,
        fairness_id,
        objective,
        request.priority,
        decision.size_bytes,
        decision.received_at_seconds,
        decision.queue_seconds,
        decision.seconds,
        decision.at_seconds,
        is_alone,
        decision.destination,
        key,
        primary,
        None if decision.rewritten is None else decision.rewritten.rule,
        matched,
        stages,
        None,
        steps.scorers,
        encode(scores),
        tuple(candidates),
        steps.picker,
        one.picked[0].candidate.endpoint.key,
        num_scored,
        tied,
    )


def _with_profiles(
    decision: Decision, request: InferenceRequest, result: SchedulingResult, is_alone: bool
) -> Kept:
    """Of a decision that is not plain, see `Kept`."""
    key = result.endpoints[0].key
    kept = _without_profiles(decision, is_alone, key)
    kept.fairness_id, kept.objective = short(request.fairness_id), short(request.objective)
    kept.priority, kept.primary = request.priority, result.primary_profile
    kept.rewritten_by = None if decision.rewritten is None else decision.rewritten.rule
    kept.matched_prefix_tokens, kept.stages = _found(decision.attributes, key, request)
    found = [keep_profile(name, one, decision.candidates) for name, one in result.profiles.items()]
    packed = encode([profile for profile, _ in found])
    kept.profiles = KeptProfiles(packed, tuple([lists for _, lists in found]))
    return kept


def _without_profiles(decision: Decision, is_alone: bool, endpoint_key: str | None) -> Kept:
    """What is known of any decision."""
    return Kept(
        short(decision.request_id),
        short(decision.incoming_model),
        short(decision.target_model),
        fairness_id="",
        objective="",
        priority=0,
        size_bytes=decision.size_bytes,
        received_at_seconds=decision.received_at_seconds,
        queue_seconds=decision.queue_seconds,
        decision_seconds=decision.seconds,
        at_seconds=decision.at_seconds,
        is_alone=is_alone,
        destination=decision.destination,
        endpoint_key=endpoint_key,
    )


def _key_of(decision: Decision) -> str | None:
    """Of a request about which nothing is known: any endpoint will do."""
    for candidate in decision.candidates:
        if candidate.endpoint.host_port == decision.destination:
            return candidate.key
    return None


def pack_by_itself(kept: Kept) -> None:
    """Pack the candidates as well, as they were when it was decided."""
    if kept.profiles is None:
        if not isinstance(kept.candidates, PackedCandidates):
            kept.candidates = packed_candidates(kept.candidates, kept.at_seconds)
        return
    every = profiles_of(kept)
    named = [
        profile
        if isinstance(seen, PackedCandidates)
        else replace(profile, filters=named_filters(profile, seen))
        for profile, seen in every
    ]
    at = kept.at_seconds
    alone = [
        seen if isinstance(seen, PackedCandidates) else packed_candidates(seen[-1], at)
        for _, seen in every
    ]
    kept.profiles = KeptProfiles(encode(named), tuple(alone))


def profiles_of(kept: Kept) -> list[tuple[KeptProfile, Seen]]:
    """Each profile with its candidates."""
    if kept.profiles is not None:
        decoded = _profiles.decode(kept.profiles.packed)
        return list(zip(decoded, kept.profiles.seen, strict=True))
    if kept.scorers is None:
        return []
    profile = KeptProfile(
        kept.primary,
        kept.picker,
        (kept.picked,),
        kept.num_scored,
        kept.num_scored,
        kept.num_tied,
        kept.scorers,
        _scores.decode(kept.scores),
    )
    candidates = kept.candidates
    return [(profile, candidates if isinstance(candidates, PackedCandidates) else (candidates,))]


def keep_undecided(outcome: Outcome) -> Kept:
    """What is kept of a request that is over before it was decided."""
    request, refusal = outcome.request, outcome.refusal
    kept = Kept(
        short(outcome.request_id),
        short(outcome.incoming_model),
        short(outcome.target_model),
        short(outcome.fairness_id),
        "" if request is None else short(request.objective),
        outcome.priority,
        0 if request is None else request.size_bytes,
        queue_seconds=outcome.queue_seconds,
        endpoint_key=outcome.endpoint_key,
    )
    if isinstance(refusal, FilteredOutError):
        packed = encode([found_nothing(refusal)])
        kept.primary = refusal.profile
        kept.profiles = KeptProfiles(packed, (packed_candidates((), 0.0),))
    return kept


def add_outcome(kept: Kept, outcome: Outcome, received_unix_seconds: float) -> None:
    """Fill in how the request of a record ended."""
    kept.received_unix_seconds = received_unix_seconds
    kept.seconds = outcome.seconds
    kept.cause = outcome.cause
    kept.status = outcome.response_status
    # What is seldom known is seldom set: every request comes this way, too.
    if outcome.served_by is not None:
        kept.served_by = outcome.served_by
    if outcome.usage is not None:
        kept.usage = outcome.usage
    if outcome.response is not None:
        kept.response = outcome.response
    if outcome.refusal is not None:
        kept.refusal = _refusal(outcome.refusal)


def keep_waiting(request: InferenceRequest, seconds: float, received_unix_seconds: float) -> Kept:
    """What is kept of a request that is still to be decided, after so long."""
    return Kept(
        short(request.request_id),
        short(request.incoming_model),
        short(request.target_model),
        short(request.fairness_id),
        short(request.objective),
        request.priority,
        request.size_bytes,
        queue_seconds=seconds,
        received_unix_seconds=received_unix_seconds,
        seconds=seconds,
    )


def short(name: str) -> str:
    """What a client named; the beginning of what is longer than anything that people write."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _found(
    attributes: Attributes | None, endpoint_key: str, request: InferenceRequest
) -> tuple[int | None, Mapping[str, str]]:
    """How much of the prompt the endpoint was thought to have, and why stages were left out."""
    matched: int | None = None
    stages = NO_STAGES
    if attributes is None:
        return matched, stages
    for key, found in attributes.items():
        kind = key.data_type
        if kind == MATCH_INFO:
            tokens = found.match_blocks.get(endpoint_key, 0) * found.block_size_tokens
            if tokens and request.prompts:
                tokens = min(tokens, request.num_tokens)  # the last block is partial
            matched = tokens if matched is None or tokens > matched else matched
        elif kind == SKIPPED_STAGES:
            stages = found
    return matched, stages


def _refusal(refusal: RefusedError) -> RefusalView:
    """What a client was told."""
    reason, message = refusal.drop_reason, refusal.message
    return RefusalView(
        refusal.status,
        refusal.code.value,
        message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…",
        None if reason is None else reason.value,
        refusal.retry_after_seconds,
    )
