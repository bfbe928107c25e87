"""multicluster-queue-scorer: prefer pools of other clusters with short queues.

    score = (max − q) / (max − min)        over the candidates; 1.0 when all are equal

An endpoint stands for a whole pool here; `q` is its attribute `llm-d.ai/multicluster-queue-size`,
the average queue that the picker of that pool reports. A pool that reports its KV cache, but not
its queue, has the mean of the others; one that reports neither scores 0.0 and does not take part in
min and max.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, plain
from picker.plugins._shared.load_signals import least_first, with_neutral
from picker.scheduling.endpoint_attributes import (
    MULTICLUSTER_METRICS,
    MULTICLUSTER_QUEUE_SIZE,
    attribute_number,
    pools_unknown,
)
from picker.types import Candidates, InferenceRequest


class MulticlusterQueueScorer:
    """Scores pools by relative queue length. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        queues = [
            attribute_number(candidate, MULTICLUSTER_QUEUE_SIZE, MULTICLUSTER_METRICS)
            for candidate in candidates
        ]
        return least_first(with_neutral(queues, pools_unknown(candidates)))


PLUGIN = PluginType(
    "multicluster-queue-scorer",
    Parameters,
    plain(MulticlusterQueueScorer),
    stability=Stability.ALPHA,
)
