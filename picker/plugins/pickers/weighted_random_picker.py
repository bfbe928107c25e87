"""weighted-random-picker: endpoints drawn with probability proportional to their score.

A-Res sampling (Efraimidis and Spirakis, 2006): each endpoint gets the key U^(1/score), U uniform in
(0, 1]; the `maxNumOfEndpoints` (1) largest keys win. A score of zero or less has key 0, so such
endpoints only fill up the tail of a longer list. When no score is positive, all are equal and the
draw is uniform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from picker.framework.registry import PluginType, configured
from picker.plugins.pickers.max_score_picker import PickerParameters
from picker.types import ScoredEndpoint


class WeightedRandomPicker:
    """Picks at random in proportion to the score. Stateless."""

    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """Distinct endpoints, the largest key first; keys of zero in random order."""
        shuffled = rng.sample(scored, len(scored))
        keys = {id(endpoint): _log_key(endpoint.score, rng) for endpoint in shuffled}
        shuffled.sort(key=lambda endpoint: -keys[id(endpoint)])
        return shuffled[: self._max_endpoints]


def _log_key(score: float, rng: Random) -> float:
    # The logarithm of the key: same order, and small scores do not underflow to equal keys.
    return math.log(1.0 - rng.random()) / score if score > 0.0 else -math.inf


PLUGIN = PluginType("weighted-random-picker", PickerParameters, configured(WeightedRandomPicker))
