"""How series are declared: under which prefix, with which deprecated names beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from picker.metrics.series import AnySeries, Counter, Declaration, Gauge, Histogram, Twin

SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TTFT_SECONDS = SECONDS[:24]  # to two minutes
FAST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PROCESSING_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RESPONSE_PROCESSING_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5),
)
NTPOT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
ITL_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
REQUEST_BYTES = tuple(64 * 2**k for k in range(25))
# 32778 is the reference's; another bound would be another series in sums.
RESPONSE_BYTES = (1, *(8 * 2**k for k in range(12)), 32778, 65536)
INPUT_TOKENS = (*RESPONSE_BYTES, 131072, 262144, 524288, 1048576)
OUTPUT_TOKENS = (1, *(8 * 2**k for k in range(11)))
RATIOS = tuple(k / 10 for k in range(11))
HIT_BYTES = (0, *(16 * 2**k for k in range(13)))
PREDICTED_TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.8, 1, 1.5, 2, 3, 4.5, 6, 12, 18, 24, 30, 36, 48, 60, 90, 120, 180, 270, 360),
)
PREDICTION_SECONDS = (0.0001, 0.0005, *FAST_SECONDS[3:], 0.2, 0.5, 1, 2, 5)
STREAM_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)


PREFIX = "llm_d_epp_"
OBJECTIVE_PREFIX = "inference_objective_"  # deprecated, as are those that follow
POOL_PREFIX = "inference_pool_"
EXTENSION_PREFIX = "inference_extension_"
SCHEDULER_PREFIX = "llm_d_inference_scheduler_"
KV_CACHE_PREFIX = "kvcache_"
OWN_PREFIX = "pointsman_"  # what the reference has no name for

REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
MODEL_LABELS = REQUEST_LABELS[:2]
S = TypeVar("S", Counter, Gauge, Histogram)


class Declarations:
    """Makes series and adds them to `declared`, in order."""

    def __init__(self, declared: list[AnySeries]) -> None:
        self._series = declared

    def _of_requests(
        self, name: str, text: str, buckets: Iterable[float], deprecated: str
    ) -> Histogram:
        """A histogram with the labels of requests, and its twin with those of models."""
        twins = objective(deprecated, MODEL_LABELS)
        return self._histogram(name, text, buckets, REQUEST_LABELS, twins)

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...] = (), twins: tuple[Twin, ...] = ()
    ) -> Counter:
        return self._kept(Counter(Declaration(PREFIX + name, text, labels, twins)))

    def _own_counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._kept(Counter(Declaration(OWN_PREFIX + name, text, labels)))

    def _own_gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._kept(Gauge(Declaration(OWN_PREFIX + name, text, labels)))

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...] = (), twins: tuple[Twin, ...] = ()
    ) -> Gauge:
        return self._kept(Gauge(Declaration(PREFIX + name, text, labels, twins)))

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Iterable[float],
        labels: tuple[str, ...] = (),
        twins: tuple[Twin, ...] = (),
    ) -> Histogram:
        return self._kept(Histogram(Declaration(PREFIX + name, text, labels, twins), buckets))

    def _kept(self, series: S) -> S:
        self._series.append(series)
        return series


def objective(name: str, labels: tuple[str, ...]) -> tuple[Twin, ...]:
    """The twin `name` under the prefix of objectives, with `labels`."""
    return (Twin(OBJECTIVE_PREFIX + name, labels),)


def extension(name: str, labels: tuple[str, ...] = ()) -> tuple[Twin, ...]:
    """The twin `name` under the prefix of the extension, with `labels`."""
    return (Twin(EXTENSION_PREFIX + name, labels),)
