"""How series are declared: under which prefix, with which deprecated names beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from picker.metrics.series import AnySeries, Counter, Declaration, Gauge, Histogram, Twin

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
