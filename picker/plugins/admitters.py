"""Admitters: refuse requests after the producers ran, before scheduling (`Admitter`).

probabilistic-admitter: reject sheddable requests, the likelier the fuller the pool. A request of a
priority below 0 is refused (429) with the probability

    min(s ^ power · k, 1)
    s = mean over endpoints of max(q / queueDepthThreshold, kv / kvCacheUtilThreshold)

so that shedding begins long before the pool is full. `q` is defined by queue-scorer. An endpoint
counts with the signals that its page has, and as full (1.0) without any or while its load is
unknown. (The reference wraps this refusal in a 500.)
"""

import math
from random import Random

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.registry import (
    NonNegativeFloat,
    Parameters,
    PluginType,
    PositiveFloat,
    PositiveShare,
)
from picker.plugins._shared.load_signals import waiting_requests
from picker.types import Candidate, Candidates, InferenceRequest

FULL = 1.0


class ProbabilisticAdmitter(Parameters, frozen=True):
    queue_depth_threshold: PositiveFloat = 5.0
    kv_cache_util_threshold: PositiveShare = 0.8
    power: PositiveFloat = 5.0
    k: NonNegativeFloat = 300.0

    def admit(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> None:
        if request.priority >= 0 or not candidates:
            return
        if rng.random() < self.refusal_probability(candidates):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                "the pool is filling up, and requests of negative priority are shed",
                DropReason.SATURATED,
            )

    def refusal_probability(self, candidates: Candidates) -> float:
        """Return the probability by the module's formula; `candidates` must not be empty."""
        fullness = sum(map(self._fullness, candidates)) / len(candidates)
        try:
            return min(math.pow(fullness, self.power) * self.k, 1.0)
        except OverflowError:  # a fullness far above 1: the power is infinite, k may be 0
            return min(self.k, 1.0)

    def _fullness(self, candidate: Candidate) -> float:
        metrics, waiting = candidate.metrics, waiting_requests(candidate)
        usage = None if metrics is None else metrics.kv_cache_usage
        if waiting is None and usage is None:
            return FULL
        return max(
            (waiting or 0) / self.queue_depth_threshold,
            (usage or 0.0) / self.kv_cache_util_threshold,
        )


PLUGINS = (PluginType("probabilistic-admitter", ProbabilisticAdmitter),)
