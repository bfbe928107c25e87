"""running-requests-size-scorer: prefer endpoints that run few requests.

    score = (max − r) / (max − min)        over the candidates; 1.0 when all are equal

`r` is what the last scrape saw running, but at least what this picker itself has under way there
beyond what the scrape saw waiting, `max(running, inflight − waiting)`. Unknown load scores 0.0 and
does not take part in min and max; when no candidate's load is known, r = inflight for every one.
Where a page lacks this series alone, its endpoint has the mean of what the others report, and at
least `inflight − waiting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins._shared.load_signals import least_first, running_loads
from picker.types import Candidates, InferenceRequest


class RunningRequestsSizeScorer:
    """Scores by the relative number of running requests. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return least_first(running_loads(candidates))


PLUGIN = PluginType("running-requests-size-scorer", Parameters, plain(RunningRequestsSizeScorer))
