"""What is kept of a request, in little memory and little time.

Theory of operation. A decision is packed into one piece of bytes as soon as it is made, while all
that it looked at is still in the processor's caches; bytes are quick to make, to keep and to throw
away. What was known of the candidates is not packed: it would have to be read number by number. So
in a crowd a record keeps the candidates themselves, which it shares with the records around it,
because endpoints are scraped only so often; in tuples, at which the garbage collector looks no more
than once. A decision that comes alone shares hardly anything; its candidates are packed when the
request is over, which nobody waits for. Of very many candidates only the best are kept. No prompt,
no body and no header is kept, nor what plugins found; and no refusal itself, which would hold on to
all that was in reach where it was raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from picker.errors import RefusedError
from picker.framework.disaggregation import SKIPPED_STAGES
from picker.prefix.match import MATCH_INFO
from picker.requestcontrol.kept import (
    NO_STAGES,
    AllSeen,
    Decided,
    Kept,
    KeptDecision,
    KeptProfile,
    Load,
    PackedCandidates,
    Seen,
)
from picker.requestcontrol.observer import Decision, Outcome
from picker.requestcontrol.record_views import FilterView, RefusalView
from picker.scheduling.profile import FilteredOutError
from picker.types import (
    Candidate,
    FilterStep,
    InferenceRequest,
    ProfileResult,
    ProfileSteps,
    SchedulingResult,
    ScoredCandidates,
    ScoredEndpoint,
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
_decisions = msgspec.msgpack.Decoder(KeptDecision)
_endpoint_of = attrgetter("endpoint")
_NO_STEPS = ProfileSteps()


def keep_decision(decision: Decision) -> Decided:
    """What is kept of a decision.

    What is encoded has the shapes of `KeptDecision` and `KeptProfile`, whose objects nobody needs
    here: every request comes this way.
    """
    request, result = decision.request, decision.result
    if request is None or result is None:
        return _without_body(decision)
    seen: AllSeen
    profiles: Any
    if len(result.profiles) != 1 or (plain := _plain_profile(result)) is None:
        found = [_profile(name, one, decision) for name, one in result.profiles.items()]
        profiles, seen = [profile for profile, _ in found], tuple([lists for _, lists in found])
    else:
        profiles, seen = plain
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
    return _encode(kept), seen


def _plain_profile(result: SchedulingResult) -> tuple[Any, tuple[Candidate, ...]] | None:
    """The only profile as most are, without filters and with few candidates, by itself."""
    for name, one in result.profiles.items():
        steps, scored = one.steps, one.scored
        if steps is None or steps.filters or not isinstance(scored, ScoredCandidates):
            return None
        candidates, picked = scored.candidates, one.picked
        count = len(candidates)
        if count > MAX_CANDIDATES:
            return None
        keys = [each.candidate.endpoint.key for each in picked]
        told = (name, steps.picker, keys, count, count, None, steps.scorers, steps.scores)
        return (told,), tuple(candidates)
    return None


def packed_by_itself(decided: Decided, at_seconds: float) -> Decided:
    """The same with the candidates packed as well, as they were when it was decided."""
    packed, seen = decided
    each = [one for one in by_profile(seen) if not isinstance(one, PackedCandidates)]
    if any(len(lists) > 1 for lists in each):  # to be named from these lists
        decision = _decisions.decode(packed)
        named = [
            replace(profile, filters=named_filters(profile, lists))
            for profile, lists in zip(decision.profiles, each, strict=True)
        ]
        packed = _encode(replace(decision, profiles=named))
    return packed, tuple([_packed(lists[-1], at_seconds) for lists in each])


def by_profile(seen: AllSeen) -> Sequence[Seen]:
    """The candidates of each profile."""
    alone = tuple([one for one in seen if isinstance(one, Candidate)])
    if alone:
        return ((alone,),)
    return [one for one in seen if not isinstance(one, Candidate)]


def named_filters(profile: KeptProfile, lists: Sequence[Sequence[Candidate]]) -> list[FilterView]:
    """What the filters of a profile did, with names: each saw one of the lists."""
    if len(lists) == 1:
        return list(profile.filters)
    return [
        filter_view(FilterStep(view.filter, view.before, after), before)
        for view, before, after in zip(profile.filters, lists[:-1], lists[1:], strict=True)
    ]


def keep_outcome(outcome: Outcome, received_unix_seconds: float, decided: Decided | None) -> Kept:
    """The record of a request that is over."""
    refusal, request_id = outcome.refusal, outcome.request_id
    packed, seen = decided or _undecided(outcome)
    return Kept(
        request_id if len(request_id) <= MAX_NAME else short(request_id),
        received_unix_seconds,
        packed,
        seen,
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
    return _encode(kept), ()


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


def _profile(name: str, result: ProfileResult, decision: Decision) -> tuple[KeptProfile, Seen]:
    steps, seen = result.steps or _NO_STEPS, decision.candidates
    candidates, scores, tied = _candidates(result.scored), steps.scores, None
    num_scored = len(candidates)
    is_many = num_scored > MAX_CANDIDATES
    if is_many:
        candidates, scores, tied = _best(result, candidates, scores)
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
    stages = NO_STAGES
    if decision.attributes is not None:
        for key, found in decision.attributes.items():
            kind = key.data_type
            if kind == MATCH_INFO:
                tokens = found.match_blocks.get(endpoint_key, 0) * found.block_size_tokens
                if decision.request is not None and decision.request.num_tokens:
                    tokens = min(tokens, decision.request.num_tokens)  # the last block is partial
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
    return _encode(kept), ()


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
    return _encode(kept), seen


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
