"""power-of-two-picker: of two endpoints drawn at random, the better one.

    better = higher score; with equal scores fewer of this picker's own requests in flight

Equal ones: the one drawn first. So without scorers, load alone decides. For `maxNumOfEndpoints` (1)
of more than one, the rest is drawn from again. Values below one count as one. Source: Mitzenmacher,
"The Power of Two Choices in Randomized Load Balancing", 2001; `power_of_two` of sglang-router.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from picker.framework.registry import PluginType, configured
from picker.plugins.pickers.max_score_picker import PickerParameters
from picker.types import ScoredEndpoint


class PowerOfTwoPicker:
    """Picks the better one of two. Stateless."""

    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """The better one of each pair, in the order in which they were drawn."""
        left = list(range(len(scored)))
        picked: list[ScoredEndpoint] = []
        while left and len(picked) < self._max_endpoints:
            drawn = rng.sample(left, min(2, len(left)))
            best = max(drawn, key=lambda index: _rank(scored[index]))
            left.remove(best)
            picked.append(scored[best])
        return picked


def _rank(one: ScoredEndpoint) -> tuple[float, int]:
    return one.score, -one.candidate.inflight_requests


PLUGIN = PluginType("power-of-two-picker", PickerParameters, configured(PowerOfTwoPicker))
