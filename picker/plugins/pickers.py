"""Pickers: the choice among scored candidates (`PickerPlugin`).

Each picks `maxNumOfEndpoints` endpoints; values below one count as one.

max-score-picker: the endpoints with the highest totals. Equal scores are in random order.

random-picker: endpoints drawn uniformly, whatever their scores.

round-robin-picker: endpoints in turn, whatever their scores. The first is the endpoint that was
picked longest ago, or never; so an endpoint that a filter left out is next when it is back. The
first round is in random order, so that replicas of the picker do not run in step.

weighted-random-picker: endpoints drawn in proportion to their score. A-Res sampling (Efraimidis and
Spirakis, 2006): each endpoint gets the key U^(1/score), U uniform in (0, 1]; the largest keys win.
A score of zero or less has key 0, so such endpoints only fill the end of a longer list. When no
score is positive, the draw is uniform.

softmax-picker: endpoints drawn with a probability that grows exponentially with the score.

    p ∝ exp((score − best) / ((best − worst) · temperature))

The span of the scores is divided out, so `temperature` does not depend on weights: at 1 the best
endpoint is e times as likely as the worst; at 0 the best one is picked, or one of equal ones at
random. Source: NVIDIA Dynamo's KV router, `--router-temperature`.

power-of-two-picker: of two endpoints drawn at random, the better one.

    better = higher score; with equal scores fewer of this picker's own requests in flight

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001; `power_of_two`
of sglang-router.
"""

import math
from collections.abc import Sequence
from random import Random

import msgspec

from picker.framework.registry import NonNegativeFloat, Parameters, PluginType
from picker.types import ScoredCandidates, ScoredEndpoint


class PickerParameters(Parameters, frozen=True):
    max_num_of_endpoints: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_of_endpoints < 1:
            msgspec.structs.force_setattr(self, "max_num_of_endpoints", 1)


class MaxScorePicker(PickerParameters, frozen=True):
    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        if self.max_num_of_endpoints > 1:
            shuffled = rng.sample(scored, len(scored))
            shuffled.sort(key=lambda endpoint: -endpoint.score)
            return shuffled[: self.max_num_of_endpoints]
        # One endpoint, the common case: the distribution of a complete sort without its cost.
        if isinstance(scored, ScoredCandidates):
            candidates, totals = scored.candidates, scored.totals
        else:
            candidates = [one.candidate for one in scored]
            totals = [one.score for one in scored]
        if not totals:
            return ()
        best = max(totals)
        index = totals.index(best)
        if totals.count(best) > 1:
            index = rng.choice([i for i, total in enumerate(totals) if total == best])
        return (ScoredEndpoint(candidates[index], best),)


class RandomPicker(PickerParameters, frozen=True):
    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        return rng.sample(scored, min(self.max_num_of_endpoints, len(scored)))


class RoundRobinPicker:
    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints
        self._turns: dict[str, int] = {}
        self._turn = 0

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        # The shuffle decides among endpoints that never had a turn; the sort is stable.
        in_turn = rng.sample(scored, len(scored))
        in_turn.sort(key=lambda one: self._turns.get(one.candidate.key, 0))
        if in_turn:
            self._turn += 1
            self._turns[in_turn[0].candidate.key] = self._turn
        return in_turn[: self._max_endpoints]

    def endpoint_removed(self, key: str) -> None:
        self._turns.pop(key, None)


class WeightedRandomPicker(PickerParameters, frozen=True):
    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        shuffled = rng.sample(scored, len(scored))
        keys = {id(endpoint): _log_key(endpoint.score, rng) for endpoint in shuffled}
        shuffled.sort(key=lambda endpoint: -keys[id(endpoint)])
        return shuffled[: self.max_num_of_endpoints]


def _log_key(score: float, rng: Random) -> float:
    # The logarithm of the key: same order, and small scores do not underflow to equal keys.
    return math.log(1.0 - rng.random()) / score if score > 0.0 else -math.inf


class SoftmaxPicker(MaxScorePicker, frozen=True):
    temperature: NonNegativeFloat = 0.0

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        if not self.temperature or len(scored) < 2:
            return super().pick(scored, rng)
        scores = [one.score for one in scored]
        best, span = max(scores), max(scores) - min(scores)
        # The largest of a logarithm of p and Gumbel noise is a draw from the softmax (Gumbel-max),
        # the next largest a draw from the rest.
        keys = [
            ((score - best) / span / self.temperature if span else 0.0) + _gumbel(rng)
            for score in scores
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        return [scored[index] for index in order[: self.max_num_of_endpoints]]


def _gumbel(rng: Random) -> float:
    return -math.log(rng.expovariate(1.0) or math.ulp(0.0))  # `expovariate` may return 0


class PowerOfTwoPicker(PickerParameters, frozen=True):
    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        left = list(range(len(scored)))
        picked: list[ScoredEndpoint] = []
        while left and len(picked) < self.max_num_of_endpoints:
            drawn = rng.sample(left, min(2, len(left)))
            best = max(drawn, key=lambda index: _rank(scored[index]))
            left.remove(best)
            picked.append(scored[best])
        return picked


def _rank(one: ScoredEndpoint) -> tuple[float, int]:
    return one.score, -one.candidate.inflight_requests


PLUGINS = (
    PluginType("max-score-picker", MaxScorePicker),
    PluginType("random-picker", RandomPicker),
    PluginType("round-robin-picker", RoundRobinPicker),
    PluginType("weighted-random-picker", WeightedRandomPicker),
    PluginType("softmax-picker", SoftmaxPicker),
    PluginType("power-of-two-picker", PowerOfTwoPicker),
)
