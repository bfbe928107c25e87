"""The protocol of latency predictors: rows, samples, answers and settings."""

from typing import Any

import pytest

from picker.contrib.latency._predictor import (
    Features,
    Measurement,
    Predicted,
    PredictorSettings,
    Sample,
    predictor_settings,
    read_predictions,
)

FEATURES = Features(0.5, 100, 3, 2, 0.25)


def test_a_row_has_the_names_of_the_wire() -> None:
    assert FEATURES.row() == {
        "kv_cache_percentage": 0.5,
        "input_token_length": 100,
        "num_request_waiting": 3,
        "num_request_running": 2,
        "prefix_cache_score": 0.25,
        "num_tokens_generated": 1,
        "encoder_input_size": 0.0,
        "encoder_matched_size": 0.0,
        "pod_type": "",
        "prefill_tokens_in_flight": 0,
        "decode_tokens_in_flight": 0,
    }


def test_an_entry_has_the_time_of_day_of_its_sample() -> None:
    """The hooks use another clock than the protocol."""
    entry = Sample(FEATURES, 98.5, 120.0, None, 7).entry(100.0, 1_700_000_000.0)
    assert entry["timestamp"] == "2023-11-14T22:13:18.500+00:00"
    assert entry["actual_ttft_ms"] == 120.0
    assert entry["actual_tpot_ms"] == 0.0
    assert entry["num_tokens_generated"] == 7
    assert entry["input_token_length"] == 100


def test_a_whole_response_is_measured_to_its_end() -> None:
    """The client sees no token before the end."""
    measurement = Measurement("default/a", None)
    sample = measurement.whole(FEATURES, 10.0, 12.5, 0)
    assert sample == Sample(FEATURES, 12.5, 2500.0, None, 1)


@pytest.mark.parametrize(
    ("first", "last", "generated", "ttft_ms", "tpot_ms"),
    [
        (10.5, 12.5, 5, 500.0, 500.0),
        (10.5, 12.5, 1, 500.0, None),
        (10.5, None, 5, 500.0, None),
        (9.5, 9.5, 2, 0.0, 0.0),
    ],
)
def test_a_streamed_response_is_measured_per_token(
    first: float, last: float | None, generated: int, ttft_ms: float, tpot_ms: float | None
) -> None:
    """The time of the first token is not part of the others'."""
    measurement = Measurement("default/a", None)
    measurement.first, measurement.last = first, last
    sample = measurement.streamed(FEATURES, 10.0, 13.0, generated)
    assert sample == Sample(FEATURES, 13.0, ttft_ms, tpot_ms, generated)


def test_a_response_without_pieces_is_no_sample() -> None:
    assert Measurement("default/a", None).streamed(FEATURES, 10.0, 13.0, 5) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"predictions": [{"ttft_ms": 1, "tpot_ms": 2.5}]}, (Predicted(1.0, 2.5),)),
        ({"predictions": [{"ttft_ms": 0, "tpot_ms": 0}]}, (Predicted(0.0, 0.0),)),
        ({"predictions": [{"ttft_ms": -1, "tpot_ms": 2.5}]}, (None,)),
        ({"predictions": [{"ttft_ms": float("nan"), "tpot_ms": 2.5}]}, (None,)),
        ({"predictions": [{"ttft_ms": 1e300, "tpot_ms": 2.5}]}, (None,)),
        ({"predictions": [{"ttft_ms": 10**400, "tpot_ms": 2.5}]}, (None,)),
        ({"predictions": [{"ttft_ms": True, "tpot_ms": 2.5}]}, (None,)),
        ({"predictions": [{"ttft_ms": 1}]}, (None,)),
        ({"predictions": [None]}, (None,)),
    ],
)
def test_an_unusable_prediction_is_none(
    answer: Any, expected: tuple[Predicted | None, ...]
) -> None:
    assert read_predictions(answer, 1) == expected


@pytest.mark.parametrize("answer", [None, [], {}, {"predictions": None}, {"predictions": []}])
def test_an_answer_needs_one_prediction_per_row(answer: Any) -> None:
    with pytest.raises(ValueError, match="1 predictions"):
        read_predictions(answer, 1)


def test_settings_come_from_the_configuration_before_the_environment() -> None:
    environment = {
        "PREDICTION_SERVER_URL": "http://p1:8001/, https://p2",
        "TRAINING_SERVER_URL": "http://t:8000",
        "LATENCY_MAX_SAMPLE_SIZE": "5",
        "LATENCY_FLUSH_INTERVAL_SEC": "0.5",
        "LATENCY_HTTP_TIMEOUT_SEC": "3",
        "LATENCY_MAX_BULK_SIZE": "7",
    }
    assert predictor_settings("", "", {}) == PredictorSettings()
    assert predictor_settings("", "", environment) == PredictorSettings(
        ("http://p1:8001", "https://p2"), "http://t:8000", 5, 0.5, 3.0, 7
    )
    settings = predictor_settings("http://own", "http://own:1", environment)
    assert (settings.prediction_urls, settings.training_url) == (("http://own",), "http://own:1")


@pytest.mark.parametrize(
    "environment",
    [
        {"PREDICTION_SERVER_URL": "localhost:8000"},
        {"TRAINING_SERVER_URL": "ftp://host"},
        {"LATENCY_MAX_SAMPLE_SIZE": "0"},
        {"LATENCY_MAX_BULK_SIZE": "0.5"},
        {"LATENCY_FLUSH_INTERVAL_SEC": "soon"},
        {"LATENCY_HTTP_TIMEOUT_SEC": "-1"},
    ],
)
def test_invalid_settings_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"URL|LATENCY"):
        predictor_settings("", "", environment)
