"""An online model of one latency: its expectation and its p90, by the request and the load.

Theory of operation. The expectation is linear in products of one feature of the request and one of
the endpoint's load, times a factor of the endpoint:

    ŷ = max(Σ θ · request · load, floor) · f(endpoint)

so that θ is folded with the request once for all endpoints. θ comes from recursive least squares of
y / f with forgetting (λ = 0.998), where a sample weighs 1 / max(y, ŷ)²: errors count relative to
the latency, and no error counts more than 1. f is the smoothed ratio of an endpoint's latencies to
those of θ, drawn towards 1 while there are few samples: the engines of a pool may differ in speed.
The p90 is ŷ times the 90th percentile of y / ŷ over the last 256 samples, with the conformal
correction ⌈0.9 (n + 1)⌉ / n, so that it covers 90 % of the next samples as long as errors stay
alike, whatever their distribution.

There is no prediction before 50 samples. The law that θ describes has changed when the errors of
about the last 16 samples are twice those of about the last 256, or when the recent ratios lean to
one side by five standard deviations of their mean: then θ is scaled by their common factor and
becomes a mere guess; ratios and factors start again.

The cost of a request at an endpoint is the time that all requests there lose by it: its own, and
the time that it adds to the R others that run or wait there,

    cost = TTFT + n · TPOT + R · (prompt + n · ∂TPOT/∂running)

where n is the number of tokens of its answer and `prompt` the time that its uncached tokens add to
TTFT, which is how long the others' next tokens wait. For a request that does not stream, the time
of the whole answer replaces both latencies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MIN_SAMPLES = 50
PERCENTILE = 0.9
WINDOW = 256
FORGETTING = 0.998
PRIOR = 1e8  # variance of an unknown weight: some 10 s for features around 1
FLOOR = 0.02  # of the mean: the least prediction
RECENT, LASTING = 1 / 16, 1 / 256
DRIFT_RATIO, BIAS_RATIO, DRIFT_MARGIN = 2.0, 0.8, 0.1
SETTLED = 64  # samples until errors are compared
# The growth of variances when the law has changed: 500 samples then count as a tenth of one.
DOUBT = 5000.0
PULL, SLOWEST = 20, 1 / 200  # of the factors of endpoints: samples until they count; least step
MAX_MODELS = 128  # clients name models; those that an endpoint serves are learned
REQUESTS_UNIT = 8  # of loads
FRESH = 8  # samples between two updates of the percentile


# Products of features: indexes of the request's and of the load's.
Terms: TypeAlias = tuple[tuple[int, int], ...]


class Request(NamedTuple):
    """Features of a request, scaled to about 1; `limit` is the token limit, 0 if irrelevant."""

    one: float
    prompt: float
    limit: float

    @classmethod
    def of(cls, prompt_tokens: int, limit_tokens: int = 0) -> Request:
        return cls(1.0, prompt_tokens / 1024, limit_tokens / 256)


class LoadFeatures(NamedTuple):
    """Features of an endpoint for one request, scaled to about 1.

    Prompts (the uncached and the cached part of this one, and the uncached parts of those that this
    picker sent there and that have no first token yet) are in units of 1024 tokens, waiting and
    running requests in units of 8 (`REQUESTS_UNIT`).
    """

    one: float
    uncached: float
    cached: float
    pending: float
    waiting: float
    running: float
    kv_usage: float
    uncached_running: float


_RUNNING = LoadFeatures._fields.index("running")


class Fitted(NamedTuple):
    """One latency of one request as a function of the load: weights folded with the request."""

    weights: Sequence[float]  # in the order of `LoadFeatures`
    floor: float
    factors: Mapping[str, float]  # by endpoint, 1 if absent
    p90_factor: float  # p90 / expectation

    def predict(self, loads: Mapping[str, LoadFeatures]) -> Sequence[float]:
        """Return the expectation at each endpoint, in the unit of the samples."""
        a, b, c, d, e, f, g, h = self.weights
        floor, get = self.floor, self.factors.get
        return [  # unrolled: three times as fast as a sum of products, for a thousand endpoints
            max(a * o + b * u + c * k + d * p + e * w + f * r + g * v + h * x, floor)
            * get(endpoint, 1.0)
            for endpoint, (o, u, k, p, w, r, v, x) in loads.items()
        ]


def costs_ms(
    loads: Mapping[str, LoadFeatures],
    own_ms: Sequence[float],
    first: Fitted,
    each: Fitted,
    num_tokens: float,
) -> Sequence[float]:
    """Return the cost at each endpoint, where the request itself takes `own_ms`. A whole answer
    counts as one token, and `first` and `each` are both its fit.
    """
    _, uncached, cached, _, _, _, _, uncached_running = first.weights
    uncached -= cached  # cached tokens have a cost, too
    token = num_tokens * max(0.0, each.weights[_RUNNING]) / REQUESTS_UNIT
    at_first, at_each = first.factors.get, each.factors.get
    costs = list[float]()
    for own, (endpoint, (_, u, _, _, w, r, _, x)) in zip(own_ms, loads.items(), strict=True):
        prompt = (uncached * u + uncached_running * x) * at_first(endpoint, 1.0)
        added = token * at_each(endpoint, 1.0)
        if prompt > 0.0:
            added += prompt
        costs.append(own + REQUESTS_UNIT * (r + w) * added)
    return costs


class LoadIntegral:
    """An endpoint's load over time, as integrals in seconds times the feature's unit."""

    __slots__ = ("_at", "_seconds", "_sums")

    def __init__(self, now_seconds: float) -> None:
        self._at = now_seconds
        self._seconds = 0.0
        self._sums = (0.0, 0.0, 0.0, 0.0)

    def until(self, now_seconds: float, load: LoadFeatures | None) -> tuple[float, ...]:
        """Advance and return the integrals; `load` is that since the last call, None if unknown."""
        seconds = now_seconds - self._at
        if load is not None and seconds > 0:
            pending, waiting, running, kv_usage = self._sums
            self._sums = (
                pending + seconds * load.pending,
                waiting + seconds * load.waiting,
                running + seconds * load.running,
                kv_usage + seconds * load.kv_usage,
            )
            self._seconds += seconds
            self._at = now_seconds
        return (self._seconds, *self._sums)


def mean_load(load: LoadFeatures, since: Sequence[float], until: Sequence[float]) -> LoadFeatures:
    """Return `load` with the means between two values of one `LoadIntegral`, where known."""
    seconds, *sums = (after - before for before, after in zip(since, until, strict=True))
    if seconds <= 0:
        return load
    pending, waiting, running, kv_usage = (one / seconds for one in sums)
    return load._replace(pending=pending, waiting=waiting, running=running, kv_usage=kv_usage)


class LatencyModel:
    """Learns one latency of one model."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._weights = np.zeros(len(terms))
        self._covariance = np.eye(len(terms)) * PRIOR
        self._ratios: deque[float] = deque(maxlen=WINDOW)  # logarithms of y / ŷ
        self._factors: dict[str, float] = {}  # by endpoint
        self._counts: dict[str, int] = {}  # samples of each factor
        self.p90_factor = 1.0  # p90 / expectation
        self._recent = self._lasting = 0.0  # errors
        self._common = 0.0  # the common factor of all endpoints' ratios, until θ has learned it
        self._mean = 0.0
        self._since = 0  # samples since the law last changed
        self.num_samples = 0

    def fitted(self, request: Request) -> Fitted | None:
        """Return the weights folded with a request; None before there are enough samples."""
        if self.num_samples < MIN_SAMPLES:
            return None
        folded = [0.0] * len(LoadFeatures._fields)
        for (i, j), weight in zip(self._terms, self._weights.tolist(), strict=True):
            folded[j] += request[i] * weight
        floor = FLOOR * self._mean
        return Fitted(folded, floor, self._factors, self.p90_factor)

    def learn(self, request: Request, load: LoadFeatures, endpoint: str, latency: float) -> bool:
        """Learn the sample if it is positive and finite; return whether the law has changed."""
        if not 0.0 < latency < math.inf:
            return False
        x = np.array([request[i] * load[j] for i, j in self._terms])
        base = float(x @ self._weights)
        factor = self._factors.get(endpoint, 1.0)
        self.num_samples += 1
        self._since += 1
        self._mean += (latency - self._mean) * max(LASTING, 1 / self.num_samples)
        expected = max(base, FLOOR * self._mean) * factor
        self._fit(x, latency / factor, base)
        if self._since <= len(x):  # too few for a meaningful error
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
        self._factors.pop(endpoint, None)
        self._counts.pop(endpoint, None)

    def _fit(self, x: npt.NDArray[np.float64], target: float, base: float) -> None:
        """Take a step of recursive least squares."""
        scale = max(target, base)
        gain = self._covariance @ x
        gain /= FORGETTING * scale * scale + float(x @ gain)
        self._weights += gain * (target - base)
        covariance = self._covariance
        covariance -= np.outer(gain, x @ covariance)
        covariance /= FORGETTING
        # Directions without samples would grow without bound.
        largest = float(np.diagonal(covariance).max())
        if largest > PRIOR:
            room = np.sqrt(np.minimum(1.0, PRIOR / np.diagonal(covariance)))
            covariance *= np.outer(room, room)

    def _watch(self, error: float) -> bool:
        """Track the errors; return whether the law has changed."""
        seen = len(self._ratios)
        self._recent += (error - self._recent) * max(RECENT, 1 / seen)
        self._lasting += (error - self._lasting) * max(LASTING, 1 / seen)
        is_worse = self._recent >= DRIFT_RATIO * self._lasting + DRIFT_MARGIN
        is_biased = abs(self._common) >= BIAS_RATIO * self._lasting + DRIFT_MARGIN
        if seen < SETTLED or not (is_worse or is_biased):
            return False
        self._weights *= math.exp(self._common)
        # Directions without samples have the greatest doubt already, and must not grow further.
        room = np.sqrt(np.clip(PRIOR / np.diagonal(self._covariance), 1.0, DOUBT))
        self._covariance *= np.outer(room, room)
        self._common, self._since = 0.0, 0
        self._ratios.clear()
        self._factors.clear()
        self._counts.clear()
        return True


