"""Packs the profiles of a decision, using little memory and little time.

Scores are packed as soon as the decision is made, while they are still in the processor's caches.
Loads are not, because packing reads them number by number: under load a decision refers to the
candidates, which it shares with adjacent decisions, since scrapes are less frequent. The candidates
of a decision without neighbours are packed when the request is over, which delays no request. Only
the best `MAX_CANDIDATES` candidates are stored.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from picker.decisions.decision import (
    Decision,
    FilteredOutError,
    PackedCandidates,
    PackedProfile,
    Seen,
)
from picker.decisions.steps import SCHEDULER, PluginStep
from picker.decisions.views import FilterView
from picker.framework.disaggregation import SKIPPED_STAGES
from picker.prefix.match import MATCH_INFO
from picker.types import Candidate, ProfileResult, ScoredCandidates

MAX_CANDIDATES = 128  # of a profile
BEST_CANDIDATES = 64  # stored if there are more
MAX_REMOVED = 32  # names of endpoints removed by a filter

# In flight, waiting, running, KV usage, age of the last three in seconds; None: unknown.
Load: TypeAlias = tuple[int, int | None, int | None, float | None, float | None]
# The name of a filter and the candidates that it left.
_Filtered: TypeAlias = tuple[str, Sequence[Candidate]]


class _Ran(msgspec.Struct):
    filters: list[_Filtered] = []
    scorers: list[tuple[str, float]] = []
    scores: list[Sequence[float]] = []
    picker: str = ""


def _plain(value: Any) -> Any:
    """Convert a scorer's scores, any sequence of any type of number, to a list."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_scores = msgspec.msgpack.Decoder(list[list[float | bool]])
_loads = msgspec.msgpack.Decoder(list[Load])
_endpoint_of, _key_of = attrgetter("endpoint"), attrgetter("candidate.endpoint.key")
_NOTHING = _Ran()


def pack(decision: Decision) -> None:
    """Pack the profiles of a decision whose endpoint has been chosen."""
    result, endpoint_key = decision.result, decision.endpoint_key
    if result is None or endpoint_key is None:
        return
    ran, seen = _last_attempt(decision.steps), decision.candidates
    decision.primary_profile = result.primary_profile
    decision.profiles = tuple(
        [
            _profile(name, one, ran.get(name, _NOTHING), seen)
            for name, one in result.profiles.items()
        ]
    )
    _note_findings(decision, endpoint_key)


def pack_refused(decision: Decision) -> None:
    """Pack the filters of a refused decision if they left no endpoint."""
    refusal = decision.refusal
    if not isinstance(refusal, FilteredOutError):
        return
    name, seen = refusal.profile, decision.candidates
    filters = _named(_last_attempt(decision.steps).get(name, _NOTHING).filters, seen)
    nothing = _packed((), 0.0)
    decision.primary_profile = name
    decision.profiles = (
        PackedProfile(name, "", (), len(seen), 0, 0, (), _encode(()), filters, nothing),
    )


def pack_candidates(decision: Decision) -> None:
    """Pack the candidates as well, with their loads at the time of the decision."""
    at = decision.at_seconds
    decision.profiles = tuple(
        [
            one
            if isinstance(one.seen, PackedCandidates)
            else replace(one, filters=filters_of(one), seen=_packed(one.seen[-1], at))
            for one in decision.profiles
        ]
    )


def scores_of(profile: PackedProfile) -> list[list[float | bool]]:
    return _scores.decode(profile.scores)


def filters_of(profile: PackedProfile) -> tuple[FilterView, ...]:
    """Describe the filters of a profile, with the endpoints they removed."""
    seen = profile.seen
    if isinstance(seen, PackedCandidates) or len(seen) == 1:
        return profile.filters
    steps = zip(profile.filters, seen[:-1], seen[1:], strict=True)
    return tuple([_filter(view.filter, before, after) for view, before, after in steps])


def loads_of(seen: Seen, at_seconds: float) -> Iterable[tuple[Any, Load]]:
    """Return the endpoint and the load of each candidate at that time."""
    if isinstance(seen, PackedCandidates):
        return zip(seen.endpoints, _loads.decode(seen.loads), strict=True)
    return zip(map(_endpoint_of, seen[-1]), _loads_at(seen[-1], at_seconds), strict=True)


def _last_attempt(steps: Iterable[PluginStep]) -> Mapping[str, _Ran]:
    found: dict[str, _Ran] = {}
    is_over = False
    for step in steps:
        bound = step.bound
        name = bound.profile
        if not name:
            is_over = is_over or bound.point == SCHEDULER
            continue
        if is_over:
            found, is_over = {}, False
        ran = found.get(name)
        if ran is None:
            ran = found[name] = _Ran()
        if bound.point == "Scorer":
            ran.scorers.append(bound.label)
            ran.scores.append(step.said)
        elif bound.point == "Picker":
            ran.picker = bound.name
        elif not isinstance(step.said, Exception):
            ran.filters.append((bound.name, step.said))
    return found


