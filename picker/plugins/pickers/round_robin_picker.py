"""round-robin-picker: endpoints in turn, whatever their scores.

The endpoint that was picked longest ago, one that never was before all others; behind it, for
`maxNumOfEndpoints` (1) of more than one, those whose turn is next. Values below one count as one.
While the candidates stay the same, no endpoint is picked more than once more than another. An
endpoint that a filter leaves out is next when it is back. The first round is in random order, so
that replicas of the picker do not go round in step. Endpoints that leave or restart are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from picker.framework.registry import PluginType, configured
from picker.plugins.pickers.max_score_picker import PickerParameters
from picker.types import ScoredEndpoint


class RoundRobinPicker:
    """Sole owner of the number of each endpoint's last turn."""

    def __init__(self, parameters: PickerParameters) -> None:
        self._max_endpoints = parameters.max_num_of_endpoints
        self._turns: dict[str, int] = {}
        self._turn = 0

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """Those whose turn it is, in turn. The first one has had its turn then."""
        in_turn = rng.sample(scored, len(scored))
        in_turn.sort(key=lambda one: self._turns.get(one.candidate.key, 0))
        if in_turn:
            self._turn += 1
            self._turns[in_turn[0].candidate.key] = self._turn
        return in_turn[: self._max_endpoints]

    def endpoint_removed(self, key: str) -> None:
        """Forget the endpoint's turns."""
        self._turns.pop(key, None)


PLUGIN = PluginType("round-robin-picker", PickerParameters, configured(RoundRobinPicker))
