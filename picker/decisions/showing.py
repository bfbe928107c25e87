"""Turns a decision into its views for users, with the sentences that explain it."""

import math
from collections.abc import Iterator
from typing import TypeAlias

from msgspec.structs import replace

from picker.decisions.decision import Decision, PackedProfile, short
from picker.decisions.packing import Load, filters_of, loads_of, scores_of
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
    """Return the full view of a decision; `seconds` is its duration so far."""
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
    """Return how many prompt tokens were expected in the cache: the picker's number, which may be
    an estimate, limited to the endpoint's count of the prompt.
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
    """Add up in the order of `Profile.run`, so that the totals equal its own to the last bit."""
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
        ScoreView(name, weight, float(raw) if math.isfinite(raw) else None, _weighted(raw, weight))
        for (name, weight), raw in zip(profile.scorers, (row[index] for row in said), strict=True)
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


_EVICTED = "evicted"
_GOES_BY_TOTALS = ("max-score-picker", "")  # "": an unnamed picker


def reasons(record: RecordView) -> Iterator[str]:
    if record.refusal is not None:
        yield _refused(record)
        return
    if record.summary.outcome == WAITING:
        yield "It is not decided yet."
        return
    primary = next((one for one in record.profiles if one.is_primary), None)
    if primary is None:
        yield from _without_profile(record)
    else:
        yield from _chosen(primary)
    for stage, why in record.stages.items():
        yield f"No endpoint of its own for {stage}: {why}."
    yield from _went_elsewhere(record)
    if record.summary.outcome == _EVICTED:
        yield "Flow control stopped it in favour of others while it was under way."


def _refused(record: RecordView) -> str:
    refusal = record.refusal
    if refusal is None:
        return ""
    reason = f", {refusal.reason}" if refusal.reason else ""
    text = f"The picker refused it: {refusal.status} {refusal.code}{reason}: {refusal.message}."
    if refusal.retry_after_seconds is not None:
        text += f" It asked the client to retry after {refusal.retry_after_seconds} s."
    emptied = [
        view.filter
        for one in record.profiles
        for view in one.filters
        if view.before > view.after == 0
    ]
    if emptied:
        text += f" The filter {emptied[0]} left no endpoint."
    return text


def _without_profile(record: RecordView) -> Iterator[str]:
    if record.destination is None:
        yield "It ended before an endpoint was chosen."
    elif record.size_bytes == 0:
        yield f"It has no body, so any endpoint will do: chance chose {record.summary.endpoint}."


def _chosen(profile: ProfileView) -> Iterator[str]:
    if not profile.picked or not profile.candidates:
        yield f"The profile {profile.name} found no endpoint."
        return
    name = profile.picked[0]
    picked = next((one for one in profile.candidates if one.endpoint == name), None)
    if picked is None:
        return
    if profile.num_scored == 1:
        left = "" if profile.num_candidates == 1 else " that the filters left"
        yield f"{name} was the only candidate{left}."
        return
    yield _contest(profile, picked)
    yield from _unknown_loads(profile)


def _contest(profile: ProfileView, picked: CandidateView) -> str:
    best = profile.candidates[0]
    others = [one for one in profile.candidates if one.endpoint != picked.endpoint]
    if not picked.scores:
        return f"No scorer is configured: chance chose {picked.endpoint}."
    if best.total == 0.0 and profile.num_tied == profile.num_scored:
        return (
            f"All {profile.num_scored} totals are 0, because no scorer favoured any "
            f"endpoint: chance chose {picked.endpoint}."
        )
    if picked.total < best.total:
        return (
            f"{profile.picker} leaves it to chance: it chose {picked.endpoint}, although "
            f"{best.endpoint} had {_amount(best.total - picked.total)} more."
        )
    if profile.num_tied > 1:
        tied = [one.endpoint for one in others if one.total == picked.total]
        return (
            f"{picked.endpoint} tied with {_some(tied, profile.num_tied - 1)} at "
            f"{_amount(picked.total)}: chance chose among them."
        )
    how = "" if profile.picker in _GOES_BY_TOTALS else f"; {profile.picker} drew it"
    return f"{_won(picked, others[0])}{how}."


def _won(picked: CandidateView, second: CandidateView) -> str:
    margin = _amount(picked.total - second.total)
    gains = [
        (mine.weighted - theirs.weighted, mine.scorer)
        for mine, theirs in zip(picked.scores, second.scores, strict=True)
    ]
    ahead = sorted((one for one in gains if one[0] > 0.0), reverse=True)
    behind = sorted(one for one in gains if one[0] < 0.0)
    parts = [f"{scorer} gave it {_amount(gain)} more" for gain, scorer in ahead]
    parts += [f"{scorer} {_amount(-gain)} less" for gain, scorer in behind]
    return f"{picked.endpoint} won by {margin} over {second.endpoint}: {', '.join(parts)}"


def _unknown_loads(profile: ProfileView) -> Iterator[str]:
    unknown = [one.endpoint for one in profile.candidates if one.waiting_requests is None]
    if unknown:
        yield f"The load of {_some(unknown, len(unknown))} was unknown or stale."


def _went_elsewhere(record: RecordView) -> Iterator[str]:
    destinations = (record.destination or "").split(",")
    if record.served_by is None or record.served_by == destinations[0]:
        return
    why = "the next in line" if record.served_by in destinations else "not a requested endpoint"
    yield f"The proxy says that {record.served_by} served it, {why}."


def _some(names: list[str], count: int) -> str:
    shown = names[:3]
    left = count - len(shown)
    if left > 0:
        return f"{', '.join(shown)} and {left} more"
    *most, last = shown
    return f"{', '.join(most)} and {last}" if most else last


def _amount(value: float) -> str:
    """Format a value briefly, but never as 0 unless it is 0."""
    text = f"{value:.3f}"
    return text if float(text) or not value else f"{value:.1e}"
