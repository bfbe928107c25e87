# Apart: a model of its own, with tests of its own.
"""An online model of one latency: an expected value and its p90, from features of load and request.

Theory of operation. The expectation is linear in the features, times a factor of the endpoint:

    ŷ = max(x · θ, floor) · f(endpoint)

θ comes from recursive least squares of y / f with forgetting (λ = 0.998), where a sample weighs
1 / max(y, ŷ)²: errors count in relation to the latency, and none counts for more than 1. f is the
smoothed ratio of what an endpoint takes to what θ says, drawn towards 1 while there are few
samples: the engines of a pool may be of different speed. The p90 is ŷ times the 90th percentile of
y / ŷ over the last 256 samples, with the conformal correction ⌈0.9 (n + 1)⌉ / n, so that it covers
90 % of what follows as long as errors stay alike, whatever their distribution.

There is no prediction before 50 samples. When the errors of the last 16 or so samples are twice
those of the last 256 or so, the law has changed: θ is scaled by what the recent ratios have in
common and is a mere guess from then on; ratios and factors begin anew.

All pure; a prediction for eight endpoints takes some 10 µs, and so does learning a sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIN_SAMPLES = 50
PERCENTILE = 0.9
WINDOW = 256
FORGETTING = 0.998
PRIOR = 1e8  # variance of a weight that nothing is known of: some 10 s for features around 1
FLOOR = 0.02  # of the mean: the least that is ever predicted
RECENT, LASTING = 1 / 16, 1 / 256
DRIFT_RATIO, DRIFT_MARGIN = 2.0, 0.1
SETTLED = 64  # samples until errors are held against each other
# By which variances grow when the law has changed: 500 samples count as a tenth of one after it.
DOUBT = 5000.0
PULL, SLOWEST = 20, 1 / 200  # of the factors of endpoints: samples until they count; least step
MOST_MODELS = 128  # clients name models; those that an endpoint serves are learned
FRESH = 8  # samples between two looks at the percentile


class LatencyModel:
    """Learns one latency of one model. Owns weights, ratios and factors."""

    def __init__(self, num_features: int) -> None:
        self._weights = np.zeros(num_features)
        self._covariance = np.eye(num_features) * PRIOR
        self._ratios: deque[float] = deque(maxlen=WINDOW)  # logarithms of y / ŷ
        self._factors: dict[str, float] = {}  # by endpoint
        self._counts: dict[str, int] = {}  # samples of each factor
        self._said = [0.0] * num_features  # the weights once more: NumPy is slow with a few numbers
        self.p90_factor = 1.0  # of the expectation, to be the p90
        self._recent = self._lasting = 0.0  # errors
        self._common = 0.0  # what ratios of all endpoints have in common, until θ has learned it
        self._mean = 0.0
        self._since = 0  # samples since the law last changed
        self.num_samples = 0

    def predict(
        self, rows: Sequence[Sequence[float]], endpoints: Sequence[str]
    ) -> Sequence[float] | None:
        """The expectation for each row of features, at the endpoint of the same place, in the unit
        that was learned; None before there are enough samples.
        """
        if self.num_samples < MIN_SAMPLES:
            return None
        weights, floor, factors = self._said, FLOOR * self._mean, self._factors
        return [
            max(sum(map(mul, row, weights)), floor) * factors.get(endpoint, 1.0)
            for row, endpoint in zip(rows, endpoints, strict=True)
        ]

    def learn(self, row: Sequence[float], endpoint: str, latency: float) -> bool:
        """Take a sample in; whether it shows that the law has changed.

        A latency that is not positive and finite is none.
        """
        if not 0.0 < latency < math.inf:
            return False
        factor = self._factors.get(endpoint, 1.0)
        base = sum(map(mul, row, self._said))
        self.num_samples += 1
        self._since += 1
        self._mean += (latency - self._mean) * max(LASTING, 1 / self.num_samples)
        expected = max(base, FLOOR * self._mean) * factor
        self._fit(np.array(row), latency / factor, base)
        if self._since <= len(row):  # too few for an error to say anything
            return False
        ratio = math.log(latency / expected)
        count = self._counts.get(endpoint, 0)
        step = max(SLOWEST, 1 / (count + PULL))
        self._common += RECENT * (ratio - self._common)
        self._factors[endpoint] = factor * math.exp(step * (ratio - self._common))
        self._counts[endpoint] = count + 1
        self._ratios.append(ratio)
        if self._since % FRESH == 0:
            ordered = sorted(self._ratios)
            rank = min(len(ordered), math.ceil(PERCENTILE * (len(ordered) + 1)))
            self.p90_factor = math.exp(ordered[rank - 1])
        return self._watch(abs(ratio))

    def forget(self, endpoint: str) -> None:
        """Begin anew with this endpoint."""
        self._factors.pop(endpoint, None)
        self._counts.pop(endpoint, None)

    def _fit(self, x: npt.NDArray[np.float64], target: float, base: float) -> None:
        """A step of recursive least squares."""
        scale = max(target, base)
        gain = self._covariance @ x
        gain /= FORGETTING * scale * scale + float(x @ gain)
        self._weights += gain * (target - base)
        self._said = self._weights.tolist()
        covariance = self._covariance
        covariance -= np.outer(gain, x @ covariance)
        # Directions that no sample speaks of would grow without end.
        if float(covariance.trace()) < PRIOR * len(x):
            covariance /= FORGETTING

    def _watch(self, error: float) -> bool:
        """Follow the errors; whether the law has changed."""
        seen = len(self._ratios)
        self._recent += (error - self._recent) * max(RECENT, 1 / seen)
        self._lasting += (error - self._lasting) * max(LASTING, 1 / seen)
        if seen < SETTLED or self._recent < DRIFT_RATIO * self._lasting + DRIFT_MARGIN:
            return False
        self._weights *= math.exp(self._common)
        self._said = self._weights.tolist()
        self._covariance *= DOUBT
        self._common, self._since = 0.0, 0
        self._ratios.clear()
        self._factors.clear()
        self._counts.clear()
        return True


class Moment(NamedTuple):
    """A request, and the load of an endpoint when it goes there.

    `pending_tokens` are prompt tokens, not cached, of requests there that this picker has sent and
    that have no first token yet; `limit` the most tokens the answer may have, 0 where that does not
    matter or is unknown.
    """

    prompt_tokens: int
    cached_tokens: int
    pending_tokens: int
    waiting: int
    running: int
    kv_usage: float
    limit: int = 0

    def to_first_token(self) -> tuple[float, ...]:
        """Features of the time to the first token, or to the whole answer: of order 1."""
        prompt, uncached = self.prompt_tokens / 1024, self.uncached_tokens / 1024
        running, limit = self.running / 8, self.limit / 256
        return (
            1.0,
            uncached,
            uncached * prompt / 8,
            uncached * running,
            self.cached_tokens / 1024,
            self.pending_tokens / 1024,
            self.waiting / 8,
            running,
            self.kv_usage,
            limit,
            limit * running,
        )

    def per_token(self) -> tuple[float, ...]:
        """Features of the time between two tokens."""
        return (1.0, self.running / 8, self.kv_usage, self.pending_tokens / 1024, self.waiting / 8)

    @property
    def uncached_tokens(self) -> int:
        """What has to be computed before the first token."""
        return max(0, self.prompt_tokens - self.cached_tokens)


class Latency(Enum):
    """What is learned of a model, each on its own."""

    FIRST_TOKEN = "ttft"  # of an answer that streams
    WHOLE = "whole"  # to the end of one that does not: the client sees nothing of it before
    PER_TOKEN = "tpot"


class LatencyModels:
    """The models by what the endpoints are asked for. Owns the latest `MOST_MODELS` of them."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, Latency], LatencyModel] = {}

    def get(self, model: str, latency: Latency) -> LatencyModel | None:
        """None while nothing was learned of it."""
        return self._models.get((model, latency))

    def learning(self, model: str, latency: Latency, num_features: int) -> LatencyModel:
        """The model that is to learn a sample."""
        known = self._models.get((model, latency))
        if known is None:
            if len(self._models) >= MOST_MODELS:
                del self._models[next(iter(self._models))]
            known = self._models[model, latency] = LatencyModel(num_features)
        return known

    def forget(self, endpoint: str) -> None:
        """The endpoint left; another one of its name may be of another speed."""
        for one in self._models.values():
            one.forget(endpoint)
