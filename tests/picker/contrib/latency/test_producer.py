"""predicted-latency-producer: local learning, and prediction servers."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.contrib.latency._model import MIN_SAMPLES
from picker.contrib.latency.producer import (
    PLUGINS,
    AskingLatencyProducer,
    PredictedLatencyParameters,
    PredictedLatencyProducer,
)
from picker.framework.attributes import (
    Attributes,
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    encoder_matches_key,
    inflight_load_key,
    latency_predictions_key,
)
from picker.framework.interfaces import Flight
from picker.framework.services import NoHttp, Services
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Candidate,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    ResponseProgress,
    ServedTotals,
    Usage,
)
from tests.support.picker.fake_latency_predictor import FakeLatencyPredictor
from tests.support.picker.plugin_scenes import candidate, decided, request_for

ENVIRONMENT = {
    "PREDICTION_SERVER_URL": "http://p1,http://p2",
    "TRAINING_SERVER_URL": "http://t",
    "LATENCY_MAX_BULK_SIZE": "2",
    "LATENCY_MAX_SAMPLE_SIZE": "3",
}
NAME = "predicted-latency-producer"


@pytest.fixture
def predictor() -> FakeLatencyPredictor:
    return FakeLatencyPredictor()


def make(
    predictor: FakeLatencyPredictor, environment: Mapping[str, str] = ENVIRONMENT, **parameters: Any
) -> AskingLatencyProducer:
    return PLUGINS[0].make(
        NAME, PredictedLatencyParameters(**parameters), Services(predictor, environment)
    )


# 100 tokens for 150 ms and 12 ms, received at 10 s.
ASKING = request_for(
    prompts=(bytes(400),),
    received_at_seconds=10.0,
    headers={"x-llm-d-slo-ttft-ms": "150", "x-llm-d-slo-tpot-ms": "12"},
)


# Five tokens: the first after 0.2 s, the last 0.8 s later.
STREAMING = replace(ASKING, body=replace(ASKING.body, stream=True))


async def _look_up(
    producer: AskingLatencyProducer, request: InferenceRequest, *candidates: Candidate
) -> Attributes:
    attributes = Attributes()
    assert await producer.look_up(request, candidates, attributes) is request
    return attributes


async def _asked(
    producer: AskingLatencyProducer, request: InferenceRequest, *candidates: Candidate
) -> Any:
    found = await _look_up(producer, request, *candidates)
    return found.get(latency_predictions_key())


def _leave(
    producer: PredictedLatencyProducer,
    request: InferenceRequest,
    candidate: Candidate,
    attributes: Attributes,
) -> Flight:
    result = decided(default=[candidate])
    producer.pre_request(request, result, attributes)
    return Flight(request, result, attributes)


def _answer(producer: PredictedLatencyProducer, flight: Flight, tokens: int = 5) -> None:
    producer.response_head(flight, ResponseHead(200))
    producer.response_progress(flight, ResponseProgress(10.2, 10, is_first=True))
    producer.response_progress(flight, ResponseProgress(11.0, 90, is_last=True))
    producer.request_ended(flight, FinishCause.COMPLETED, Usage(100, tokens, 100 + tokens), 11.5)


def test_the_findings_of_features_are_declared(predictor: FakeLatencyPredictor) -> None:
    plugin = make(predictor)
    assert plugin.flush_interval_seconds == 1.0
    assert latency_predictions_key() in plugin.produces
    assert inflight_load_key() in plugin.consumes
    assert encoder_matches_key() not in plugin.consumes
    assert encoder_matches_key() in make(predictor, use_encoder_cache_features=True).consumes


async def test_each_known_endpoint_gets_a_row(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor, endpoint_role_label="role", use_encoder_cache_features=True)
    attributes = Attributes()
    loads = {"default/a": EndpointLoad(3, 70), "default/b": EndpointLoad(1, 30)}
    attributes[inflight_load_key()] = InFlightLoad(loads, {})
    match = PrefixCacheMatchInfo(4, 64, {"default/a": 1})
    attributes[match_info_key("approx-prefix-cache-producer")] = match
    attributes[encoder_matches_key()] = EncoderMatch(4.0, {"default/b": 2.0})
    a = candidate("a", kv_cache_usage=0.5, waiting_requests=2)
    b = candidate("b")
    b = replace(b, endpoint=replace(b.endpoint, labels={"role": "decode"}))
    await producer.look_up(ASKING, [a, candidate("c", known=False), b], attributes)
    [(url, body)] = predictor.asked
    assert url == "http://p1/predict/bulk/strict"
    first, second = body["requests"]
    assert first == {
        "kv_cache_percentage": 0.5,
        "input_token_length": 100,
        "num_request_waiting": 2,
        "num_request_running": 3,
        "num_tokens_generated": 1,
        "prefix_cache_score": 0.25,
        "encoder_input_size": 4.0,
        "encoder_matched_size": 0.0,
        "pod_type": "",
        "prefill_tokens_in_flight": 70,
        "decode_tokens_in_flight": 0,
    }
    assert second["pod_type"] == "decode"
    assert second["encoder_matched_size"] == 2.0
    assert (second["prefill_tokens_in_flight"], second["decode_tokens_in_flight"]) == (0, 30)
    predictions = attributes.get(latency_predictions_key())
    assert set(predictions) == {"default/a", "default/b"}
    assert predictions["default/a"].dispatched == 3


async def test_a_missing_signal_is_the_mean_of_the_others(predictor: FakeLatencyPredictor) -> None:
    pool = [
        candidate("a", kv_cache_usage=None, waiting_requests=8),
        candidate("b", kv_cache_usage=0.25, waiting_requests=2),
        candidate("c", kv_cache_usage=0.75, waiting_requests=None),
        candidate("d", kv_cache_usage=0.5, waiting_requests=None, inflight=9),
    ]
    await make(predictor).look_up(ASKING, pool, Attributes())
    rows = [row for _, body in predictor.asked for row in body["requests"]]
    assert [row["kv_cache_percentage"] for row in rows] == [0.5, 0.25, 0.75, 0.5]
    assert [row["num_request_waiting"] for row in rows] == [8, 2, 5, 9]


async def test_predictions_of_servers_are_compared_with_objectives(
    predictor: FakeLatencyPredictor,
) -> None:
    pool = [candidate("a"), candidate("b")]
    assert await _asked(make(predictor), ASKING, *pool) == {
        "default/a": LatencyPrediction(100.0, 10.0, 50.0, 0.0, True),
        "default/b": LatencyPrediction(200.0, 20.0, -50.0, 0.0, False),
    }
    producer = make(predictor, streaming_mode=True, slo_buffer_factor=0.5)
    assert await _asked(producer, ASKING, *pool) == {
        "default/a": LatencyPrediction(100.0, 10.0, 50.0, -4.0, False),
        "default/b": LatencyPrediction(200.0, 20.0, -50.0, -14.0, False),
    }


async def test_a_missing_objective_is_zero_for_servers(predictor: FakeLatencyPredictor) -> None:
    predictions = await _asked(make(predictor), replace(ASKING, headers={}), candidate("a"))
    assert predictions == {"default/a": LatencyPrediction(100.0, 10.0, -100.0, 0.0, False)}


async def test_a_stricter_request_in_flight_tightens_the_objective(
    predictor: FakeLatencyPredictor,
) -> None:
    producer = make(predictor, streaming_mode=True)
    strict = replace(ASKING, headers={**ASKING.headers, "x-llm-d-slo-tpot-ms": "11"})

    async def headroom() -> float:
        found = await _asked(producer, ASKING, candidate("a"))
        return found["default/a"].tpot_headroom_ms

    assert await headroom() == 2.0
    flight: Flight | None = _leave(producer, strict, candidate("a"), Attributes())
    assert await headroom() == 1.0
    assert flight is not None
    _answer(producer, flight)
    assert await headroom() == 2.0
    flight = _leave(producer, strict, candidate("a"), Attributes())
    assert await headroom() == 1.0
    flight = None
    assert await headroom() == 2.0
    flight = _leave(producer, strict, candidate("a"), Attributes())
    producer.endpoint_removed("default/a")
    assert await headroom() == 2.0


async def test_servers_are_used_in_turn_and_in_batches(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor)
    predictions = await _asked(producer, ASKING, *(candidate(name) for name in "abc"))
    assert [predictions[f"default/{name}"].ttft_ms for name in "abc"] == [100.0, 200.0, 100.0]
    await _look_up(producer, ASKING, candidate("a"))
    urls = [url.partition("/predict")[0] for url, _ in predictor.asked]
    assert urls == ["http://p1", "http://p1", "http://p2"]


@pytest.mark.parametrize(
    ("failing", "answer"), [(True, None), (False, {"predictions": []}), (False, ["?"])]
)
async def test_a_failed_server_is_logged_once(
    predictor: FakeLatencyPredictor, caplog: pytest.LogCaptureFixture, failing: bool, answer: Any
) -> None:
    producer = make(predictor)
    predictor.failing, predictor.answer = failing, answer
    for _ in range(2):
        assert await _asked(producer, ASKING, candidate("a")) is None
    predictor.failing, predictor.answer = False, None
    assert await _asked(producer, ASKING, candidate("a")) is not None
    assert ["fail from now on" in text for text in caplog.messages] == [True, False]


async def test_a_failed_batch_leaves_the_earlier_batches(
    predictor: FakeLatencyPredictor, caplog: pytest.LogCaptureFixture
) -> None:
    predictor.answer = {"predictions": [{"ttft_ms": 80.0, "tpot_ms": 8.0}, {"ttft_ms": "fast"}]}
    predictions = await _asked(make(predictor), ASKING, *(candidate(name) for name in "abc"))
    assert {key: one.ttft_ms for key, one in predictions.items()} == {"default/a": 80.0}
    assert sum("fail from now on" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("environment", "parameters"),
    [({"TRAINING_SERVER_URL": "http://t"}, {}), (ENVIRONMENT, {"predict_in_produce": False})],
)
async def test_servers_are_optional(
    predictor: FakeLatencyPredictor, environment: dict[str, str], parameters: dict[str, Any]
) -> None:
    assert await _asked(make(predictor, environment, **parameters), ASKING, candidate("a")) is None
    assert predictor.asked == []


@pytest.mark.parametrize(
    ("streaming", "tokens", "ttft_ms", "tpot_ms"),
    [(True, 5, 200.0, 200.0), (True, 1, 200.0, 0.0), (False, 5, 1500.0, 0.0)],
)
async def test_a_sample_has_the_latencies_of_a_request(
    predictor: FakeLatencyPredictor, streaming: bool, tokens: int, ttft_ms: float, tpot_ms: float
) -> None:
    producer = make(predictor, streaming_mode=streaming)
    endpoint = candidate("a", kv_cache_usage=0.5)
    attributes = await _look_up(producer, ASKING, endpoint)
    flight = _leave(producer, ASKING, endpoint, attributes)
    _answer(producer, flight, tokens)
    _answer(producer, flight, tokens)
    predictor.asked.clear()
    await producer.flush(12.0, 1_700_000_000.5)
    [(url, body)] = predictor.asked
    assert url == "http://t/add_training_data_bulk"
    [entry] = body["entries"]
    assert entry["actual_ttft_ms"] == pytest.approx(ttft_ms)
    assert entry["actual_tpot_ms"] == pytest.approx(tpot_ms)
    assert entry["num_tokens_generated"] == tokens
    assert entry["kv_cache_percentage"] == 0.5
    assert entry["timestamp"] == "2023-11-14T22:13:20.000+00:00"
    await producer.flush(13.0, 1_700_000_001.5)
    assert len(predictor.asked) == 1


async def test_failed_requests_are_no_samples(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor)
    known, unknown = candidate("a"), candidate("b", known=False)
    refused = _leave(producer, ASKING, known, await _look_up(producer, ASKING, known))
    producer.response_head(refused, ResponseHead(503))
    producer.request_ended(refused, FinishCause.COMPLETED, None, 11.0)
    reset = _leave(producer, ASKING, known, await _look_up(producer, ASKING, known))
    producer.request_ended(reset, FinishCause.RESET, None, 11.0)
    _answer(producer, _leave(producer, ASKING, unknown, await _look_up(producer, ASKING, known)))
    _answer(producer, Flight(ASKING, reset.result, Attributes()))
    deaf = make(predictor, {"PREDICTION_SERVER_URL": "http://p1"})
    _answer(deaf, _leave(deaf, ASKING, known, await _look_up(deaf, ASKING, known)))
    predictor.asked.clear()
    for one in (producer, deaf):
        await one.flush(12.0, 0.0)
    assert predictor.asked == []


async def test_the_breaker_opens_after_three_failures(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor)
    predictor.failing = True

    async def was_asked(at: float) -> bool:
        predictor.asked.clear()
        await _look_up(producer, replace(ASKING, received_at_seconds=at), candidate("a"))
        return bool(predictor.asked)

    assert [await was_asked(at) for at in (1.0, 2.0, 3.0, 4.0, 12.9)] == [True] * 3 + [False] * 2
    assert [await was_asked(at) for at in (13.0, 13.1, 22.9)] == [True, False, False]
    predictor.failing = False
    assert [await was_asked(at) for at in (23.0, 23.1, 23.2)] == [True] * 3
    predictor.failing = True
    assert [await was_asked(at) for at in (24.0, 24.1, 24.2, 24.3)] == [True] * 3 + [False]


async def test_the_local_model_replaces_a_failed_server(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor)
    for _ in range(MIN_SAMPLES):
        attributes = await _look_up(producer, STREAMING, candidate("a"))
        _answer(producer, _leave(producer, STREAMING, candidate("a"), attributes))
    predictor.failing = True
    predictions = await _asked(producer, STREAMING, candidate("a"))
    assert predictions["default/a"].ttft_ms == pytest.approx(200.0, rel=0.02)


async def test_samples_wait_for_a_failed_server(predictor: FakeLatencyPredictor) -> None:
    producer = make(predictor)
    for index in range(5):
        endpoint = candidate("a", waiting_requests=index)
        attributes = await _look_up(producer, ASKING, endpoint)
        _answer(producer, _leave(producer, ASKING, endpoint, attributes))
        if index == 1:
            predictor.failing = True
            await producer.flush(12.0, 0.0)
            predictor.failing = False
    predictor.asked.clear()
    await producer.flush(12.0, 1_700_000_000.0)
    sent = [
        [entry["num_request_waiting"] for entry in body["entries"]] for _, body in predictor.asked
    ]
    assert sent == [[2, 3], [4]]


# Without a server


def own(**parameters: Any) -> PredictedLatencyProducer:
    return PLUGINS[0].make(NAME, PredictedLatencyParameters(**parameters), Services(NoHttp()))


def _predicted(
    producer: PredictedLatencyProducer, request: InferenceRequest, *candidates: Candidate
) -> Mapping[str, LatencyPrediction] | None:
    attributes = Attributes()
    producer.produce(request, candidates, attributes)
    return attributes.get(latency_predictions_key())


def _prediction(
    producer: PredictedLatencyProducer, request: InferenceRequest, endpoint: Candidate
) -> LatencyPrediction:
    found = _predicted(producer, request, endpoint)
    assert found is not None
    return found[endpoint.key]


def _leave_for(
    producer: PredictedLatencyProducer, request: InferenceRequest, endpoint: Candidate
) -> Flight:
    attributes = Attributes()
    producer.produce(request, [endpoint], attributes)
    return _leave(producer, request, endpoint, attributes)


def test_a_model_without_enough_samples_has_no_predictions() -> None:
    producer = own()
    for _ in range(MIN_SAMPLES):
        assert _predicted(producer, STREAMING, candidate("a")) is None
        _answer(producer, _leave_for(producer, STREAMING, candidate("a")))
    found = _predicted(producer, STREAMING, candidate("a"), candidate("b", known=False))
    assert found is not None
    assert set(found) == {"default/a"}
    assert _predicted(producer, replace(STREAMING, target_model="other"), candidate("a")) is None
    assert _predicted(own(predict_in_produce=False), STREAMING, candidate("a")) is None


@pytest.mark.parametrize(
    ("headers", "headrooms", "is_valid"),
    [
        ({}, (-200.0, -200.0), False),
        ({"x-llm-d-slo-ttft-ms": "250"}, (50.0, 0.0), True),
        ({"x-llm-d-slo-ttft-ms": "150"}, (-50.0, 0.0), False),
        ({"x-llm-d-slo-tpot-ms": "210"}, (0.0, 10.0), True),
        ({"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "190"}, (50.0, -10.0), False),
    ],
)
def test_local_predictions_are_compared_with_the_objectives(
    headers: dict[str, str], headrooms: tuple[float, float], is_valid: bool
) -> None:
    producer = own()
    for _ in range(2 * MIN_SAMPLES):
        _answer(producer, _leave_for(producer, STREAMING, candidate("a")))
    one = _prediction(producer, replace(STREAMING, headers=headers), candidate("a"))
    assert (one.ttft_ms, one.tpot_ms) == pytest.approx((200.0, 200.0), rel=0.02)
    assert (one.ttft_headroom_ms, one.tpot_headroom_ms) == pytest.approx(headrooms, abs=4.0)
    assert one.is_valid is is_valid


def test_a_whole_answer_is_predicted_to_its_end() -> None:
    producer = own()
    for _ in range(MIN_SAMPLES):
        _answer(producer, _leave_for(producer, ASKING, candidate("a")))
    one = _prediction(producer, ASKING, candidate("a"))
    assert one.ttft_ms == pytest.approx(1500.0, rel=0.02)
    assert one.tpot_ms is None
    assert _predicted(producer, STREAMING, candidate("a")) is None


def test_headers_replace_the_first_token_where_bodies_are_not_shown() -> None:
    """The counter of generated tokens and the running requests give the time per token."""
    producer = own()
    for second in range(MIN_SAMPLES + 1):
        served = ServedTotals(float(second), generated_tokens=second * 80.0)
        endpoint = candidate("a", running_requests=4, served=served)
        flight = _leave_for(producer, STREAMING, endpoint)
        producer.response_head(flight, ResponseHead(200, came_at_seconds=10.3, shows_body=False))
        producer.request_ended(flight, FinishCause.COMPLETED, None, 12.0)
    one = _prediction(producer, STREAMING, candidate("a", running_requests=4))
    assert one.ttft_ms == pytest.approx(300.0, rel=0.02)
    assert one.tpot_ms == pytest.approx(50.0, rel=0.02)  # four ran, 80 a second


@pytest.mark.parametrize("shows_body", [True, False])
def test_the_first_token_is_learned_before_the_answer_ends(shows_body: bool) -> None:
    """Headers do not count before a body, because some servers send them at once."""
    producer = own()
    for number in range(MIN_SAMPLES):
        assert _predicted(producer, STREAMING, candidate("a")) is None
        flight = _leave_for(producer, STREAMING, candidate("a"))
        came = 10.01 if shows_body else 10.2
        head = ResponseHead(200, came_at_seconds=came, shows_body=shows_body)
        producer.response_head(flight, head)
        if shows_body:
            producer.response_progress(flight, ResponseProgress(10.2, 10, is_first=True))
        if number % 2:
            producer.request_ended(flight, FinishCause.RESET, None, 10.9)
    one = _prediction(producer, STREAMING, candidate("a"))
    assert one.ttft_ms == pytest.approx(200.0, rel=0.02)


def test_a_time_per_token_is_learned_with_the_mean_load_of_the_answer() -> None:
    """When the first answer of a burst begins, it has seen none of those that slow it down."""
    producer, rng = own(), Random(7)
    for number in range(4 * MIN_SAMPLES):
        running, at = rng.randrange(40), 10.0 * number
        request = replace(STREAMING, received_at_seconds=at)
        flight = _leave_for(producer, request, candidate("a"))
        producer.response_progress(flight, ResponseProgress(at + 0.2, 10, is_first=True))
        _predicted(producer, request, candidate("a", running_requests=running))
        ended = at + 0.2 + 4 * (0.01 + 0.001 * running)
        producer.response_progress(flight, ResponseProgress(ended, 90, is_last=True))
        producer.request_ended(flight, FinishCause.COMPLETED, Usage(100, 5, 105), ended)
    for running in (0, 30):
        one = _prediction(producer, STREAMING, candidate("a", running_requests=running))
        assert one.tpot_ms == pytest.approx(10 + running, rel=0.05)


@pytest.mark.parametrize("shows_body", [True, False])
def test_costs_need_the_length_of_answers(shows_body: bool) -> None:
    producer, busy = own(), candidate("a", running_requests=8)
    for second in range(2 * MIN_SAMPLES):
        if not shows_body:
            served = ServedTotals(float(second), generated_tokens=second * 40.0)  # 200 ms a token
            busy = candidate("a", running_requests=8, served=served)
        flight = _leave_for(producer, STREAMING, busy)
        head = ResponseHead(200, came_at_seconds=10.2, shows_body=shows_body)
        producer.response_head(flight, head)
        if shows_body:
            producer.response_progress(flight, ResponseProgress(10.2, 10, is_first=True))
            producer.response_progress(flight, ResponseProgress(11.0, 90, is_last=True))
        usage = Usage(100, 5, 105) if shows_body else None
        producer.request_ended(flight, FinishCause.COMPLETED, usage, 11.0)
    one = _prediction(producer, STREAMING, busy)
    assert one.tpot_ms == pytest.approx(200, rel=0.02)
    assert one.cost_ms is not None
    assert one.cost_ms >= one.ttft_ms + 5 * 200 * 0.98


def test_pending_prompts_delay_the_next_one() -> None:
    producer, rng = own(), Random(5)
    endpoint = candidate("a")
    for _ in range(4 * MIN_SAMPLES):
        before = [_leave_for(producer, STREAMING, endpoint) for _ in range(rng.randrange(4))]
        flight = _leave_for(producer, STREAMING, endpoint)
        took = 0.2 * (1 + len(before))
        producer.response_progress(flight, ResponseProgress(10 + took, 10, is_first=True))
        for one in (*before, flight):
            producer.request_ended(one, FinishCause.COMPLETED, None, 12.0)

    def ttft_ms() -> float:
        return _prediction(producer, STREAMING, endpoint).ttft_ms

    assert ttft_ms() == pytest.approx(200, rel=0.1)
    waiting = [_leave_for(producer, STREAMING, endpoint) for _ in range(3)]
    assert ttft_ms() == pytest.approx(800, rel=0.1)
    producer.response_head(waiting[0], ResponseHead(200, came_at_seconds=10.1))
    assert ttft_ms() == pytest.approx(800, rel=0.1)
    producer.response_progress(waiting[0], ResponseProgress(10.2, 10, is_first=True))
    producer.request_ended(waiting[1], FinishCause.RESET, None, 12.0)
    assert ttft_ms() == pytest.approx(400, rel=0.1)
    producer.endpoint_removed("default/a")
    producer.request_ended(waiting[2], FinishCause.COMPLETED, None, 12.0)
    assert ttft_ms() == pytest.approx(200, rel=0.1)


@dataclass
class FakeClock:
    now_seconds: float

    def now(self) -> float:
        return self.now_seconds

    async def sleep(self, seconds: float) -> None:
        self.now_seconds += seconds


def test_time_waited_reduces_the_headroom() -> None:
    """A wait in flow control is not part of the engine's latency."""
    clock = FakeClock(10.0)
    producer = PLUGINS[0].make(NAME, PredictedLatencyParameters(), Services(NoHttp(), clock=clock))
    for _ in range(2 * MIN_SAMPLES):
        _answer(producer, _leave_for(producer, STREAMING, candidate("a")))
    clock.now_seconds = 10.03
    one = _prediction(producer, STREAMING, candidate("a"))
    assert one.ttft_ms == pytest.approx(200.0, rel=0.02)
    assert one.ttft_headroom_ms == pytest.approx(150 - 30 - 200, abs=4.0)
