"""Profiles add up weighted scores; the scheduler runs what the profile handler asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.plugins.pickers.max_score_picker import MaxScorePicker
from picker.plugins.profile_handlers.single_profile_handler import SingleProfileHandler
from picker.scheduling.profile import Profile, WeightedScorer
from picker.scheduling.scheduler import Scheduler
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    SchedulingResult,
)

REQUEST = InferenceRequest("r", {}, ParsedBody(Api.RAW), "m", "m")
CANDIDATES = [Candidate(Endpoint(name, "10.0.0.1", 8000)) for name in "abc"]


class Fixed:
    """A scorer with fixed opinions."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        return self.scores[: len(candidates)]


class Keep:
    """A filter that keeps some names and counts its calls."""

    def __init__(self, names: str) -> None:
        self.names, self.calls = names, 0

    def filter(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> Sequence[Candidate]:
        self.calls += 1
        return [candidate for candidate in candidates if candidate.endpoint.name in self.names]


def run(one: Profile) -> ProfileResult:
    return one.run(REQUEST, CANDIDATES, Attributes(), Random(1))


def test_a_total_is_the_sum_of_clamped_scores_times_weights() -> None:
    """NaN counts 0; weights are not normalised and may be negative."""
    scorers = (
        WeightedScorer(Fixed(0.5, 2.0, -1.0), 2.0),
        WeightedScorer(Fixed(math.nan, 0.25, 1.0), 3.0),
        WeightedScorer(Fixed(1.0, 0.0, 0.0), -1.0),
    )
    result = run(Profile("p", MaxScorePicker(1), (), scorers))
    assert [scored.score for scored in result.scored] == [0.0, 2.75, 3.0]
    assert [scored.candidate.endpoint.name for scored in result.picked] == ["c"]


def test_filters_narrow_in_order_and_stop_when_nothing_is_left() -> None:
    """An empty result is a typed 429."""
    narrow, nothing, never = Keep("ab"), Keep(""), Keep("abc")
    assert len(run(Profile("p", MaxScorePicker(3), (narrow,))).picked) == 2
    with pytest.raises(RefusedError) as refusal:
        run(Profile("p", MaxScorePicker(1), (narrow, nothing, never)))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    assert refusal.value.drop_reason is DropReason.SATURATED
    assert never.calls == 0


def test_equal_seeds_decide_equally() -> None:
    """A decision is a function of its arguments."""
    scheduler = Scheduler([Profile("p", MaxScorePicker(1))], SingleProfileHandler())

    def decide(seed: int) -> str:
        result = scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(seed))
        return result.endpoints[0].name

    assert [decide(seed) for seed in range(20)] == [decide(seed) for seed in range(20)]
    assert len({decide(seed) for seed in range(20)}) == 3


def test_no_candidates_is_a_503() -> None:
    """There is no pool to choose from."""
    scheduler = Scheduler([Profile("p", MaxScorePicker(1))], SingleProfileHandler())
    with pytest.raises(RefusedError) as refusal:
        scheduler.schedule(REQUEST, [], Attributes(), Random(1))
    assert refusal.value.status == 503
    assert refusal.value.drop_reason is DropReason.NO_ENDPOINTS


class Ask:
    """A profile handler that asks for lists of profiles, round by round."""

    max_profiles = None

    def __init__(self, *rounds: Sequence[str], primary: str = "b") -> None:
        self.rounds, self.primary = list(rounds), primary

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        return self.rounds.pop(0) if self.rounds else ()

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        primary = results.get(self.primary)
        if primary is None:
            raise RefusedError(Code.INTERNAL, "nothing found")
        endpoints = tuple(scored.candidate.endpoint for scored in primary.picked)
        return SchedulingResult(endpoints, self.primary)


def test_profiles_run_in_rounds_each_at_most_once() -> None:
    """A failed profile may be survived; an unknown or repeated name ends a round without result."""
    first, second = Keep(""), Keep("b")
    scheduler = Scheduler(
        [Profile("a", MaxScorePicker(1), (first,)), Profile("b", MaxScorePicker(1), (second,))],
        Ask(["a"], ["b", "a"], ["a", "nonsense"]),
    )
    result = scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(1))
    assert [endpoint.name for endpoint in result.endpoints] == ["b"]
    assert (first.calls, second.calls) == (1, 1)
    assert list(scheduler.profiles) == ["a", "b"]


def test_a_typed_refusal_of_a_profile_is_the_answer_when_there_is_no_result() -> None:
    """Its code survives, whatever the handler says."""
    scheduler = Scheduler([Profile("b", MaxScorePicker(1), (Keep(""),))], Ask(["b"]))
    with pytest.raises(RefusedError, match="no endpoints available") as refusal:
        scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(1))
    assert refusal.value.status == 429


def test_no_profile_at_all_is_a_429() -> None:
    """A handler that asks for nothing, or only for what does not exist."""
    scheduler = Scheduler([Profile("b", MaxScorePicker(1))], Ask(["nonsense"]))
    with pytest.raises(RefusedError, match="no scheduling profile ran"):
        scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(1))


def test_the_handlers_own_refusal_stands_when_every_profile_ran() -> None:
    """Here its primary never was asked for."""
    scheduler = Scheduler([Profile("a", MaxScorePicker(1))], Ask(["a"], primary="b"))
    with pytest.raises(RefusedError, match="nothing found"):
        scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(1))
