"""max-score-picker: the endpoints with the highest totals.

Order: score descending, equal scores in random order; the first `maxNumOfEndpoints` (1) are
picked. Values below one count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from picker.framework.registry import Parameters, PluginType, configured
from picker.types import ScoredCandidates, ScoredEndpoint


class PickerParameters(Parameters, frozen=True):
    max_num_of_endpoints: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_of_endpoints < 1:
            msgspec.structs.force_setattr(self, "max_num_of_endpoints", 1)


class MaxScorePicker:
    """Picks by score, ties at random. Stateless."""

    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """The best ones, best first."""
        if self._max_endpoints == 1 and (totals := _totals(scored)):
            # Same distribution as sorting all, without sorting all.
            best = max(totals)
            if totals.count(best) == 1:
                return (scored[totals.index(best)],)
            return (scored[rng.choice([i for i, total in enumerate(totals) if total == best])],)
        shuffled = rng.sample(scored, len(scored))
        shuffled.sort(key=lambda endpoint: -endpoint.score)
        return shuffled[: self._max_endpoints]


def _totals(scored: Sequence[ScoredEndpoint]) -> Sequence[float]:
    if isinstance(scored, ScoredCandidates):
        return scored.totals
    return [endpoint.score for endpoint in scored]


PLUGIN = PluginType("max-score-picker", PickerParameters, configured(MaxScorePicker))
