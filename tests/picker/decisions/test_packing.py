"""Stored decisions are exact, and bounded for any number of candidates."""

import gc
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.decisions.decision import Decision, PackedCandidates
from picker.decisions.packing import BEST_CANDIDATES, MAX_CANDIDATES, MAX_REMOVED
from picker.decisions.ring import ALONE_SECONDS, DecisionRing
from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.decisions.views import RecordView
from picker.framework.attributes import Attributes
from picker.scheduling.scheduler import Profile
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    SchedulingResult,
    ScoredCandidates,
    ScoredEndpoint,
    Usage,
)
from tests.depth import examples, some


class _Fixed:
    def __init__(self, name: str, scores: list[float]) -> None:
        self.name = name
        self._scores = scores

    def score(self, *_: object) -> list[float]:
        return self._scores


class _First:
    name = "first"

    def pick(self, scored: ScoredCandidates, rng: Random) -> list[ScoredEndpoint]:
        return [max(scored, key=lambda one: one.score)]


def _pool(count: int) -> list[Endpoint]:
    return [Endpoint(f"w{index}", "10.0.0.1", index + 1) for index in range(count)]


class _Even:
    name = "even"

    def __init__(self, step: int) -> None:
        self._step = step

    def filter(self, _: object, candidates: list[Candidate], *__: object) -> list[Candidate]:
        return candidates[:: self._step]


def _decision(
    pool: list[Endpoint], scores: list[list[float]], weights: list[float], *filters: _Even
) -> Decision:
    candidates = [
        Candidate(endpoint, EndpointMetrics(index, kv_cache_usage=index / 7), index)
        for index, endpoint in enumerate(pool)
    ]
    scorers = [
        BoundPlugin(_Fixed(f"s{index}", one), "Scorer", profile="p", weight=weight)
        for index, (one, weight) in enumerate(zip(scores, weights, strict=True))
    ]
    narrowing = [BoundPlugin(one, "Filter", profile="p") for one in filters]
    picker = BoundPlugin(_First(), "Picker", profile="p")
    profile = Profile("p", picker, narrowing, scorers)  # type: ignore[arg-type]
    request = InferenceRequest("x", {}, ParsedBody(Api.COMPLETIONS), "m", "m")
    steps = PluginSteps()
    result = profile.run(request, candidates, Attributes(), Random(1), steps)
    chosen = result.picked[0].candidate.endpoint
    return Decision(
        0,
        9.9,
        request_id="x",
        request=request,
        candidates=candidates,
        steps=steps,
        result=SchedulingResult((chosen,), "p", {"p": result}),
        endpoint_key=chosen.key,
        destination=chosen.host_port,
        at_seconds=10.0,
    )


def _end(records: DecisionRing, decision: Decision) -> None:
    decision.cause, decision.seconds = FinishCause.COMPLETED, 1.0
    records.finished(decision)
    decision.condense()


@contextmanager
def _measured(records: DecisionRing) -> Iterator[Callable[[Iterable[Decision]], int]]:
    def remember(decisions: Iterable[Decision]) -> int:
        for decision in decisions:
            records.decided(decision)
            _end(records, decision)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        yield remember
    finally:
        tracemalloc.stop()


def _remembered(decision: Decision, decided_at: float) -> RecordView | None:
    decision = copy(decision)
    decision.steps = copy(decision.steps)  # the end of the request clears them
    records = DecisionRing(5, lambda: 11.0, lambda: 20.0)
    records._decided_at = decided_at
    records.decided(decision)
    under_way = records.find("x")
    _end(records, decision)
    over = records.find("x")
    assert over.profiles == under_way.profiles
    return over


@given(st.data())
@examples(60)
def test_totals_are_those_of_the_profile(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    number = st.floats(width=64) | st.sampled_from([0.0, 1.0, 0.1, -1.0])
    num_scorers = data.draw(st.integers(0, 3))
    scores = [
        data.draw(st.lists(number, min_size=count, max_size=count)) for _ in range(num_scorers)
    ]
    weight = st.floats(-10, 10)
    weights = data.draw(st.lists(weight, min_size=num_scorers, max_size=num_scorers))
    decision = _decision(_pool(count), scores, weights)
    scored = decision.result.profiles["p"].scored
    expected = {one.candidate.endpoint.name: one.score for one in scored}
    for decided_at in (0.0, 10.0):
        record = _remembered(decision, decided_at)
        # Also with scores that JSON lacks.
        assert msgspec.json.decode(msgspec.json.encode(record), type=RecordView) == record
        (profile,) = record.profiles
        assert {one.endpoint: one.total for one in profile.candidates} == expected
        totals = list(expected.values())
        assert profile.num_tied == totals.count(max(totals))
        assert profile.num_scored == count


@pytest.mark.parametrize("decided_at", [0.0, 10.0])
@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.0, 1.0], dtype=np.float32),
        np.array([0, 1]),
        [np.float64(0), np.float64(1)],
        [np.False_, np.True_],
        [False, True],
        (0, 1),
        deque([0.0, 1.0]),
    ],
)
def test_scores_may_be_numbers_of_any_type(scores: Sequence[float], decided_at: float) -> None:
    record = _remembered(_decision(_pool(2), [scores], [2.0]), decided_at)  # type: ignore[list-item]
    view = msgspec.json.decode(msgspec.json.encode(record), type=RecordView)
    best, other = view.profiles[0].candidates
    assert (best.total, best.scores[0].raw, other.total) == (2.0, 1.0, 0.0)