def _profile(
    name: str, result: ProfileResult, ran: _Ran, seen: Sequence[Candidate]
) -> PackedProfile:
    scored, scores = result.scored, ran.scores
    if isinstance(scored, ScoredCandidates):
        candidates = scored.candidates
    else:
        candidates = [one.candidate for one in scored]
    num_scored, tied = len(candidates), None
    if num_scored > MAX_CANDIDATES:
        candidates, scores, tied = _best_of(result, candidates, scores)
    filters: tuple[FilterView, ...] = ()
    # Tuples, because the garbage collector examines those only once.
    lists: tuple[Sequence[Candidate], ...] = (tuple(candidates),)
    if ran.filters and len(seen) > MAX_CANDIDATES:  # no list of them is stored either
        filters = _named(ran.filters, seen)
    elif ran.filters:
        before = [seen, *(left for _, left in ran.filters)]
        steps = zip(ran.filters, before, strict=False)
        filters = tuple([FilterView(one, len(all_), len(left)) for (one, left), all_ in steps])
        lists = (*map(tuple, before[:-1]), *lists)
    picked = tuple(map(_key_of, result.picked))
    return PackedProfile(
        name,
        ran.picker,
        picked,
        len(seen),
        num_scored,
        tied,
        tuple(ran.scorers),
        _encode(scores),
        filters,
        lists,
    )


def _best_of(
    result: ProfileResult, candidates: Sequence[Candidate], scores: list[Sequence[float]]
) -> tuple[Sequence[Candidate], list[Sequence[float]], int]:
    scored = result.scored
    if isinstance(scored, ScoredCandidates):
        all_totals = scored.totals
    else:
        all_totals = [one.score for one in scored]
    # Packing is four times as fast as `array`, five times as fast as `np.array` of a list.
    totals = np.frombuffer(struct.pack(f"{len(all_totals)}d", *all_totals))
    indexes = totals.argpartition(-BEST_CANDIDATES)[-BEST_CANDIDATES:].tolist()
    choose = itemgetter(*indexes)
    best, chosen = choose(all_totals), choose(candidates)
    tied = best.count(max(best))
    if tied == BEST_CANDIDATES:  # perhaps more tie
        tied = int((totals == totals.max()).sum())
    for one in result.picked:
        # By identity, since equality would compare every field.
        if not any(map(is_, chosen, repeat(one.candidate))):
            indexes.append(candidates.index(one.candidate))
            choose = itemgetter(*indexes)
            chosen = choose(candidates)
    return chosen, [choose(one) for one in scores], tied


def _packed(candidates: Sequence[Candidate], at_seconds: float) -> PackedCandidates:
    loads = _encode(_loads_at(candidates, at_seconds))
    return PackedCandidates(tuple(map(_endpoint_of, candidates)), loads)


def _named(filters: Iterable[_Filtered], seen: Sequence[Candidate]) -> tuple[FilterView, ...]:
    views = []
    for name, left in filters:
        views.append(_filter(name, seen, left))
        seen = left
    return tuple(views)


def _filter(name: str, seen: Sequence[Candidate], left: Sequence[Candidate]) -> FilterView:
    before, after = len(seen), len(left)
    remaining = set(map(id, map(_endpoint_of, left)))
    gone = (one.endpoint.name for one in seen if id(one.endpoint) not in remaining)
    few = max(0, min(MAX_REMOVED, before - after))  # the search ends there
    return FilterView(name, before, after, tuple(islice(gone, few)))


def _loads_at(candidates: Sequence[Candidate], at_seconds: float) -> list[Load]:
    """Return the loads known to the decision; of stale metrics only the age is given."""
    loads: list[Load] = []
    for one in candidates:
        metrics, last = one.metrics, one.last_metrics
        if metrics is None:
            age = None if last is None else at_seconds - last.updated_at_seconds
            loads.append((one.inflight_requests, None, None, None, age))
            continue
        age = at_seconds - metrics.updated_at_seconds
        waiting, running = metrics.waiting_requests, metrics.running_requests
        loads.append((one.inflight_requests, waiting, running, metrics.kv_cache_usage, age))
    return loads


def _note_findings(decision: Decision, endpoint_key: str) -> None:
    attributes, request = decision.attributes, decision.request
    if attributes is None or request is None:
        return
    for key, found in attributes.items():
        kind = key.data_type
        if kind == MATCH_INFO:
            tokens = found.match_blocks.get(endpoint_key, 0) * found.block_size_tokens
            if tokens and request.prompts:
                tokens = min(tokens, request.num_tokens)  # the last block is partial
            matched = decision.matched_prefix_tokens
            if matched is None or tokens > matched:
                decision.matched_prefix_tokens = tokens
        elif kind == SKIPPED_STAGES:
            decision.stages = found
