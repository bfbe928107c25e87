"""queue-scorer: prefer short queues.

    score = (max − q) / (max − min)        over the candidates; 1.0 when all queues are equal

`q` is the number of requests waiting at the endpoint as far as this picker can know: what the last
scrape reported, but at least what this picker itself has under way there beyond what the scrape saw
running, `max(waiting, inflight − running)`. So a burst that arrives between two scrapes spreads
although no scrape has seen it yet.

An endpoint whose load is unknown (never scraped, or scrapes went stale) scores 0.0, like the worst
of the candidates, and does not take part in min and max: unknown is not idle. It stays usable, as
other scorers may still favour it. When no candidate's load is known, own in-flight counts are all
there is: q = inflight for every one.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType
from picker.types import Candidate, InferenceRequest


class QueueScorer:
    """Scores by relative queue length. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """One score per candidate; see the module's formula."""
        queues = [_queue(candidate) for candidate in candidates]
        known = [queue for queue in queues if queue is not None]
        if not known:
            queues = [candidate.inflight_requests for candidate in candidates]
            known = [candidate.inflight_requests for candidate in candidates]
        longest, shortest = max(known, default=0), min(known, default=0)
        if longest == shortest:
            return [0.0 if queue is None else 1.0 for queue in queues]
        span = longest - shortest
        return [0.0 if queue is None else (longest - queue) / span for queue in queues]


def _queue(candidate: Candidate) -> int | None:
    metrics = candidate.metrics
    if metrics is None:
        return None
    return max(metrics.waiting_requests, candidate.inflight_requests - metrics.running_requests)


PLUGIN = PluginType("queue-scorer", Parameters, lambda _name, _parameters, _services: QueueScorer())
