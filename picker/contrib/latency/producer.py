"""predicted-latency-producer: predict a request's latency at each endpoint.

Theory of operation. Each candidate whose load is known gets a prediction of the time to the first
token (TTFT; to the whole answer, where the request does not stream) and per token after it (TPOT),
from this picker's requests to the same model (`_model` learns online):

    TTFT headroom = TTFT objective − time waited − p90 of TTFT
    TPOT headroom = min(TPOT objective, the smallest of requests in flight there)
                    · sloBufferFactor − p90 of TPOT
    valid         = no headroom is negative

For a request that names one objective only, the other headroom is 0; without any, both objectives
are 0, so that no endpoint meets them and the least prediction is best. A model with fewer than 50
answers has no predictions.

Where the proxy shows bodies, the picker learns the time to the first piece and, from the usage of
completed answers, the mean time per later token. Elsewhere it learns the time to the response's
headers, which is that to the first token where a server sends them together (ours does; vLLM sends
them at once: have bodies shown there), and the time per token from the number of generated tokens
in the metrics of endpoints. Once lengths of answers are known as well, predictions have a cost.

With `predictionServerUrl` (comma-separated, used in turn) and `trainingServerUrl`, or the variables
PREDICTION_SERVER_URL and TRAINING_SERVER_URL, predictions come from servers, which get samples in
the background (`_predictor` has the wire format and its variables). Their predictions replace a
p90, a missing objective is 0, and TPOT counts only with `streamingMode`; without it, their TTFT is
the time to the end. While they fail (`_servers`), the local model predicts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import msgspec

from picker.contrib.latency._learner import LatencyLearner, features_of, latency_of
from picker.contrib.latency._meters import LatencyPredictions
from picker.contrib.latency._model import REQUESTS_UNIT, Latency, LoadFeatures, costs_ms
from picker.contrib.latency._objectives import LatencyObjectives, latency_objectives
from picker.contrib.latency._predictor import (
    Features,
    Measurement,
    Predicted,
    PredictorSettings,
    measurement_key,
    predictor_settings,
)
from picker.contrib.latency._servers import LOOK_UP_SECONDS, PredictionServers
from picker.decisions.steps import Meter
from picker.framework.attributes import (
    LATENCY_PREDICTIONS,
    Attributes,
    DataKey,
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    encoder_matches_key,
    inflight_load_key,
    latency_predictions_key,
)
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType, PositiveFloat
from picker.framework.services import Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins._shared.load_signals import MeanReport, own_requests
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Candidates,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
    Usage,
)

log = logging.getLogger(__name__)

DECODE_ROLE = "decode"


class PredictedLatencyParameters(Parameters, frozen=True):
    slo_buffer_factor: PositiveFloat = 1.0
    context_ttl: str = msgspec.field(default="5m", name="contextTTL")
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    use_encoder_cache_features: bool = False
    sampling_mean: float = 1000
    max_decode_token_samples_for_prediction: int = 0
    prediction_server_url: str = ""
    training_server_url: str = ""
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    in_flight_load_producer_name: str = "inflight-load-producer"
    encoder_cache_match_info_producer_name: str = "mm-embeddings-cache-producer"

    @property
    def without_effect(self) -> Mapping[str, str]:
        every_token = "every token counts, none is sampled"
        return {
            "contextTTL": "the state of a request ends with the request",
            "samplingMean": every_token,
            "maxDecodeTokenSamplesForPrediction": every_token,
        }


@dataclass(frozen=True, slots=True)
class _Asked:
    """The rows sent to the servers, by endpoint key, and whether they answered."""

    features: Mapping[str, Features]
    answered: bool


class PredictedLatencyProducer:
    def __init__(
        self, name: str, parameters: PredictedLatencyParameters, services: Services
    ) -> None:
        self._parameters = parameters
        self._clock = services.clock
        self._key = latency_predictions_key(name)
        self._measurement_key = measurement_key(name)
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._load_key = inflight_load_key(parameters.in_flight_load_producer_name)
        self._learner = LatencyLearner()
        self._pending: dict[str, float] = {}  # `LoadFeatures.pending`, by endpoint
        self._shows_bodies = False
        self._in_flight: dict[str, WeakSet[Measurement]] = {}
        self.produces = (self._key,)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        return (TOKENIZED_PROMPT, self._match_key, self._load_key)

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Write the predictions; there are none without enough samples or without a known load."""
        loads = self._loads(request, candidates, attributes.get(self._match_key))
        self._learner.observe(loads)
        if not self._shows_bodies:
            self._learner.read_counters(request, candidates, self._now(request))
        if self._parameters.predict_in_produce and loads:
            predictions = self._predictions(request, loads, attributes.get(self._load_key))
            if predictions:
                attributes[self._key] = predictions
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        profile = result.profiles.get(result.primary_profile)
        if profile is None or not profile.picked:
            return
        candidate = profile.picked[0].candidate
        key, objective = candidate.key, latency_objectives(request.headers).tpot_ms
        measurement = Measurement(key, objective)
        measurement.begun = self._now(request)
        loads = self._loads(request, (candidate,), attributes.get(self._match_key))
        measurement.load = load = loads.get(key)
        measurement.integral = self._learner.load_over_time(key, measurement.begun)
        prediction = (attributes.get(self._key) or {}).get(key)
        if prediction is not None:
            measurement.predicted = Predicted(prediction.ttft_ms, prediction.tpot_ms)
            measurement.p90 = self._p90(request, measurement.predicted)
        if load is not None:
            measurement.pending = load.uncached
            self._pending[key] = self._pending.get(key, 0.0) + load.uncached
        attributes[self._measurement_key] = measurement
        if objective is not None:
            self._in_flight.setdefault(key, WeakSet()).add(measurement)

    def response_head(self, flight: Flight, head: ResponseHead) -> None:
        """Learn the time to the first token if no bodies are shown; refusals are not learned."""
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is None:
            return
        self._shows_bodies = head.shows_body
        if head.status is not None and head.status // 100 != 2:
            measurement.failed = True
        if not head.shows_body and head.came_at_seconds is not None:
            self._has_read_prompt(measurement)
            self._learner.first_token(flight.request, measurement, head.came_at_seconds)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is None:
            return
        if progress.is_first:
            self._has_read_prompt(measurement)
            self._learner.first_token(flight.request, measurement, progress.now_seconds)
        measurement.last = progress.now_seconds

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is None:
            return
        self._has_read_prompt(measurement)
        others = self._in_flight.get(measurement.key)
        if others is not None:
            others.discard(measurement)
            if not others:
                del self._in_flight[measurement.key]
        if not measurement.failed:
            ended_seconds = now_seconds if cause is FinishCause.COMPLETED else None
            generated = usage.completion_tokens if usage is not None else 0
            self._learn(flight.request, measurement, ended_seconds, generated)
        measurement.features = measurement.load = None

    def meter(self, point: str, labels: tuple[str, str], metrics: PickerMetrics) -> Meter | None:
        if point not in ("DataProducer", "PreRequest", "ResponseComplete"):
            return None
        return LatencyPredictions(self._key, self._measurement_key, metrics, labels)

    def endpoint_removed(self, key: str) -> None:
        self._in_flight.pop(key, None)
        self._pending.pop(key, None)
        self._learner.forget(key)

    def _learn(
        self,
        request: InferenceRequest,
        measured: Measurement,
        ended_seconds: float | None,
        generated: int,
    ) -> None:
        seen = self._learner.ended(request, measured, ended_seconds, generated)
        if measured.p90 is not None:
            measured.compare(*seen)

    def _has_read_prompt(self, measurement: Measurement) -> None:
        key, pending = measurement.key, measurement.pending
        measurement.pending = 0.0
        if pending and key in self._pending:
            self._pending[key] = max(0.0, self._pending[key] - pending)

    def _loads(
        self, request: InferenceRequest, candidates: Candidates, match: PrefixCacheMatchInfo | None
    ) -> dict[str, LoadFeatures]:
        """Return the known loads by endpoint."""
        prompt, pending, loads = request.num_tokens / 1024, self._pending, dict[str, LoadFeatures]()
        blocks = {} if match is None else match.match_blocks
        size = 0.0 if match is None else match.block_size_tokens / 1024
        mean: MeanReport | None = None
        for candidate in candidates:
            metrics, own = candidate.metrics, candidate.inflight_requests
            if metrics is None:
                continue
            key, uncached = candidate.endpoint.key, prompt
            if blocks:
                uncached = max(0.0, prompt - blocks.get(key, 0) * size)
            waiting: float | None = metrics.waiting_requests
            running: float | None = metrics.running_requests
            usage = metrics.kv_cache_usage
            if waiting is None or running is None or usage is None:
                mean = mean or MeanReport.of(candidates)
                waiting, running, usage = mean.complete(metrics)
            if own > waiting + running:  # the rule of `load_signals`
                waiting, running = own - running, own - waiting
            share = running / REQUESTS_UNIT
            loads[key] = LoadFeatures(
                1.0,
                uncached,
                prompt - uncached,
                pending.get(key, 0.0),
                waiting / REQUESTS_UNIT,
                share,
                usage,
                uncached * share,
            )
        return loads

    def _predictions(
        self,
        request: InferenceRequest,
        loads: Mapping[str, LoadFeatures],
        load: InFlightLoad | None,
    ) -> Mapping[str, LatencyPrediction]:
        model, kind, features = request.target_model, latency_of(request), features_of(request)
        first = self._learner.models.fitted(model, kind, features)
        if first is None:
            return {}
        ttft_ms, tpot_ms = first.predict(loads), None
        each = self._learner.models.fitted(model, Latency.PER_TOKEN, features)
        if each is not None:
            tpot_ms = each.predict(loads)
        costs: Sequence[float] = ()
        num_tokens = self._learner.models.num_tokens(model, request.body.max_output_tokens)
        if kind is Latency.WHOLE:
            costs = costs_ms(loads, ttft_ms, first, first, 1.0)
        elif each is not None and tpot_ms is not None and num_tokens is not None:
            own = [a + num_tokens * b for a, b in zip(ttft_ms, tpot_ms, strict=True)]
            costs = costs_ms(loads, own, first, each, num_tokens)
        objectives = latency_objectives(request.headers)
        waited_ms = 1000 * (self._now(request) - request.received_at_seconds)
        by_endpoint = _by_endpoint(load) or {}
        predictions: dict[str, LatencyPrediction] = {}
        for index, key in enumerate(loads):
            in_flight = by_endpoint.get(key)
            late = -ttft_ms[index] * first.p90_factor
            slow = 0.0 if tpot_ms is None or each is None else -tpot_ms[index] * each.p90_factor
            if objectives:
                named_ttft = objectives.ttft_ms
                late = 0.0 if named_ttft is None else late + named_ttft - waited_ms
                slow = 0.0 if objectives.tpot_ms is None else self._slack(key, slow, objectives)
            predictions[key] = LatencyPrediction(
                ttft_ms=ttft_ms[index],
                tpot_ms=None if tpot_ms is None else tpot_ms[index],
                ttft_headroom_ms=late,
                tpot_headroom_ms=slow,
                is_valid=late >= 0 and slow >= 0,
                dispatched=0 if in_flight is None else in_flight.requests,
                cost_ms=costs[index] if costs else None,
            )
        return predictions

    def _slack(self, key: str, slow: float, objectives: LatencyObjectives) -> float:
        return slow + self._allowed_tpot_ms(key, objectives.tpot_ms or 0.0) if slow else 0.0

    def _allowed_tpot_ms(self, key: str, objective_ms: float) -> float:
        others = [one.tpot_objective_ms for one in self._in_flight.get(key, ())]
        strictest = min((one for one in others if one is not None), default=objective_ms)
        return min(objective_ms, strictest) * self._parameters.slo_buffer_factor

    def _p90(self, request: InferenceRequest, expected: Predicted) -> Predicted | None:
        """Return the p90 of a prediction; None without a model."""
        first = self._learner.models.get(request.target_model, latency_of(request))
        each = self._learner.models.get(request.target_model, Latency.PER_TOKEN)
        if first is None:
            return None
        tpot_ms = expected.tpot_ms
        if tpot_ms is not None and each is not None:
            tpot_ms *= each.p90_factor
        return Predicted(expected.ttft_ms * first.p90_factor, tpot_ms)

    def _now(self, request: InferenceRequest) -> float:
        """Return the time of this decision, which is never before the request's arrival."""
        return max(request.received_at_seconds, self._clock.now())


