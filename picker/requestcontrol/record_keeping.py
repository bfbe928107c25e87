"""What is kept of a request, in little memory and little time.

Theory of operation. A decision is packed into one piece of bytes as soon as it is made, while all
that it looked at is still in the processor's caches; bytes are quick to make, to keep and to throw
away. What was known of the candidates is not packed: it would have to be read number by number. So
in a crowd a record keeps the lists of candidates themselves, whose members it shares with the
records around it, because endpoints are scraped only so often. A decision that comes alone shares
hardly anything, and can be packed as well, because there is time. Of very many candidates only the
best are kept. No prompt, no body and no header is kept, nor what plugins found; and no refusal
itself, which would hold on to all that was in reach where it was raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np

from picker.errors import RefusedError
from picker.framework.disaggregation import SKIPPED_STAGES
from picker.prefix.match import MATCH_INFO
from picker.requestcontrol.observer import Decision, Outcome, ResponseTimes
from picker.requestcontrol.record_views import FilterView, RefusalView
from picker.scheduling.profile import FilteredOutError
from picker.types import (
    Candidate,
    Endpoint,
    FilterStep,
    FinishCause,
    InferenceRequest,
    ProfileResult,
    ProfileSteps,
    ScoredCandidates,
    ScoredEndpoint,
    Usage,
)

MAX_CANDIDATES = 128  # of a profile
BEST_CANDIDATES = 64  # are kept where there are more
MAX_REMOVED = 32  # names of endpoints that a filter removed
MAX_NAME = 200  # characters of what clients name
MAX_MESSAGE = 500


def _plain(value: Any) -> Any:
    """A scorer may answer in any sequence, of numbers of any kind."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_endpoint_of = attrgetter("endpoint")
_NO_STEPS = ProfileSteps()
_NO_STAGES: Mapping[str, str] = {}  # packed as what it is, unlike a view of it

# In flight, waiting, running, KV usage, age of that in seconds; None where nothing was known.
Load: TypeAlias = tuple[int, int | None, int | None, float | None, float | None]


class KeptProfile(msgspec.Struct, frozen=True, array_like=True):
    """One profile of a decision.

    `scorers` are names with weights and `scores` what they said of those candidates that are kept,
    of `num_scored`; `num_tied` shared the best total (None: all are kept, count them). `picked` are
    keys. `filters` name those that they removed only where the candidates were packed.
    """

    name: str
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    num_tied: int | None
    scorers: Sequence[tuple[str, float]]
    scores: Sequence[Sequence[float | bool]]
    filters: Sequence[FilterView] = ()


class DecisionHead(msgspec.Struct, frozen=True, array_like=True):
    """What a `KeptDecision` begins with: enough for a line of a list, and soon unpacked by itself.
    `destination` is empty for what was never decided.
    """

    incoming_model: str
    target_model: str
    fairness_id: str
    objective: str
    priority: int
    size_bytes: int
    destination: str = ""
    seconds: float = 0.0


