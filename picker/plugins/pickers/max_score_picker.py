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
        if self._max_endpoints == 1:
            return _best(scored, rng)
        shuffled = rng.sample(scored, len(scored))
        shuffled.sort(key=lambda endpoint: -endpoint.score)
        return shuffled[: self._max_endpoints]


def _best(scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
    """One of the best, none of none: same distribution as sorting all, without sorting all."""
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


PLUGIN = PluginType("max-score-picker", PickerParameters, configured(MaxScorePicker))
