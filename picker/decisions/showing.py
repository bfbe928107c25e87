"""A decision → its views for users."""

import math
from typing import TypeAlias

from msgspec.structs import replace

from picker.decisions.decision import Decision, PackedProfile, short
from picker.decisions.packing import Load, filters_of, loads_of, scores_of
from picker.decisions.reasons import reasons
from picker.decisions.views import (
    CandidateView,
    ProfileView,
    RecordSummary,
    RecordView,
    RefusalView,
    ScoreView,
)
from picker.errors import HTTP_STATUS
from picker.types import Endpoint, FinishCause

Said: TypeAlias = list[list[float | bool]]  # by scorer, then by candidate
WAITING, UNDER_WAY = "waiting", "under-way"
_CODES = {status: code.value for code, status in HTTP_STATUS.items()}


def view_of(decision: Decision, received_unix_seconds: float, seconds: float) -> RecordView:
    """Make the full view; `seconds` is the duration so far."""
    usage, rewritten = decision.usage, decision.rewritten
    at, primary = decision.at_seconds, decision.primary_profile
    record = RecordView(
        summary=summary_of(decision, received_unix_seconds, seconds),
        incoming_model=short(decision.incoming_model),
        target_model=short(decision.target_model),
        objective=short(decision.objective),
        rewritten_by=None if rewritten is None or not decision.destination else rewritten.rule,
        size_bytes=decision.size_bytes,
        destination=decision.destination or None,
        served_by=decision.served_by,
        refusal=_refusal(decision),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        matched_prefix_tokens=_matched(decision),
        profiles=tuple(_profile(one, at, one.name == primary) for one in decision.profiles),
        stages=decision.stages,
    )
    return replace(record, reasons=tuple(reasons(record)))


def shown_key(key: str) -> str:
    return key.removeprefix("default/")


def summary_of(decision: Decision, received_unix_seconds: float, seconds: float) -> RecordSummary:
    refusal, key = _refusal(decision), decision.endpoint_key
    is_waiting = decision.cause is None and not decision.destination
    return RecordSummary(
        request_id=short(decision.request_id),
        received_unix_seconds=received_unix_seconds,
        model=short(decision.incoming_model),
        fairness_id=short(decision.fairness_id),
        priority=decision.priority,
        outcome=_outcome(decision),
        endpoint=None if key is None else shown_key(key),
        status=decision.response_status,
        reason=None if refusal is None else refusal.reason or refusal.code,
        queue_seconds=seconds if is_waiting else decision.queue_seconds,
        decision_seconds=decision.decision_seconds,
        ttft_seconds=None if decision.response is None else decision.response.ttft_seconds,
        seconds=seconds,
    )


def _matched(decision: Decision) -> int | None:
    """Return the tokens expected in the cache, limited to the prompt as the endpoint counted it;
    the picker may have estimated both.
    """
    matched, usage = decision.matched_prefix_tokens, decision.usage
    if matched is None or usage is None or not usage.prompt_tokens:
        return matched
    return min(matched, usage.prompt_tokens)


def _refusal(decision: Decision) -> RefusalView | None:
    refused, status = decision.refused, decision.response_status
    if refused is not None or decision.cause is not FinishCause.REFUSED or status is None:
        return refused
    text = "refused before the request was read to its end"
    return RefusalView(status, _CODES.get(status, ""), text)


def _outcome(decision: Decision) -> str:
    if decision.cause is not None:
        return decision.cause.value
    return UNDER_WAY if decision.destination else WAITING


def _profile(profile: PackedProfile, at: float, is_primary: bool) -> ProfileView:
    described, said = list(loads_of(profile.seen, at)), scores_of(profile)
    totals = _totals(profile, said, len(described))
    best = max(totals, default=0.0)
    order = sorted(range(len(totals)), key=totals.__getitem__, reverse=True)
    tied = totals.count(best) if profile.num_tied is None else profile.num_tied
    return ProfileView(
        name=profile.name,
        is_primary=is_primary,
        picker=profile.picker,
        picked=tuple(map(shown_key, profile.picked)),
        num_candidates=profile.num_candidates,
        num_scored=profile.num_scored,
        num_tied=tied,
        filters=filters_of(profile),
        candidates=tuple(
            _candidate(*described[index], totals[index], _scores(profile, said, index))
            for index in order
        ),
    )


def _totals(profile: PackedProfile, said: Said, count: int) -> list[float]:
    """Add up in the order of `Profile.run`, for its totals to the last bit."""
    totals = [0.0] * count
    for (_, weight), scores in zip(profile.scorers, said, strict=True):
        for index, raw in enumerate(scores):
            if raw > 0.0:
                totals[index] += _weighted(raw, weight)
    return totals


def _weighted(raw: float, weight: float) -> float:
    if raw > 0.0:  # false for NaN
        return weight if raw >= 1.0 else raw * weight
    return 0.0


def _scores(profile: PackedProfile, said: Said, index: int) -> tuple[ScoreView, ...]:
    return tuple(
        ScoreView(name, weight, _finite(scores[index]), _weighted(scores[index], weight))
        for (name, weight), scores in zip(profile.scorers, said, strict=True)
    )


def _finite(raw: float) -> float | None:
    return float(raw) if math.isfinite(raw) else None


def _candidate(
    endpoint: Endpoint, load: Load, total: float, scores: tuple[ScoreView, ...]
) -> CandidateView:
    inflight, waiting, running, usage, age = load
    return CandidateView(
        endpoint=shown_key(endpoint.key),
        address=endpoint.host_port,
        total=total,
        scores=scores,
        inflight_requests=inflight,
        waiting_requests=waiting,
        running_requests=running,
        kv_cache_usage=usage,
        metrics_age_seconds=None if age is None else max(0.0, age),
    )
