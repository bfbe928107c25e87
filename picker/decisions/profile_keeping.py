"""What is kept of the profiles of a decision, and of their candidates."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import msgspec
import numpy as np

from picker.decisions.kept import KeptProfile, Load, PackedCandidates, Seen
from picker.decisions.record_views import FilterView
from picker.scheduling.profile import FilteredOutError
from picker.types import (
    Candidate,
    FilterStep,
    ProfileResult,
    ProfileSteps,
    ScoredCandidates,
    ScoredEndpoint,
)

MAX_CANDIDATES = 128  # of a profile
BEST_CANDIDATES = 64  # are kept where there are more
MAX_REMOVED = 32  # names of endpoints that a filter removed


def _plain(value: Any) -> Any:
    """A scorer may answer in any sequence, of numbers of any kind."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_endpoint_of = attrgetter("endpoint")
_NO_STEPS = ProfileSteps()


def keep_profile(
    name: str, result: ProfileResult, seen: Sequence[Candidate]
) -> tuple[KeptProfile, Seen]:
    """A profile that saw these candidates."""
    steps = result.steps or _NO_STEPS
    candidates, scores, tied = _candidates(result.scored), steps.scores, None
    num_scored = len(candidates)
    is_many = num_scored > MAX_CANDIDATES
    if is_many:
        candidates, scores, tied = best_of(result, candidates, scores)
    with_names = len(seen) > MAX_CANDIDATES  # of very many no list is kept either
    filters, lists = _filters(steps.filters, seen, with_names)
    profile = KeptProfile(
        name,
        steps.picker,
        _keys(result.picked),
        len(seen),
        num_scored,
        tied,
        steps.scorers,
        scores,
        filters,
    )
    return profile, tuple(tuple(one) for one in (*lists, candidates))


def best_of(
    result: ProfileResult, candidates: Sequence[Candidate], scores: Sequence[Sequence[float]]
) -> tuple[Sequence[Candidate], Sequence[Sequence[float]], int]:
    """The best candidates and the picked ones, with scores; how many shared the best total."""
    scored = result.scored
    if isinstance(scored, ScoredCandidates):
        all_totals = scored.totals
    else:
        all_totals = [one.score for one in scored]
    # Packed: four times as quick as an array of the list, five times as quick as numpy's own way.
    totals = np.frombuffer(struct.pack(f"{len(all_totals)}d", *all_totals))
    indexes = totals.argpartition(-BEST_CANDIDATES)[-BEST_CANDIDATES:].tolist()
    choose = itemgetter(*indexes)
    best, kept = choose(all_totals), choose(candidates)
    tied = best.count(max(best))
    if tied == BEST_CANDIDATES:  # perhaps there are more
        tied = int((totals == totals.max()).sum())
    for one in result.picked:
        if not any(map(is_, kept, repeat(one.candidate))):
            indexes.append(candidates.index(one.candidate))
            choose = itemgetter(*indexes)
            kept = choose(candidates)
    return kept, [choose(one) for one in scores], tied


def found_nothing(refusal: FilteredOutError) -> KeptProfile:
    """A profile whose filters left nothing."""
    filters, _ = _filters(refusal.steps.filters, refusal.candidates, with_names=True)
    return KeptProfile(refusal.profile, "", (), len(refusal.candidates), 0, 0, (), (), filters)


def packed_candidates(candidates: Sequence[Candidate], at_seconds: float) -> PackedCandidates:
    """The same without the candidates' other numbers, as they were at that time."""
    loads = [load_of(candidate, at_seconds) for candidate in candidates]
    return PackedCandidates(tuple(map(_endpoint_of, candidates)), encode(loads))


def named_filters(profile: KeptProfile, lists: Sequence[Sequence[Candidate]]) -> list[FilterView]:
    """What the filters of a profile did, with names: each saw one of the lists."""
    if len(lists) == 1:
        return list(profile.filters)
    return [
        filter_view(FilterStep(view.filter, view.before, after), before)
        for view, before, after in zip(profile.filters, lists[:-1], lists[1:], strict=True)
    ]


def filter_view(step: FilterStep, seen: Sequence[Candidate]) -> FilterView:
    """What a filter did, with the names of those that it removed of what it has seen."""
    after = len(step.kept)
    kept = set(map(id, map(_endpoint_of, step.kept)))
    gone = (one.endpoint.name for one in seen if id(one.endpoint) not in kept)
    few = max(0, min(MAX_REMOVED, step.before - after))  # no further is looked
    return FilterView(step.name, step.before, after, tuple(islice(gone, few)))


def load_of(candidate: Candidate, at_seconds: float) -> Load:
    """How a candidate did, as far as the decision knew; what went stale tells its age alone."""
    metrics, last = candidate.metrics, candidate.last_metrics
    if metrics is not None:
        return (
            candidate.inflight_requests,
            metrics.waiting_requests,
            metrics.running_requests,
            metrics.kv_cache_usage,
            at_seconds - metrics.updated_at_seconds,
        )
    age = None if last is None else at_seconds - last.updated_at_seconds
    return candidate.inflight_requests, None, None, None, age


def _keys(picked: tuple[ScoredEndpoint, ...]) -> tuple[str, ...]:
    if len(picked) == 1:
        return (picked[0].candidate.endpoint.key,)
    return tuple([one.candidate.endpoint.key for one in picked])


def _candidates(scored: Sequence[ScoredEndpoint]) -> Sequence[Candidate]:
    if isinstance(scored, ScoredCandidates):
        return scored.candidates
    return [one.candidate for one in scored]


def _filters(
    steps: tuple[FilterStep, ...], seen: Sequence[Candidate], with_names: bool
) -> tuple[Sequence[FilterView], Sequence[Sequence[Candidate]]]:
    """What the filters did; and what each saw, where they are named later."""
    if not steps:
        return (), ()
    lists = [seen, *(step.kept for step in steps[:-1])]
    if with_names:
        return [filter_view(step, one) for step, one in zip(steps, lists, strict=True)], ()
    return [FilterView(step.name, step.before, len(step.kept)) for step in steps], lists
