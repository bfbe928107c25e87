"""queue-scorer: prefer short queues.

    score = (max − q) / (max − min)        over the candidates; 1.0 when all queues are equal

`q` is the number of requests waiting at the endpoint as far as this picker can know: what the last
scrape reported, but at least what this picker itself has under way there beyond what the scrape saw
running, `max(waiting, inflight − running)`. So a burst that arrives between two scrapes spreads
although no scrape has seen it yet.

An endpoint whose load is unknown (never scraped, or scrapes went stale) scores 0.0, like the worst
of the candidates, and does not take part in min and max: unknown is not idle. It stays usable, as
other scorers may still favour it. When no candidate's load is known, own in-flight counts are all
there is: q = inflight for every one. Where a page lacks this series alone, its endpoint has the
mean of the queues that the others report, and at least `inflight − running`.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins._shared.load_signals import least_first, waiting_loads
from picker.types import Candidates, InferenceRequest


class QueueScorer:
    """Scores by relative queue length. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return least_first(waiting_loads(candidates))


PLUGIN = PluginType("queue-scorer", Parameters, plain(QueueScorer))
