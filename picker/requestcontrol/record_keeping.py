"""What is kept of a request once it is over, in little memory and little time.

Theory of operation. A decision leaves lists behind: candidates, and every scorer's scores. Scores
are packed into bytes at once, which is quick. What was known of the candidates is not: numbers are
read one by one. So in a crowd a record keeps the list of candidates itself, whose members it shares
with the records around it, because endpoints are scraped only so often. A decision that comes alone
shares hardly anything, and can be packed as well, because there is time. Of very many candidates
only the best are kept. No prompt, no body and no header is kept, nor what plugins found; and no
refusal itself, which would hold on to everything that was in reach where it was raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from picker.errors import RefusedError
from picker.framework.disaggregation import SKIPPED_STAGES
from picker.prefix.match import MATCH_INFO
from picker.requestcontrol.observer import Decision, ResponseTimes
from picker.requestcontrol.record_views import FilterView, RefusalView
from picker.scheduling.profile import FilteredOutError
from picker.types import (
    Candidate,
    Endpoint,
    FilterStep,
    FinishCause,
    ProfileResult,
    ProfileSteps,
    ScoredCandidates,
    ScorerStep,
    Usage,
)

MAX_CANDIDATES = 128  # of a profile
BEST_CANDIDATES = 64  # are kept where there are more
MAX_REMOVED = 32  # names of endpoints that a filter removed
MAX_NAME = 200  # characters of what clients name
MAX_MESSAGE = 500

_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
_endpoint_of = attrgetter("endpoint")
_NO_STEPS = ProfileSteps()
_NO_STAGES: Mapping[str, str] = MappingProxyType({})

# In flight, waiting, running, KV usage, age of that in seconds; None where nothing was known.
Load: TypeAlias = tuple[int, int | None, int | None, float | None, float | None]


# Id, incoming model, target model, fairness id, objective of a request.
Names: TypeAlias = tuple[str, str, str, str, str]


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates by themselves: who, and how they did; `loads` is a packed list of `Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


class KeptProfile(msgspec.Struct, frozen=True, gc=False):
    """One profile of a decision.

    `candidates` were scored, all of them or the best of `num_scored`; `scorers` is a packed list of
    `ScorerStep` in their order. `num_tied` shared the best total (None: nothing was left out, count
    them). `picked` are keys.
    """

    name: str
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    candidates: Sequence[Candidate] | PackedCandidates
    scorers: bytes
    filters: Sequence[FilterStep | FilterView] = ()
    seen: Sequence[Candidate] = ()  # what the first of the filters saw, unless they are views
    num_tied: int | None = None


class Decided(msgspec.Struct, frozen=True, gc=False):
    """The decision itself. `at_seconds` is on the clock of the requests.

    `matched_prefix_tokens` is how much of the prompt the endpoint was thought to have (None: nobody
    looked), `stages` why stages were left out.
    """

    destination: str
    seconds: float
    at_seconds: float
    primary: str | None
    rewritten_by: str | None
    matched_prefix_tokens: int | None
    stages: Mapping[str, str]


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A request. Times are in seconds; `cause` None: it is not over."""

    request_id: str
    incoming_model: str
    target_model: str
    fairness_id: str
    objective: str
    priority: int
    size_bytes: int
    received_unix_seconds: float
    seconds: float
    queue_seconds: float
    cause: FinishCause | None = None
    status: int | None = None
    served_by: str | None = None
    endpoint_key: str | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    refusal: RefusalView | None = None
    decided: Decided | None = None
    profiles: tuple[KeptProfile, ...] = ()


def kept_decision(decision: Decision) -> Decided:
    """The decision without its profiles."""
    result, rewritten, matched, stages = decision.result, decision.rewritten, None, _NO_STAGES
    if result is not None and decision.attributes is not None:
        for key, found in decision.attributes.items():
            kind = key.data_type
            if kind == MATCH_INFO:
                endpoint = result.endpoints[0].key
                tokens = found.match_blocks.get(endpoint, 0) * found.block_size_tokens
                matched = tokens if matched is None or tokens > matched else matched
            elif kind == SKIPPED_STAGES:
                stages = found
    # By name fields take several times as long.
    return Decided(
        decision.destination,
        decision.seconds,
        decision.at_seconds,
        None if result is None else result.primary_profile,
        None if rewritten is None else rewritten.rule,
        matched,
        stages,
    )