class KeptDecision(DecisionHead, frozen=True, array_like=True):
    """What is known of a request once it is decided or refused.

    `at_seconds` is on the clock of the requests. `matched_prefix_tokens` is how much of the prompt
    the endpoint was thought to have (None: nobody looked), `stages` why stages were left out.
    """

    at_seconds: float = 0.0
    primary: str = ""
    rewritten_by: str | None = None
    matched_prefix_tokens: int | None = None
    stages: Mapping[str, str] = _NO_STAGES
    profiles: Sequence[KeptProfile] = ()


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates by themselves: who, and how they did; `loads` is a packed list of `Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


# The candidates of a profile: as it saw them, and as each of its filters left them; or, packed, the
# last of these alone.
Seen: TypeAlias = tuple[Sequence[Candidate], ...] | PackedCandidates


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A packed `KeptDecision`, and the candidates of its profiles, in their order."""

    packed: bytes
    seen: tuple[Seen, ...] = ()


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A record. Times are in seconds; `cause` None: the request is not over."""

    request_id: str
    received_unix_seconds: float
    decided: Decided
    seconds: float
    queue_seconds: float
    cause: FinishCause | None = None
    endpoint_key: str | None = None
    status: int | None = None
    served_by: str | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    refusal: RefusalView | None = None


def keep_decision(decision: Decision, is_alone: bool) -> Decided:
    """What is kept of a decision.

    What is encoded has the shapes of `KeptDecision` and `KeptProfile`, whose objects nobody needs
    here: every request comes this way.
    """
    request, result = decision.request, decision.result
    if request is None or result is None:
        return _without_body(decision)
    profiles: list[Any] = []
    seen: list[Seen] = []
    profile: Any
    lists: Seen
    for name, one in result.profiles.items():
        steps, candidates = one.steps, _candidates(one.scored)
        count = len(candidates)
        if is_alone or steps is None or steps.filters or count > MAX_CANDIDATES:
            profile, lists = _profile(name, one, decision, is_alone)
        else:
            keys = _keys(one.picked)
            profile = (name, steps.picker, keys, count, count, None, steps.scorers, steps.scores)
            lists = (candidates,)
        profiles.append(profile)
        seen.append(lists)
    matched, stages = _found(decision, result.endpoints[0].key)
    incoming, target = decision.incoming_model, decision.target_model
    fairness_id, objective = request.fairness_id, request.objective
    if len(incoming) + len(target) + len(fairness_id) + len(objective) > MAX_NAME:
        incoming, target = short(incoming), short(target)
        fairness_id, objective = short(fairness_id), short(objective)
    kept = (
        incoming,
        target,
        fairness_id,
        objective,
        request.priority,
        decision.size_bytes,
        decision.destination,
        decision.seconds,
        decision.at_seconds,
        result.primary_profile,
        None if decision.rewritten is None else decision.rewritten.rule,
        matched,
        stages,
        profiles,
    )
    return Decided(_encode(kept), tuple(seen))


def keep_outcome(outcome: Outcome, received_unix_seconds: float, decided: Decided | None) -> Kept:
    """The record of a request that is over."""
    refusal, request_id = outcome.refusal, outcome.request_id
    return Kept(
        request_id if len(request_id) <= MAX_NAME else short(request_id),
        received_unix_seconds,
        decided or _undecided(outcome),
        outcome.seconds,
        outcome.queue_seconds,
        outcome.cause,
        outcome.endpoint_key,
        outcome.response_status,
        outcome.served_by,
        outcome.usage,
        outcome.response,
        None if refusal is None else _refusal(refusal),
    )


def keep_waiting(request: InferenceRequest) -> Decided:
    """What is kept of a request that is still to be decided."""
    kept = KeptDecision(
        short(request.incoming_model),
        short(request.target_model),
        short(request.fairness_id),
        short(request.objective),
        request.priority,
        request.size_bytes,
    )
    return Decided(_encode(kept))


def short(name: str) -> str:
    """What a client named; the beginning of what is longer than anything that people write."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


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


def _profile(
    name: str, result: ProfileResult, decision: Decision, is_alone: bool
) -> tuple[KeptProfile, Seen]:
    steps, seen = result.steps or _NO_STEPS, decision.candidates
    candidates, scores, tied = _candidates(result.scored), steps.scores, None
    num_scored = len(candidates)
    is_many = num_scored > MAX_CANDIDATES
    if is_many:
        candidates, scores, tied = _best(result, candidates, scores)
    with_names = is_alone or len(seen) > MAX_CANDIDATES  # of very many no list is kept either
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
    if is_alone:
        return profile, _packed(candidates, decision.at_seconds)
    return profile, (*lists, candidates)


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


def _found_nothing(refusal: FilteredOutError) -> KeptProfile:
    """A profile whose filters left nothing."""
    filters, _ = _filters(refusal.steps.filters, refusal.candidates, with_names=True)
    return KeptProfile(refusal.profile, "", (), len(refusal.candidates), 0, 0, (), (), filters)


def _packed(candidates: Sequence[Candidate], at_seconds: float) -> PackedCandidates:
    loads = [load_of(candidate, at_seconds) for candidate in candidates]
    return PackedCandidates(tuple(map(_endpoint_of, candidates)), _encode(loads))


def _best(
    result: ProfileResult, candidates: Sequence[Candidate], scores: Sequence[Sequence[float]]
) -> tuple[Sequence[Candidate], Sequence[Sequence[float]], int]:
    """The best candidates and the picked ones, with scores; how many shared the best total."""
    scored = result.scored
    if isinstance(scored, ScoredCandidates):
        all_totals = scored.totals
    else:
        all_totals = [one.score for one in scored]
    totals = np.frombuffer(array("d", all_totals))  # quicker than numpy's own way from a list
    indexes = np.argpartition(totals, -BEST_CANDIDATES)[-BEST_CANDIDATES:].tolist()
    for one in result.picked:
        if not any(one.candidate is candidates[index] for index in indexes):
            indexes.append(candidates.index(one.candidate))
    choose = itemgetter(*indexes)
    return choose(candidates), [choose(one) for one in scores], int((totals == totals.max()).sum())


def _found(decision: Decision, endpoint_key: str) -> tuple[int | None, Mapping[str, str]]:
    """How much of the prompt the endpoint was thought to have, and why stages were left out."""
    matched: int | None = None
    stages = _NO_STAGES
    if decision.attributes is not None:
        for key, found in decision.attributes.items():
            kind = key.data_type
            if kind == MATCH_INFO:
                tokens = found.match_blocks.get(endpoint_key, 0) * found.block_size_tokens
                matched = tokens if matched is None or tokens > matched else matched
            elif kind == SKIPPED_STAGES:
                stages = found
    return matched, stages


def _without_body(decision: Decision) -> Decided:
    """Of a request about which nothing is known: any endpoint will do."""
    kept = KeptDecision(
        incoming_model=short(decision.incoming_model),
        target_model=short(decision.target_model),
        fairness_id="",
        objective="",
        priority=0,
        size_bytes=decision.size_bytes,
        destination=decision.destination,
        seconds=decision.seconds,
        at_seconds=decision.at_seconds,
    )
    return Decided(_encode(kept))


def _undecided(outcome: Outcome) -> Decided:
    """Of a request that was over before it was decided."""
    request, refusal = outcome.request, outcome.refusal
    profiles: list[KeptProfile] = []
    seen: tuple[Seen, ...] = ()
    if isinstance(refusal, FilteredOutError):
        profiles, seen = [_found_nothing(refusal)], (_packed((), 0.0),)
    kept = KeptDecision(
        short(outcome.incoming_model),
        short(outcome.target_model),
        short(outcome.fairness_id),
        "" if request is None else short(request.objective),
        outcome.priority,
        0 if request is None else request.size_bytes,
        primary=refusal.profile if isinstance(refusal, FilteredOutError) else "",
        profiles=profiles,
    )
    return Decided(_encode(kept), seen)


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
