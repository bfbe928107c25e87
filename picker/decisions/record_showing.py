"""What is kept of a request → what people are shown of it."""

from __future__ import annotations

import math

import msgspec

from picker.decisions.kept import (
    Kept,
    KeptProfile,
    Load,
    PackedCandidates,
    Seen,
)
from picker.decisions.profile_keeping import load_of, named_filters
from picker.decisions.record_keeping import profiles_of
from picker.decisions.record_views import (
    CandidateView,
    FilterView,
    ProfileView,
    RecordSummary,
    RecordView,
    RefusalView,
    ScoreView,
)
from picker.errors import HTTP_STATUS
from picker.types import Endpoint, FinishCause

WAITING, UNDER_WAY = "waiting", "under-way"
_CODES = {status: code.value for code, status in HTTP_STATUS.items()}
_loads = msgspec.msgpack.Decoder(list[Load])


def view_of(kept: Kept) -> RecordView:
    """All of it."""
    usage = kept.usage
    return RecordView(
        summary=summary_of(kept),
        incoming_model=kept.incoming_model,
        target_model=kept.target_model,
        objective=kept.objective,
        rewritten_by=kept.rewritten_by,
        size_bytes=kept.size_bytes,
        destination=kept.destination or None,
        served_by=kept.served_by,
        refusal=_refusal(kept),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        matched_prefix_tokens=kept.matched_prefix_tokens,
        profiles=tuple(
            _profile(one, seen, kept.at_seconds, one.name == kept.primary)
            for one, seen in profiles_of(kept)
        ),
        stages=kept.stages,
    )


def shown_key(key: str) -> str:
    """An endpoint's key as people are shown it: its name, where its namespace is the usual one."""
    return key.removeprefix("default/")


def summary_of(kept: Kept) -> RecordSummary:
    """A line of a list."""
    refusal = _refusal(kept)
    return RecordSummary(
        request_id=kept.request_id,
        received_unix_seconds=kept.received_unix_seconds,
        model=kept.incoming_model,
        fairness_id=kept.fairness_id,
        priority=kept.priority,
        outcome=_outcome(kept),
        endpoint=None if kept.endpoint_key is None else shown_key(kept.endpoint_key),
        status=kept.status,
        reason=None if refusal is None else refusal.reason or refusal.code,
        queue_seconds=kept.queue_seconds,
        decision_seconds=kept.decision_seconds,
        ttft_seconds=None if kept.response is None else kept.response.ttft_seconds,
        seconds=kept.seconds,
    )


def _refusal(kept: Kept) -> RefusalView | None:
    """Why the picker answered itself, also where it did so before it had read the request."""
    if kept.refusal is not None or kept.cause is not FinishCause.REFUSED or kept.status is None:
        return kept.refusal
    text = "refused before the request was read to its end"
    return RefusalView(kept.status, _CODES.get(kept.status, ""), text)


def _outcome(kept: Kept) -> str:
    if kept.cause is not None:
        return kept.cause.value
    return UNDER_WAY if kept.destination else WAITING


def _profile(profile: KeptProfile, seen: Seen, at_seconds: float, is_primary: bool) -> ProfileView:
    described = _described(seen, at_seconds)
    totals = _totals(profile, len(described))
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
        filters=_filters(profile, seen),
        candidates=tuple(
            _candidate(*described[index], totals[index], _scores(profile, index)) for index in order
        ),
    )


def _described(seen: Seen, at_seconds: float) -> list[tuple[Endpoint, Load]]:
    if isinstance(seen, PackedCandidates):
        return list(zip(seen.endpoints, _loads.decode(seen.loads), strict=True))
    return [(one.endpoint, load_of(one, at_seconds)) for one in seen[-1]]


def _filters(profile: KeptProfile, seen: Seen) -> tuple[FilterView, ...]:
    if isinstance(seen, PackedCandidates):
        return tuple(profile.filters)
    return tuple(named_filters(profile, seen))


def _totals(profile: KeptProfile, count: int) -> list[float]:
    """Added up in the order of `Profile.rate`, so that they are its totals to the last bit."""
    totals = [0.0] * count
    for (_, weight), scores in zip(profile.scorers, profile.scores, strict=True):
        for index, raw in enumerate(scores):
            if raw > 0.0:
                totals[index] += _weighted(raw, weight)
    return totals


def _weighted(raw: float, weight: float) -> float:
    if raw > 0.0:  # false for NaN
        return weight if raw >= 1.0 else raw * weight
    return 0.0


def _scores(profile: KeptProfile, index: int) -> tuple[ScoreView, ...]:
    return tuple(
        ScoreView(name, weight, _finite(scores[index]), _weighted(scores[index], weight))
        for (name, weight), scores in zip(profile.scorers, profile.scores, strict=True)
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