class AskingLatencyProducer(PredictedLatencyProducer):
    timeout_seconds = LOOK_UP_SECONDS

    def __init__(
        self,
        name: str,
        parameters: PredictedLatencyParameters,
        services: Services,
        settings: PredictorSettings,
    ) -> None:
        super().__init__(name, parameters, services)
        self._servers = PredictionServers(settings, services.http)
        self.flush_interval_seconds = settings.flush_interval_seconds
        self._asked_key: DataKey[_Asked] = DataKey("LatencyFeatures", name)
        self._encoder_key = encoder_matches_key(parameters.encoder_cache_match_info_producer_name)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        keys = super().consumes
        return (*keys, self._encoder_key) if self._parameters.use_encoder_cache_features else keys

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        request = self.produce(request, candidates, attributes)
        features = self._features(request, candidates, attributes)
        predicted: Sequence[Predicted | None] = ()
        if self._parameters.predict_in_produce:
            predicted = await self._servers.predict(list(features.values()), self._now(request))
        attributes[self._asked_key] = _Asked(features, bool(predicted))
        if predicted:
            objectives = latency_objectives(request.headers)
            predictions = {
                key: self._compared(key, one, objectives, features[key].num_request_running)
                for key, one in zip(features, predicted, strict=True)
                if one is not None
            }
            # The local model replaces unusable rows of the server.
            learned = attributes.get(self._key) or {}
            attributes[self._key] = {**learned, **predictions}
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        super().pre_request(request, result, attributes)
        asked = attributes.get(self._asked_key)
        measurement = attributes.get(self._measurement_key)
        if asked is None or measurement is None:
            return
        measurement.features = asked.features.get(measurement.key)
        if asked.answered:
            measurement.p90 = None  # servers do not predict it

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        await self._servers.flush(now_seconds, unix_seconds)

    def _learn(
        self,
        request: InferenceRequest,
        measured: Measurement,
        ended_seconds: float | None,
        generated: int,
    ) -> None:
        super()._learn(request, measured, ended_seconds, generated)
        features, begun = measured.features, request.received_at_seconds
        if features is None or ended_seconds is None:
            return
        if self._parameters.streaming_mode:
            sample = measured.streamed(features, begun, ended_seconds, generated)
        else:
            sample = measured.whole(features, begun, ended_seconds, generated)
        if sample is None:
            return
        if measured.p90 is None:  # else the prediction was local
            measured.compare(sample.ttft_ms, sample.tpot_ms)
        self._servers.learn(sample)

    def _features(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> dict[str, Features]:
        match = attributes.get(self._match_key)
        load = attributes.get(self._load_key)
        encoder = None
        if self._parameters.use_encoder_cache_features:
            encoder = attributes.get(self._encoder_key)
        tokens = request.num_tokens
        features: dict[str, Features] = {}
        mean = MeanReport.of(candidates)
        for candidate in candidates:
            if candidate.metrics is None:
                continue
            queue, running, usage = mean.complete(candidate.metrics)
            waiting = round(max(queue, candidate.inflight_requests - running))
            role = candidate.endpoint.labels.get(self._parameters.endpoint_role_label, "")
            in_flight = 0 if load is None else load.tokens(candidate.key)
            features[candidate.key] = Features(
                kv_cache_percentage=usage,
                input_token_length=tokens,
                num_request_waiting=waiting,
                num_request_running=own_requests(candidate, _by_endpoint(load)),
                prefix_cache_score=_cached_share(match, candidate.key),
                encoder_input_size=0.0 if encoder is None else encoder.requested,
                encoder_matched_size=_encoded(encoder, candidate.key),
                pod_type=role,
                prefill_tokens_in_flight=0 if role == DECODE_ROLE else in_flight,
                decode_tokens_in_flight=in_flight if role == DECODE_ROLE else 0,
            )
        return features

    def _compared(
        self, key: str, predicted: Predicted, objectives: LatencyObjectives, dispatched: int
    ) -> LatencyPrediction:
        ttft_headroom_ms = (objectives.ttft_ms or 0.0) - predicted.ttft_ms
        tpot_headroom_ms = 0.0
        is_valid = ttft_headroom_ms > 0
        if self._parameters.streaming_mode:
            allowed_ms = self._allowed_tpot_ms(key, objectives.tpot_ms or 0.0)
            tpot_headroom_ms = allowed_ms - (predicted.tpot_ms or 0.0)
            is_valid = is_valid and tpot_headroom_ms > 0
        return LatencyPrediction(
            ttft_ms=predicted.ttft_ms,
            tpot_ms=predicted.tpot_ms,
            ttft_headroom_ms=ttft_headroom_ms,
            tpot_headroom_ms=tpot_headroom_ms,
            is_valid=is_valid,
            dispatched=dispatched,
        )


def _by_endpoint(load: InFlightLoad | None) -> Mapping[str, EndpointLoad] | None:
    return None if load is None else load.by_endpoint


def _cached_share(match: PrefixCacheMatchInfo | None, key: str) -> float:
    if match is None or not match.total_blocks:
        return 0.0
    return match.match_blocks.get(key, 0) / match.total_blocks


def _encoded(encoder: EncoderMatch | None, key: str) -> float:
    return 0.0 if encoder is None else encoder.matched.get(key, 0.0)


def _create(
    name: str, parameters: PredictedLatencyParameters, services: Services
) -> PredictedLatencyProducer:
    settings = predictor_settings(
        parameters.prediction_server_url, parameters.training_server_url, services.environment
    )
    if settings.prediction_urls or settings.training_url is not None:
        return AskingLatencyProducer(name, parameters, services, settings)
    return PredictedLatencyProducer(name, parameters, services)


PLUGINS = (PluginType("predicted-latency-producer", _create, default_for=(LATENCY_PREDICTIONS,)),)
