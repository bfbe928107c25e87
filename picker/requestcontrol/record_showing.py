"""What is kept of a request → what people are shown of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from picker.errors import HTTP_STATUS
from picker.requestcontrol.record_keeping import (
    Kept,
    KeptProfile,
    Load,
    PackedCandidates,
    filter_views,
    load_of,
)
from picker.requestcontrol.record_views import (
    CandidateView,
    FilterView,
    ProfileView,
    RecordSummary,
    RecordView,
    RefusalView,
    ScoreView,
)
from picker.types import Endpoint, FilterStep, FinishCause, ScorerStep

WAITING, UNDER_WAY = "waiting", "under-way"
_CODES = {status: code.value for code, status in HTTP_STATUS.items()}
_scorers = msgspec.msgpack.Decoder(tuple[ScorerStep, ...])
_loads = msgspec.msgpack.Decoder(list[Load])


def summary_of(kept: Kept) -> RecordSummary:
    """A line of a list."""
    refusal = refusal_of(kept)
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
        decision_seconds=0.0 if kept.decided is None else kept.decided.seconds,
        ttft_seconds=None if kept.response is None else kept.response.ttft_seconds,
        seconds=kept.seconds,
    )


def view_of(kept: Kept) -> RecordView:
    """All of it."""
    usage, decided = kept.usage, kept.decided
    at = 0.0 if decided is None else decided.at_seconds
    primary = None if decided is None else decided.primary
    return RecordView(
        summary=summary_of(kept),
        incoming_model=kept.incoming_model,
        target_model=kept.target_model,
        objective=kept.objective,
        rewritten_by=None if decided is None else decided.rewritten_by,
        size_bytes=kept.size_bytes,
        destination=None if decided is None else decided.destination,
        served_by=kept.served_by,
        refusal=refusal_of(kept),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        matched_prefix_tokens=None if decided is None else decided.matched_prefix_tokens,
        profiles=tuple(_profile(one, at, one.name == primary) for one in kept.profiles),
        stages={} if decided is None else decided.stages,
    )


def refusal_of(kept: Kept) -> RefusalView | None:
    """Why the picker answered itself, also where it did so before it had read the request."""
    if kept.refusal is not None or kept.cause is not FinishCause.REFUSED or kept.status is None:
        return kept.refusal
    code = _CODES.get(kept.status, "")
    return RefusalView(kept.status, code, "refused before the request was read to its end")


def shown_key(key: str) -> str:
    """An endpoint's key as people are shown it: its name, where its namespace is the usual one."""
    return key.removeprefix("default/")


def _outcome(kept: Kept) -> str:
    if kept.cause is not None:
        return kept.cause.value
    return WAITING if kept.decided is None else UNDER_WAY


def _profile(profile: KeptProfile, at_seconds: float, is_primary: bool) -> ProfileView:
    scorers = _scorers.decode(profile.scorers)
    described = _described(profile, at_seconds)
    totals = _totals(scorers, len(described))
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
        filters=_filters(profile),
        candidates=tuple(
            _candidate(*described[index], totals[index], _scores(scorers, index)) for index in order
        ),
    )


def _described(profile: KeptProfile, at_seconds: float) -> list[tuple[Endpoint, Load]]:
    candidates = profile.candidates
    if isinstance(candidates, PackedCandidates):
        loads = _loads.decode(candidates.loads)
        return list(zip(candidates.endpoints, loads, strict=True))
    return [(one.endpoint, load_of(one, at_seconds)) for one in candidates]


def _totals(scorers: Sequence[ScorerStep], count: int) -> list[float]:
    """Added up in the order of `Profile.rate`, so that they are its totals to the last bit."""
    totals = [0.0] * count
    for scorer in scorers:
        for index, raw in enumerate(scorer.scores):
            if raw > 0.0:
                totals[index] += _weighted(raw, scorer.weight)
    return totals


def _weighted(raw: float, weight: float) -> float:
    if raw > 0.0:  # false for NaN
        return weight if raw >= 1.0 else raw * weight
    return 0.0


def _scores(scorers: Sequence[ScorerStep], index: int) -> tuple[ScoreView, ...]:
    return tuple(
        ScoreView(one.name, one.weight, one.scores[index], _weighted(one.scores[index], one.weight))
        for one in scorers
    )


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


def _filters(profile: KeptProfile) -> tuple[FilterView, ...]:
    views = [one for one in profile.filters if isinstance(one, FilterView)]
    steps = [one for one in profile.filters if isinstance(one, FilterStep)]
    return (*views, *filter_views(steps, profile.seen))
