"""load-aware-scorer: prefer endpoints without a queue, up to a threshold.

    score = 0.5                              when nothing waits
            0.5 · (1 − min(q, T) / T)        else, with T = `threshold` (128; ≤ 0 means 128)

`q` is the number of waiting requests as in queue-scorer, own requests that no scrape has seen
included. Unknown load scores 0.0, like a full queue; when no candidate's load is known, q =
inflight for every one. As there, q is the mean of the others where a page lacks the queue alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, configured
from picker.plugins._shared.load_signals import waiting_loads
from picker.types import Candidates, InferenceRequest

DEFAULT_THRESHOLD = 128
BEST = 0.5


class LoadAwareParameters(Parameters, frozen=True):
    threshold: int = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold <= 0:
            msgspec.structs.force_setattr(self, "threshold", DEFAULT_THRESHOLD)


class LoadAwareScorer:
    """Scores by queue length against a fixed threshold. Stateless."""

    def __init__(self, parameters: LoadAwareParameters) -> None:
        self._threshold = parameters.threshold

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        limit = self._threshold
        return [
            0.0 if queue is None else BEST * (1.0 - min(queue, limit) / limit)
            for queue in waiting_loads(candidates)
        ]


PLUGIN = PluginType("load-aware-scorer", LoadAwareParameters, configured(LoadAwareScorer))
