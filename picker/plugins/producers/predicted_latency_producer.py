"""predicted-latency-producer: predict the latency of a request at each endpoint with a server.

Theory of operation. Before scheduling, one row of features per candidate whose load is known goes
to a prediction server (`scheduling.latency_predictor` has the wire format); of what comes back,

    TTFT headroom = objective − predicted TTFT
    TPOT headroom = min(objective, the smallest objective of requests under way there)
                    · sloBufferFactor − predicted TPOT            with `streamingMode`, else 0
    valid         = every predicted latency is below its objective

where an objective that the request does not name is 0, so that nothing meets it. An endpoint whose
load is unknown gets no prediction, nor does any when the server fails: scheduling goes on with what
is known.

While the response comes, the request's real latencies are measured: with `streamingMode` the time
to the first piece, and per token from there to the end; else the time to the end as TTFT. They
become samples, which are sent to the training server in the background. Requests that failed are
no samples.

The servers are `predictionServerUrl` (a comma list, asked in turn) and `trainingServerUrl`, else
those of the environment variables PREDICTION_SERVER_URL and TRAINING_SERVER_URL.
LATENCY_MAX_SAMPLE_SIZE, LATENCY_FLUSH_INTERVAL_SEC, LATENCY_HTTP_TIMEOUT_SEC and
LATENCY_MAX_BULK_SIZE count as well. Each request asks for itself: rows of several requests are not
put together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import msgspec

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
from picker.framework.services import HttpError, Services
from picker.plugins._shared.load_signals import own_requests, waiting_requests
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.scheduling.latency_objectives import LatencyObjectives, latency_objectives
from picker.scheduling.latency_predictor import (
    PREDICT_PATH,
    TRAIN_PATH,
    Features,
    Measurement,
    Predicted,
    Sample,
    measurement_key,
    predictor_settings,
    read_predictions,
)
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

LOOK_UP_SECONDS = 0.4
# What the HTTP client gets of it: its own error leaves the request's other findings alone.
ASKING_SECONDS = 0.35
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
        """What says how long and how often to look."""
        every_token = "every token counts, none is sampled"
        return {
            "contextTTL": "what is known of a request goes when the request is over",
            "samplingMean": every_token,
            "maxDecodeTokenSamplesForPrediction": every_token,
        }


class _Reachability:
    """Says in the log when a server begins to fail and when it answers again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def failed(self, reason: str) -> None:
        """It did not answer as it should."""
        if not self._failing:
            log.warning("%s fail from now on: %s", self._what, reason)
        self._failing = True

    def answered(self) -> None:
        """It did."""
        if self._failing:
            log.warning("%s work again", self._what)
        self._failing = False


