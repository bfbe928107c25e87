"""Profiles add up weighted scores; the scheduler runs what the profile handler asks for."""

import math
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

import pytest

from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.plugins.pickers import MaxScorePicker
from picker.plugins.profile_handlers.one_profile import SingleProfileHandler
from picker.scheduling.scheduler import Profile, Scheduler
from picker.types import (
    Api,
    Candidate,
    Candidates,
    Endpoint,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    SchedulingResult,
)

REQUEST = InferenceRequest("r", {}, ParsedBody(Api.RAW), "m", "m")
CANDIDATES = [Candidate(Endpoint(name, "10.0.0.1", 8000)) for name in "abc"]


class Fixed:
    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return self.scores[: len(candidates)]


class Broken(Fixed):
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        raise ZeroDivisionError


class Keep:
    def __init__(self, names: str) -> None:
        self.names, self.calls = names, 0

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        self.calls += 1
        return [candidate for candidate in candidates if candidate.endpoint.name in self.names]


def profile(name: str, *filters: Keep, scorers: Mapping[Fixed, float] | None = None) -> Profile:
    return Profile(
        name,
        BoundPlugin(MaxScorePicker(), "Picker", "best", profile=name),
        [BoundPlugin(one, "Filter", f"only {one.names}", profile=name) for one in filters],
        [
            BoundPlugin(one, "Scorer", f"weighs {weight}", profile=name, weight=weight)
            for one, weight in (scorers or {}).items()
        ],
    )


def ticking() -> PluginSteps:
    return PluginSteps(map(float, count()).__next__)


def scheduler_of(handler: Any, *profiles: Profile) -> Scheduler:
    bound = BoundPlugin(handler, "ProfilePicker", "handler")
    return Scheduler(profiles, bound, bound)


def schedule(
    scheduler: Scheduler, seed: int = 1, candidates: Candidates = CANDIDATES
) -> SchedulingResult:
    return scheduler.schedule(REQUEST, candidates, Attributes(), Random(seed), ticking())


def run(one: Profile, steps: PluginSteps | None = None) -> ProfileResult:
    return one.run(
        REQUEST, CANDIDATES, Attributes(), Random(1), ticking() if steps is None else steps
    )


def test_a_total_is_the_sum_of_clamped_scores_times_weights() -> None:
    scorers = {
        Fixed(0.5, 2.0, -1.0): 2.0,
        Fixed(math.nan, 0.25, 1.0): 3.0,
        Fixed(1.0, 0.0, 0.0): -1.0,
    }
    result = run(profile("p", scorers=scorers))
    assert [scored.score for scored in result.scored] == [0.0, 2.75, 3.0]
    assert [scored.candidate.endpoint.name for scored in result.picked] == ["c"]


def test_filters_narrow_in_order_and_stop_when_nothing_is_left() -> None:
    narrow, nothing, never = Keep("ab"), Keep(""), Keep("abc")
    assert len(run(profile("p", narrow)).scored) == 2
    with pytest.raises(RefusedError) as refusal:
        run(profile("p", narrow, nothing, never))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    assert refusal.value.drop_reason is DropReason.SATURATED
    assert never.calls == 0


def test_equal_seeds_decide_equally() -> None:
    """A decision is a function of its arguments."""
    scheduler = scheduler_of(SingleProfileHandler(), profile("p"))

    def decide(seed: int) -> str:
        return schedule(scheduler, seed).endpoints[0].name

    assert [decide(seed) for seed in range(20)] == [decide(seed) for seed in range(20)]
    assert len({decide(seed) for seed in range(20)}) == 3


def test_no_candidates_is_a_503() -> None:
    scheduler = scheduler_of(SingleProfileHandler(), profile("p"))
    with pytest.raises(RefusedError) as refusal:
        schedule(scheduler, candidates=[])
    assert refusal.value.status == 503
    assert refusal.value.drop_reason is DropReason.NO_ENDPOINTS


class Ask:
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
    first, second = Keep(""), Keep("b")
    handler = Ask(["a"], ["b", "a"], ["a", "nonsense"])
    scheduler = scheduler_of(handler, profile("a", first), profile("b", second))
    result = schedule(scheduler)
    assert [endpoint.name for endpoint in result.endpoints] == ["b"]
    assert (first.calls, second.calls) == (1, 1)
    assert list(scheduler.profiles) == ["a", "b"]


def test_a_typed_refusal_of_a_profile_is_the_answer_when_there_is_no_result() -> None:
    scheduler = scheduler_of(Ask(["b"]), profile("b", Keep("")))
    with pytest.raises(RefusedError, match="filters leave no endpoint") as refusal:
        schedule(scheduler)
    assert refusal.value.status == 429


def test_no_profile_at_all_is_a_429() -> None:
    scheduler = scheduler_of(Ask(["nonsense"]), profile("b"))
    with pytest.raises(RefusedError, match="no scheduling profile ran"):
        schedule(scheduler)


def test_the_handlers_own_refusal_stands_when_every_profile_ran() -> None:
    scheduler = scheduler_of(Ask(["a"], primary="b"), profile("a"))
    with pytest.raises(RefusedError, match="nothing found"):
        schedule(scheduler)


def test_each_call_of_a_plugin_is_a_step() -> None:
    steps = ticking()
    narrow, scorer = Keep("ab"), Fixed(0.5, 0.25)
    run(profile("p", narrow, scorers={scorer: 2.0}), steps)
    assert [(one.bound.name, one.at, one.seconds) for one in steps] == [
        ("only ab", 1.0, 1.0),
        ("weighs 2.0", 3.0, 1.0),
        ("best", 5.0, 1.0),
    ]
    assert steps[0].said == CANDIDATES[:2]
    assert steps[1].said == (0.5, 0.25)
    failed = ticking()
    with pytest.raises(ZeroDivisionError):
        run(profile("p", scorers={Broken(): 1.0}), failed)
    assert [type(one.said) for one in failed] == [ZeroDivisionError]


def test_a_handler_of_a_single_profile_is_asked_once() -> None:
    """It could only say that it wants no other profile."""
    steps = ticking()
    scheduler = scheduler_of(SingleProfileHandler(), profile("p"))
    scheduler.schedule(REQUEST, CANDIDATES, Attributes(), Random(1), steps)
    assert [one.bound.name for one in steps] == ["handler", "best", "handler"]