class Latency(Enum):
    """The latencies of a model, learned separately."""

    FIRST_TOKEN = "ttft"  # of a streamed answer
    WHOLE = "whole"  # to the end of an answer that is not streamed
    PER_TOKEN = "tpot"


_REQUEST = {name: index for index, name in enumerate(Request._fields)}
_LOAD = {name: index for index, name in enumerate(LoadFeatures._fields)}


def _terms(*pairs: tuple[str, str]) -> Terms:
    return tuple((_REQUEST[one], _LOAD[other]) for one, other in pairs)


_TO_FIRST_TOKEN = _terms(
    *(("one", name) for name in LoadFeatures._fields),
    ("prompt", "uncached"),  # attention
    ("limit", "one"),
    ("limit", "running"),
)
TERMS: Mapping[Latency, Terms] = MappingProxyType(
    {
        Latency.FIRST_TOKEN: _TO_FIRST_TOKEN,
        Latency.WHOLE: _TO_FIRST_TOKEN,
        Latency.PER_TOKEN: _terms(
            *(("one", name) for name in ("one", "running", "kv_usage", "pending", "waiting"))
        ),
    }
)


class LatencyModels:
    """The models by name and latency. Owns the latest `MAX_MODELS` of them."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, Latency], LatencyModel] = {}
        self._lengths: dict[str, tuple[int, float]] = {}  # number of answers, mean of their tokens

    def get(self, model: str, latency: Latency) -> LatencyModel | None:
        return self._models.get((model, latency))

    def fitted(self, model: str, latency: Latency, request: Request) -> Fitted | None:
        known = self._models.get((model, latency))
        return None if known is None else known.fitted(request)

    def num_tokens(self, model: str, limit: int | None) -> float | None:
        """Return the mean token count of answers, at most `limit`; None before the first answer."""
        known = self._lengths.get(model)
        return None if known is None else min(known[1], limit or math.inf)

    def answered(self, model: str, num_tokens: float) -> None:
        count, mean = self._lengths.pop(model, (0, 0.0))
        if len(self._lengths) >= MAX_MODELS:
            del self._lengths[next(iter(self._lengths))]
        mean += (num_tokens - mean) * max(LASTING, 1 / (count + 1))
        self._lengths[model] = count + 1, mean

    def learning(self, model: str, latency: Latency) -> LatencyModel:
        """Return the model that learns the next sample, and make it the latest."""
        known = self._models.get((model, latency))
        if known is None:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            known = LatencyModel(TERMS[latency])
        else:
            del self._models[model, latency]  # moves to the end
        self._models[model, latency] = known
        return known

    def forget(self, endpoint: str) -> None:
        for one in self._models.values():
            one.forget(endpoint)