class PredictedLatencyProducer:
    """Owns the samples that were not sent yet and the objectives of what is under way."""

    timeout_seconds = LOOK_UP_SECONDS

    def __init__(
        self, name: str, parameters: PredictedLatencyParameters, services: Services
    ) -> None:
        """Raises `ValueError` for settings that cannot be understood."""
        self._parameters = parameters
        self._http = services.http
        self._settings = predictor_settings(
            parameters.prediction_server_url,
            parameters.training_server_url,
            services.environment,
        )
        if not self._settings.prediction_urls:
            log.warning("'%s' has no prediction server and predicts nothing", name)
        self.flush_interval_seconds = self._settings.flush_interval_seconds
        self._key = latency_predictions_key(name)
        self._features_key: DataKey[Mapping[str, Features]] = DataKey("LatencyFeatures", name)
        self._measurement_key = measurement_key(name)
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._load_key = inflight_load_key(parameters.in_flight_load_producer_name)
        self._encoder_key = encoder_matches_key(parameters.encoder_cache_match_info_producer_name)
        self._samples: deque[Sample] = deque(maxlen=self._settings.max_samples)
        self._under_way: dict[str, WeakSet[Measurement]] = {}
        self._asked = 0
        self._predicting = _Reachability("latency predictions")
        self._training = _Reachability("latency training samples")
        self.produces = (self._key,)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """Tokens, what is cached where, own load; encoded items when they are asked for."""
        keys: tuple[DataKey[Any], ...] = (TOKENIZED_PROMPT, self._match_key, self._load_key)
        return (*keys, self._encoder_key) if self._parameters.use_encoder_cache_features else keys

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Write the predictions; none when the server fails or no load is known."""
        if not self._settings.prediction_urls and self._settings.training_url is None:
            return request
        features = self._features(request, candidates, attributes)
        attributes.put(self._features_key, features)
        if not (
            features and self._settings.prediction_urls and self._parameters.predict_in_produce
        ):
            return request
        try:
            predicted = await self._predict(list(features.values()))
        except (HttpError, ValueError) as error:
            self._predicting.failed(str(error))
            return request
        self._predicting.answered()
        objectives = latency_objectives(request.headers)
        predictions = {
            key: self._judge(key, one, objectives, features[key].num_request_running)
            for key, one in zip(features, predicted, strict=True)
            if one is not None
        }
        if predictions:
            attributes.put(self._key, predictions)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Begin to measure the request at the first endpoint of the primary profile."""
        profile = result.profiles.get(result.primary_profile)
        if profile is None or not profile.picked:
            return
        key = profile.picked[0].candidate.key
        features = (attributes.get(self._features_key) or {}).get(key)
        objective = latency_objectives(request.headers).tpot_ms
        measurement = Measurement(key, features, objective)
        attributes.put(self._measurement_key, measurement)
        if objective is not None and self._parameters.streaming_mode:
            self._under_way.setdefault(key, WeakSet()).add(measurement)

    def response_head(self, flight: Flight, head: ResponseHead) -> None:
        """An endpoint's refusal is no sample."""
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is not None and head.status is not None and head.status // 100 != 2:
            measurement.failed = True

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        """Note when the first and the last piece came."""
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is None:
            return
        if progress.is_first and measurement.first is None:
            measurement.first = progress.now_seconds
        measurement.last = progress.now_seconds

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """Make a sample of it."""
        measurement = flight.attributes.get(self._measurement_key)
        if measurement is None:
            return
        others = self._under_way.get(measurement.key)
        if others is not None:
            others.discard(measurement)
            if not others:
                del self._under_way[measurement.key]
        features, measurement.features = measurement.features, None
        if features is None or measurement.failed or cause is not FinishCause.COMPLETED:
            return
        if self._settings.training_url is None:
            return
        begun = flight.request.received_at_seconds
        generated = usage.completion_tokens if usage is not None else 0
        if self._parameters.streaming_mode:
            sample = measurement.streamed(features, begun, now_seconds, generated)
        else:
            sample = measurement.whole(features, begun, now_seconds, generated)
        if sample is not None:
            self._samples.append(sample)

    def endpoint_removed(self, key: str) -> None:
        """Nothing is under way at an endpoint that left or restarted."""
        self._under_way.pop(key, None)

    def take_training_samples(self) -> list[Sample]:
        """The samples that were gathered; they are the caller's from now on."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        """Send the samples; what cannot be sent is kept, the latest `max_samples` of it."""
        url = self._settings.training_url
        samples = self.take_training_samples() if url is not None else []
        size = self._settings.max_rows
        while samples:
            entries = [sample.entry(now_seconds, unix_seconds) for sample in samples[:size]]
            try:
                await self._http.post_json(
                    f"{url}{TRAIN_PATH}",
                    {"entries": entries},
                    timeout_seconds=self._settings.timeout_seconds,
                )
            except HttpError as error:
                self._training.failed(str(error))
                kept = [*samples, *self._samples]
                self._samples.clear()
                self._samples.extend(kept)
                return
            self._training.answered()
            samples = samples[size:]

    async def _predict(self, features: Sequence[Features]) -> list[Predicted | None]:
        """Ask one server, the next one each time. Raises `HttpError` and `ValueError`."""
        url = self._settings.prediction_urls[self._asked % len(self._settings.prediction_urls)]
        self._asked += 1
        size = self._settings.max_rows
        batches = [features[start : start + size] for start in range(0, len(features), size)]
        seconds = min(self._settings.timeout_seconds, ASKING_SECONDS / len(batches))
        predicted: list[Predicted | None] = []
        for batch in batches:
            body = {"requests": [one.row() for one in batch]}
            answer = await self._http.post_json(
                f"{url}{PREDICT_PATH}", body, timeout_seconds=seconds
            )
            predicted.extend(read_predictions(answer, len(batch)))
        return predicted

    def _features(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> dict[str, Features]:
        """A row for every candidate whose load is known."""
        match = attributes.get(self._match_key)
        load = attributes.get(self._load_key)
        encoder = None
        if self._parameters.use_encoder_cache_features:
            encoder = attributes.get(self._encoder_key)
        tokens = request.num_tokens
        features: dict[str, Features] = {}
        for candidate in candidates:
            metrics, waiting = candidate.metrics, waiting_requests(candidate)
            if metrics is None or waiting is None:
                continue
            role = candidate.endpoint.labels.get(self._parameters.endpoint_role_label, "")
            under_way = 0 if load is None else load.tokens(candidate.key)
            features[candidate.key] = Features(
                kv_cache_percentage=metrics.kv_cache_usage,
                input_token_length=tokens,
                num_request_waiting=waiting,
                num_request_running=own_requests(candidate, _by_endpoint(load)),
                prefix_cache_score=_cached_share(match, candidate.key),
                encoder_input_size=0.0 if encoder is None else encoder.requested,
                encoder_matched_size=_encoded(encoder, candidate.key),
                pod_type=role,
                prefill_tokens_in_flight=0 if role == DECODE_ROLE else under_way,
                decode_tokens_in_flight=under_way if role == DECODE_ROLE else 0,
            )
        return features

    def _judge(
        self, key: str, predicted: Predicted, objectives: LatencyObjectives, dispatched: int
    ) -> LatencyPrediction:
        """Hold a prediction against what the request asks for."""
        ttft_headroom_ms = (objectives.ttft_ms or 0.0) - predicted.ttft_ms
        tpot_headroom_ms = 0.0
        is_valid = ttft_headroom_ms > 0
        if self._parameters.streaming_mode:
            allowed_ms = self._allowed_tpot_ms(key, objectives.tpot_ms or 0.0)
            tpot_headroom_ms = allowed_ms - predicted.tpot_ms
            is_valid = is_valid and tpot_headroom_ms > 0
        return LatencyPrediction(
            ttft_ms=predicted.ttft_ms,
            tpot_ms=predicted.tpot_ms,
            ttft_headroom_ms=ttft_headroom_ms,
            tpot_headroom_ms=tpot_headroom_ms,
            is_valid=is_valid,
            dispatched=dispatched,
        )

    def _allowed_tpot_ms(self, key: str, objective_ms: float) -> float:
        """What a token may take so that no request there misses its objective."""
        others = [one.tpot_objective_ms for one in self._under_way.get(key, ())]
        strictest = min((one for one in others if one is not None), default=objective_ms)
        return min(objective_ms, strictest) * self._parameters.slo_buffer_factor


def _by_endpoint(load: InFlightLoad | None) -> Mapping[str, EndpointLoad] | None:
    return None if load is None else load.by_endpoint


def _cached_share(match: PrefixCacheMatchInfo | None, key: str) -> float:
    if match is None or not match.total_blocks:
        return 0.0
    return match.match_blocks.get(key, 0) / match.total_blocks


def _encoded(encoder: EncoderMatch | None, key: str) -> float:
    return 0.0 if encoder is None else encoder.matched.get(key, 0.0)


PLUGIN = PluginType(
    "predicted-latency-producer",
    PredictedLatencyParameters,
    PredictedLatencyProducer,
    default_for=(LATENCY_PREDICTIONS,),
)