def kept_profiles(decision: Decision, is_alone: bool) -> tuple[KeptProfile, ...]:
    """The profiles of a decision, in the order in which they ran."""
    result = decision.result
    if result is None:
        return ()
    seen = decision.candidates
    return tuple(
        [
            _kept_profile(name, one, seen, decision.at_seconds, is_alone)
            for name, one in result.profiles.items()
        ]
    )


def kept_refusal(refusal: RefusedError) -> RefusalView:
    """What a client was told."""
    reason = refusal.drop_reason
    return RefusalView(
        refusal.status,
        refusal.code.value,
        _cut(refusal.message, MAX_MESSAGE),
        None if reason is None else reason.value,
        refusal.retry_after_seconds,
    )


def kept_filters(refusal: RefusedError | None) -> tuple[KeptProfile, ...]:
    """The profile whose filters left nothing, where that is why a request was refused."""
    if not isinstance(refusal, FilteredOutError):
        return ()
    seen = refusal.candidates
    filters = filter_views(refusal.steps.filters, seen)
    return (KeptProfile(refusal.profile, "", (), len(seen), 0, (), _encode(()), filters),)


def short(names: Names) -> Names:
    """The names, or the beginnings of those that are longer than anything that people write."""
    one, two, three, four, five = map(shortened, names)
    return one, two, three, four, five


def shortened(name: str) -> str:
    """One of them."""
    return _cut(name, MAX_NAME)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def filter_views(steps: Sequence[FilterStep], seen: Sequence[Candidate]) -> tuple[FilterView, ...]:
    """What each filter did, by the names of those that it removed."""
    views = []
    for step in steps:
        removed: tuple[str, ...] = ()
        if len(step.kept) != step.before:
            kept = {candidate.key for candidate in step.kept}
            gone = (one.endpoint.name for one in seen if one.key not in kept)
            removed = tuple(name for name, _ in zip(gone, range(MAX_REMOVED), strict=False))
        views.append(FilterView(step.name, step.before, len(step.kept), removed))
        seen = step.kept
    return tuple(views)


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


def _kept_profile(
    name: str,
    result: ProfileResult,
    seen: Sequence[Candidate],
    at_seconds: float,
    is_alone: bool,
) -> KeptProfile:
    scored, steps = result.scored, result.steps or _NO_STEPS
    candidates: Any = _candidates_of(scored)
    num_scored, scorers, tied = len(candidates), steps.scorers, None
    is_many = num_scored > MAX_CANDIDATES
    if is_many:
        candidates, scorers, tied = _best(result, candidates, scorers)
    if is_alone:
        candidates = packed(candidates, at_seconds)
    filters: Sequence[FilterStep | FilterView] = steps.filters
    has_views = filters and (is_alone or is_many)
    return KeptProfile(
        name,
        steps.picker,
        tuple([one.candidate.endpoint.key for one in result.picked]),
        len(seen),
        num_scored,
        candidates,
        _encode(scorers),
        filter_views(steps.filters, seen) if has_views else filters,
        seen if filters and not has_views else (),
        tied,
    )


def packed(candidates: Sequence[Candidate], at_seconds: float) -> PackedCandidates:
    """The candidates without the values that they share with others."""
    loads = [load_of(candidate, at_seconds) for candidate in candidates]
    return PackedCandidates(tuple(map(_endpoint_of, candidates)), _encode(loads))


def _candidates_of(scored: Sequence[Any]) -> Sequence[Candidate]:
    if isinstance(scored, ScoredCandidates):
        return scored.candidates
    return [one.candidate for one in scored]


def _best(
    result: ProfileResult, candidates: Sequence[Candidate], scorers: tuple[ScorerStep, ...]
) -> tuple[Sequence[Candidate], tuple[ScorerStep, ...], int]:
    """The best candidates and the picked ones with their scores, and how many shared the best
    total.
    """
    scored = result.scored
    totals: Any = scored.totals if isinstance(scored, ScoredCandidates) else None
    if totals is None:
        totals = [one.score for one in scored]
    values = np.array(totals)
    indexes = np.argpartition(values, -BEST_CANDIDATES)[-BEST_CANDIDATES:].tolist()
    for one in result.picked:
        if not any(one.candidate is candidates[index] for index in indexes):
            indexes.append(candidates.index(one.candidate))
    choose = itemgetter(*indexes)
    chosen = tuple(ScorerStep(one.name, one.weight, choose(one.scores)) for one in scorers)
    return choose(candidates), chosen, int((values == values.max()).sum())
