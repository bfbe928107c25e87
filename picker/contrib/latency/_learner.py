"""Learns the latencies of models from the responses to requests and from endpoints' counters.

The time to the first token is learned as soon as it is seen: an answer may take minutes, or fail.
The time per token is a mean over an answer, or between two readings of a counter, and is learned
with the mean load of that time: an answer in a burst begins before the others add to the load.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picker.contrib.latency._model import (
    REQUESTS_UNIT,
    Latency,
    LatencyModels,
    LoadFeatures,
    LoadIntegral,
    Request,
    mean_load,
)
from picker.contrib.latency._predictor import Measurement
from picker.types import Candidates, InferenceRequest

log = logging.getLogger(__name__)

# Between two readings of a counter: the load of a longer time is not known.
MAX_READING_SECONDS = 3.0
MAX_ANSWER_TOKENS = 1 << 20  # of limits, which clients choose


@dataclass(frozen=True, slots=True)
class _Reading:
    """A reading of an endpoint's count of generated tokens, and its load over time up to then."""

    read_at_seconds: float
    generated_tokens: float
    load: Sequence[float]


class LatencyLearner:
    def __init__(self) -> None:
        self.models = LatencyModels()
        self._loads: Mapping[str, LoadFeatures] = {}  # as of the last decision
        self._over_time: dict[str, LoadIntegral] = {}
        self._readings: dict[str, _Reading] = {}

    def observe(self, loads: Mapping[str, LoadFeatures]) -> None:
        self._loads = loads

    def load_over_time(self, key: str, now_seconds: float) -> LoadIntegral:
        """Return an endpoint's load up to now, to measure a request that is being sent."""
        known = self._over_time.get(key)
        if known is None:
            known = self._over_time[key] = LoadIntegral(now_seconds)
        known.until(now_seconds, self._loads.get(key))
        return known

    def first_token(
        self, request: InferenceRequest, measured: Measurement, now_seconds: float
    ) -> None:
        """Learn from the first token; a second call does nothing."""
        if measured.first is not None:
            return
        measured.first = now_seconds
        if measured.integral is not None:
            load = self._loads.get(measured.key)
            measured.load_at_first = measured.integral.until(now_seconds, load)
        ttft_ms, load = measured.ttft_ms, measured.load
        if ttft_ms and load and request.body.stream and not measured.failed:
            self._learn(request, Latency.FIRST_TOKEN, load, measured.key, ttft_ms)

    def ended(
        self,
        request: InferenceRequest,
        measured: Measurement,
        ended_seconds: float | None,
        generated: int,
    ) -> tuple[float | None, float | None]:
        """Learn from an answer with `generated` tokens (0: unknown); return TTFT and TPOT in ms,
        where known. `ended_seconds` is None for a failed answer.
        """
        load, ttft_ms = measured.load, measured.ttft_ms
        if load is None:
            return None, None
        if latency_of(request) is Latency.FIRST_TOKEN:
            tpot_ms = None
            if ended_seconds is not None:
                tpot_ms = self._answered(request, measured, ended_seconds, generated)
            return ttft_ms, tpot_ms
        if ended_seconds is None:
            return None, None
        whole_ms = 1000 * (ended_seconds - measured.begun)
        self._learn(request, Latency.WHOLE, load, measured.key, whole_ms)
        return whole_ms, None

    def read_counters(
        self, request: InferenceRequest, candidates: Candidates, now_seconds: float
    ) -> None:
        """Learn the time per token from the endpoints' counters of generated tokens: the time
        between two readings, times the mean number of running requests, divided by the new tokens.
        """
        for candidate in candidates:
            metrics, key = candidate.metrics, candidate.endpoint.key
            served = None if metrics is None else metrics.served
            if served is None or served.generated_tokens is None:
                continue
            before, at = self._readings.get(key), served.read_at_seconds
            if before is not None and at <= before.read_at_seconds:
                continue
            until = self.load_over_time(key, now_seconds).until(now_seconds, None)
            self._readings[key] = _Reading(at, served.generated_tokens, until)
            if before is None:
                continue
            load, seconds = (
                mean_load(self._loads[key], before.load, until),
                at - before.read_at_seconds,
            )
            tokens = served.generated_tokens - before.generated_tokens
            if load.running and tokens > 0 and seconds <= MAX_READING_SECONDS:
                tpot_ms = 1000 * seconds * REQUESTS_UNIT * load.running / tokens
                self._learn(request, Latency.PER_TOKEN, load, key, tpot_ms)

    def forget(self, key: str) -> None:
        self._over_time.pop(key, None)
        self._readings.pop(key, None)
        self.models.forget(key)

    def _answered(
        self, request: InferenceRequest, measured: Measurement, ended_seconds: float, generated: int
    ) -> float | None:
        """Learn and return the time per token. Without usage, the length is estimated."""
        tpot_ms, predicted = measured.tpot_ms(generated), measured.predicted
        num_tokens = float(generated)
        if not generated and measured.first is not None and predicted and predicted.tpot_ms:
            num_tokens = 1 + 1000 * (ended_seconds - measured.first) / predicted.tpot_ms
        if num_tokens:
            self.models.answered(request.target_model, num_tokens)
        if tpot_ms and measured.load and measured.integral is not None:
            until = measured.integral.until(ended_seconds, self._loads.get(measured.key))
            load = mean_load(measured.load, measured.load_at_first, until)
            self._learn(request, Latency.PER_TOKEN, load, measured.key, tpot_ms)
        return tpot_ms

    def _learn(
        self,
        request: InferenceRequest,
        kind: Latency,
        load: LoadFeatures,
        key: str,
        latency_ms: float,
    ) -> None:
        if key not in self._over_time:  # the endpoint left before its request ended
            return
        model = self.models.learning(request.target_model, kind)
        if model.learn(features_of(request), load, key, latency_ms):
            name = request.target_model
            log.info("%s of model '%s' has changed: learning it again", kind.value, name)


def features_of(request: InferenceRequest) -> Request:
    """Return a request's features. A limit does not affect the first token of a streamed answer."""
    limit = (
        0 if request.body.stream else min(request.body.max_output_tokens or 0, MAX_ANSWER_TOKENS)
    )
    return Request.of(request.num_tokens, limit)


def latency_of(request: InferenceRequest) -> Latency:
    return Latency.FIRST_TOKEN if request.body.stream else Latency.WHOLE
