"""softmax-picker: endpoints drawn with a probability that grows exponentially with the score.

    p ∝ exp((score − best) / ((best − worst) · temperature))

The span of the scores is divided out, so `temperature` (0.0) does not depend on weights: at 1 the
best endpoint is e times as likely as the worst. At 0 the best one is picked, ties at random. The
first `maxNumOfEndpoints` (1) are drawn one after the other, without putting back. Values below one
count as one. Source: NVIDIA Dynamo's KV router, `--router-temperature`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from picker.framework.registry import NonNegativeFloat, PluginType, configured
from picker.plugins.pickers.max_score_picker import MaxScorePicker, PickerParameters
from picker.types import ScoredEndpoint


class SoftmaxParameters(PickerParameters, frozen=True):
    temperature: NonNegativeFloat = 0.0


class SoftmaxPicker:
    """Picks at random by the softmax of the scores. Stateless."""

    def __init__(self, parameters: SoftmaxParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints
        self._temperature = parameters.temperature
        self._best = MaxScorePicker(parameters)

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """Distinct endpoints in the order in which they were drawn."""
        if not self._temperature or len(scored) < 2:
            return self._best.pick(scored, rng)
        scores = [one.score for one in scored]
        best, span = max(scores), max(scores) - min(scores)
        # The largest of a logarithm of p and Gumbel noise is a draw from the softmax (Gumbel-max),
        # the next largest a draw from the rest.
        keys = [
            ((score - best) / span / self._temperature if span else 0.0) + _gumbel(rng)
            for score in scores
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        return [scored[index] for index in order[: self._max_endpoints]]


def _gumbel(rng: Random) -> float:
    return -math.log(rng.expovariate(1.0) or math.ulp(0.0))


PLUGIN = PluginType("softmax-picker", SoftmaxParameters, configured(SoftmaxPicker))