@pytest.mark.parametrize("decided_at", [0.0, 10.0])
def test_only_the_best_of_many_candidates_are_stored(decided_at: float) -> None:
    count = MAX_CANDIDATES + 100
    scores = [float(index % 10) / 10 for index in range(count)]
    decision = _decision(_pool(count), [scores], [1.0])
    result = decision.result.profiles["p"]
    worst = ScoredEndpoint(decision.candidates[0], 0.0)
    picked = replace(result, picked=(worst,))
    changed = SchedulingResult((worst.candidate.endpoint,), "p", {"p": picked})
    record = _remembered(replace(decision, result=changed), decided_at)
    (profile,) = record.profiles
    assert len(profile.candidates) == BEST_CANDIDATES + 1
    assert (profile.num_scored, profile.num_tied) == (count, scores.count(0.9))
    assert profile.candidates[-1].endpoint == "w0"
    totals = [one.total for one in profile.candidates[:-1]]
    assert totals == sorted(scores, reverse=True)[:BEST_CANDIDATES]
    assert profile.candidates[0].waiting_requests == profile.candidates[0].inflight_requests


def test_ties_are_counted_beyond_the_stored_candidates() -> None:
    count = MAX_CANDIDATES + 100
    record = _remembered(_decision(_pool(count), [[0.5] * count], [1.0]), 10.0)
    assert record.profiles[0].num_tied == count


def test_decisions_in_quick_succession_share_their_candidates() -> None:
    records = DecisionRing(5, lambda: 11.0)
    decision = _decision(_pool(3), [[0.5] * 3], [1.0])
    for number in range(4):
        later = replace(decision, number=number, at_seconds=10.0 + number * 0.8 * ALONE_SECONDS)
        records.decided(later)
        _end(records, later)
    packed = [
        isinstance(profile.seen, PackedCandidates)
        for one in records._over
        for profile in one.profiles
    ]
    assert packed == [True, False, False, False]


@pytest.mark.parametrize(("count", "limit_bytes"), some([(10, 2_500), (100, 9_000), (1000, 8_000)]))
def test_a_record_takes_little_memory(count: int, limit_bytes: int) -> None:
    rng, pool, records = Random(1), _pool(count), DecisionRing(100)

    def made(numbers: range) -> Iterator[Decision]:
        for number in numbers:
            scores = [[rng.random() for _ in range(count)] for _ in range(3)]
            decision = _decision(pool, scores, [1.0, 2.0, 3.0])
            decision.number, decision.usage = number, Usage(number, 1, 2)
            decision.at_seconds = 10.0 + number  # after a pause, so it is packed
            yield decision

    with _measured(records) as remember:
        before, full = remember(made(range(10))), remember(made(range(10, 100)))
        later = remember(made(range(100, 250)))
    assert (full - before) / 90 < limit_bytes
    assert later - full < 10 * limit_bytes  # new records replace old ones


@pytest.mark.parametrize("decided_at", [0.0, 10.0])
def test_filters_name_the_removed_endpoints(decided_at: float) -> None:
    record = _remembered(_decision(_pool(12), [[0.5] * 2], [1.0], _Even(3), _Even(2)), decided_at)
    first, second = record.profiles[0].filters
    assert first.removed == tuple(f"w{index}" for index in range(12) if index % 3)
    assert second.removed == ("w3", "w9")
    assert {one.endpoint for one in record.profiles[0].candidates} == {"w0", "w6"}


def test_only_names_are_stored_of_many_removed_candidates() -> None:
    pool, records = _pool(1000), DecisionRing(50, lambda: 11.0)

    def made(number: int) -> Decision:
        decision = _decision(pool, [[0.5] * 20], [1.0], _Even(5), _Even(10))
        decision.number = number
        return decision

    with _measured(records) as remember:
        assert remember(map(made, range(50))) / 50 < 15_000
    record = records.find("x")
    first, second = record.profiles[0].filters
    assert (first.before, first.after, second.before, second.after) == (1000, 200, 200, 20)
    assert first.removed[:5] == ("w1", "w2", "w3", "w4", "w6")
    assert len(first.removed) == len(second.removed) == MAX_REMOVED
    assert second.removed[:3] == ("w5", "w10", "w15")
