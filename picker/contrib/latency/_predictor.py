"""The protocol of external latency predictors: settings, rows of features, answers, samples.

A predictor consists of two servers, so that learning does not slow the answers down:

    POST <prediction>/predict/bulk/strict        {"requests": [row, …]}
                                                 → {"predictions": [{"ttft_ms", "tpot_ms"}, …]}
    POST <training>/add_training_data_bulk       {"entries": [row + actual latencies, …]} → 202
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple

from picker.contrib.latency._model import LoadFeatures, LoadIntegral
from picker.framework.attributes import DataKey

PREDICT_PATH = "/predict/bulk/strict"
TRAIN_PATH = "/add_training_data_bulk"


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    prediction_urls: tuple[str, ...] = ()
    training_url: str | None = None
    max_samples: int = 1000
    flush_interval_seconds: float = 1.0
    timeout_seconds: float = 10.0
    max_rows: int = 100


def predictor_settings(
    prediction_urls: str, training_url: str, environment: Mapping[str, str]
) -> PredictorSettings:
    """Read the settings of a configuration, with the reference's environment variables as defaults.
    `prediction_urls` is a comma-separated list. Raises `ValueError`.
    """
    prediction = prediction_urls or environment.get("PREDICTION_SERVER_URL", "")
    training = training_url or environment.get("TRAINING_SERVER_URL", "")
    urls = tuple(_url(text.strip()) for text in prediction.split(",") if text.strip())
    return PredictorSettings(
        prediction_urls=urls,
        training_url=_url(training.strip()) if training.strip() else None,
        max_samples=int(_positive(environment, "LATENCY_MAX_SAMPLE_SIZE", 1000)),
        flush_interval_seconds=_positive(environment, "LATENCY_FLUSH_INTERVAL_SEC", 1.0),
        timeout_seconds=_positive(environment, "LATENCY_HTTP_TIMEOUT_SEC", 10.0),
        max_rows=int(_positive(environment, "LATENCY_MAX_BULK_SIZE", 100)),
    )


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(
            f"'{text}' is not a URL of a latency predictor: it must begin with http:// or https://"
        )
    return text.rstrip("/")


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value >= 1 or (value > 0 and name.endswith("_SEC")))):
        raise ValueError(f"{name} must be a positive number, got '{text}'")
    return value


@dataclass(frozen=True, slots=True)
class Features:
    """One request at one endpoint as the predictor sees it, with the field names of its protocol.

    `num_request_running` counts this picker's requests in flight there; `kv_cache_percentage` is
    between 0 and 1 despite its name.
    """

    kv_cache_percentage: float
    input_token_length: int
    num_request_waiting: int
    num_request_running: int
    prefix_cache_score: float
    num_tokens_generated: int = 1
    encoder_input_size: float = 0.0
    encoder_matched_size: float = 0.0
    pod_type: str = ""
    prefill_tokens_in_flight: int = 0
    decode_tokens_in_flight: int = 0

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FEATURES}


_FEATURES = tuple(field.name for field in fields(Features))


@dataclass(frozen=True, slots=True)
class Sample:
    """The actual latencies of a request; None here is 0 on the wire."""

    features: Features
    taken_at_seconds: float
    ttft_ms: float | None
    tpot_ms: float | None
    num_tokens_generated: int

    def entry(self, now_seconds: float, unix_seconds: float) -> dict[str, Any]:
        """Return the JSON object; both arguments are the same moment, on two clocks."""
        taken = datetime.fromtimestamp(unix_seconds - (now_seconds - self.taken_at_seconds), UTC)
        return self.features.row() | {
            "num_tokens_generated": self.num_tokens_generated,
            "actual_ttft_ms": self.ttft_ms or 0.0,
            "actual_tpot_ms": self.tpot_ms or 0.0,
            "timestamp": taken.isoformat(timespec="milliseconds"),
        }


class Predicted(NamedTuple):
    """Milliseconds, finite and not negative; `tpot_ms` is None if unknown."""

    ttft_ms: float
    tpot_ms: float | None


class Outcome(NamedTuple):
    """One latency of a request with its prediction and predicted p90, in milliseconds; `kind` is
    `ttft` or `tpot`.
    """

    kind: str
    seen_ms: float
    expected_ms: float
    p90_ms: float | None


class Measurement:
    """One request in flight: the state when it left, and the times of its response.

    `features` and `load` are None for an endpoint of unknown load, `predicted` and `p90` without a
    prediction. `outcomes` are set at the end.
    """

    __slots__ = (
        "__weakref__",
        "begun",
        "failed",
        "features",
        "first",
        "integral",
        "key",
        "last",
        "load",
        "load_at_first",
        "outcomes",
        "p90",
        "pending",
        "predicted",
        "tpot_objective_ms",
    )

    def __init__(self, key: str, tpot_objective_ms: float | None) -> None:
        self.key = key
        self.features: Features | None = None
        self.tpot_objective_ms = tpot_objective_ms
        self.load: LoadFeatures | None = None
        self.integral: LoadIntegral | None = None  # of the endpoint
        self.load_at_first: Sequence[float] = ()  # its value at the first token
        self.pending = 0.0  # 1024 tokens
        self.begun = 0.0
        self.first: float | None = None
        self.last: float | None = None
        self.failed = False
        self.predicted: Predicted | None = None
        self.p90: Predicted | None = None
        self.outcomes: tuple[Outcome, ...] = ()

    def whole(self, features: Features, begun: float, now_seconds: float, generated: int) -> Sample:
        """Return a sample of the time to the end; `begun` is the request's arrival."""
        took_ms = _ms(now_seconds - begun)
        return Sample(features, now_seconds, took_ms, None, max(1, generated))

    def streamed(
        self, features: Features, begun: float, now_seconds: float, generated: int
    ) -> Sample | None:
        """Return a sample of TTFT (to the first piece) and TPOT; None without a piece."""
        if self.first is None:
            return None
        tpot_ms = self.tpot_ms(generated)
        ttft_ms = _ms(self.first - begun)
        return Sample(features, now_seconds, ttft_ms, tpot_ms, max(1, generated))

    @property
    def ttft_ms(self) -> float | None:
        """The time from the departure of the request to its first token; None before that token."""
        return None if self.first is None else _ms(self.first - self.begun)

    def tpot_ms(self, generated: int) -> float | None:
        """Return the time per token after the first piece; None for fewer than two tokens, or
        without a piece.
        """
        if self.first is None or self.last is None or generated < 2:
            return None
        return _ms((self.last - self.first) / (generated - 1))

    def compare(self, ttft_ms: float | None, tpot_ms: float | None) -> None:
        if self.predicted is None:
            return
        p90_first, p90_each = (None, None) if self.p90 is None else self.p90
        rows = (
            ("ttft", ttft_ms, self.predicted.ttft_ms, p90_first),
            ("tpot", tpot_ms, self.predicted.tpot_ms, p90_each),
        )
        self.outcomes = tuple(
            Outcome(kind, seen, expected, p90)
            for kind, seen, expected, p90 in rows
            if seen and expected is not None
        )


def measurement_key(producer: str) -> DataKey[Measurement]:
    return DataKey("LatencyMeasurement", producer)


def _ms(seconds: float) -> float:
    return max(0.0, seconds * 1000)


def read_predictions(answer: Any, expected: int) -> tuple[Predicted | None, ...]:
    """Return the predictions in the order of the rows, None for an unusable one. Raises
    `ValueError` unless there are `expected` of them.
    """
    found = answer.get("predictions") if isinstance(answer, Mapping) else None
    if not isinstance(found, list) or len(found) != expected:
        raise ValueError(f"the answer does not hold {expected} predictions")
    return tuple(_predicted(one) for one in found)


def _predicted(value: Any) -> Predicted | None:
    if not isinstance(value, Mapping):
        return None
    ttft_ms, tpot_ms = _milliseconds(value.get("ttft_ms")), _milliseconds(value.get("tpot_ms"))
    return None if ttft_ms is None or tpot_ms is None else Predicted(ttft_ms, tpot_ms)


def _milliseconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e15 else None
