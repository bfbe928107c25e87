"""random-picker: endpoints drawn uniformly, whatever their scores.

The first `maxNumOfEndpoints` (1) of a random order are picked. Values below one count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from picker.framework.registry import PluginType, configured
from picker.plugins.pickers.max_score_picker import PickerParameters
from picker.types import ScoredEndpoint


class RandomPicker:
    """Picks uniformly at random. Stateless."""

    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """Distinct endpoints in random order."""
        return rng.sample(scored, min(self._max_endpoints, len(scored)))


PLUGIN = PluginType("random-picker", PickerParameters, configured(RandomPicker))
