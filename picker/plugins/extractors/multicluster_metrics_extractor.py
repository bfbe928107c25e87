"""multicluster-metrics-extractor: the load of a whole pool, from its picker's metrics page.

    llm-d.ai/multicluster-queue-size            = `queueSizeMetric`, 0 and above
    llm-d.ai/multicluster-kv-cache-utilization  = `kvCacheUtilizationMetric`, in [0, 1]

both under the name multicluster-metrics-extractor. The metrics are by default those averages that a
picker tells of its pool; a spec is `name` or `name{label=value,…}`. Of several samples (a page that
tells of several pools) the greatest counts. What is missing or unusable is reported, and unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.scheduling.endpoint_attributes import (
    MULTICLUSTER_KV_CACHE_UTILIZATION,
    MULTICLUSTER_METRICS,
    MULTICLUSTER_QUEUE_SIZE,
)
from picker.scrape.engines import Series, parse_series
from picker.scrape.exposition import scan
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.types import Endpoint


class MulticlusterMetricsParameters(Parameters, frozen=True):
    kv_cache_utilization_metric: str = "llm_d_epp_average_kv_cache_utilization"
    queue_size_metric: str = "llm_d_epp_average_queue_size"


class MulticlusterMetricsExtractor:
    """Reads pages of pickers."""

    def __init__(self, parameters: MulticlusterMetricsParameters) -> None:
        """Raises `ValueError` for specs that cannot be read."""
        self._queue = _series("queueSizeMetric", parameters.queue_size_metric)
        self._usage = _series("kvCacheUtilizationMetric", parameters.kv_cache_utilization_metric)

    def extract(self, scrape: Scrape) -> Extraction:
        """The two numbers. Raises `ExtractError` when the page has neither."""
        found: dict[str, float] = {}
        problems: list[str] = []
        for attribute, series, most in (
            (MULTICLUSTER_QUEUE_SIZE, self._queue, math.inf),
            (MULTICLUSTER_KV_CACHE_UTILIZATION, self._usage, 1.0),
        ):
            values = [one for one in _values(scrape.page, series) if 0 <= one <= most]
            finite = [one for one in values if math.isfinite(one)]
            if finite:
                found[f"{attribute}/{MULTICLUSTER_METRICS}"] = max(finite)
            else:
                problems.append(f"series '{series.name}' has no usable sample")
        if not found:
            raise ExtractError("; ".join(problems))
        return Extraction(attributes=found, problems=tuple(problems))

    def series(self, endpoint: Endpoint) -> Sequence[str]:
        """Both."""
        return (self._queue.name, self._usage.name)


def _series(parameter: str, spec: str) -> Series:
    series = parse_series(spec)
    if series is None:
        raise ValueError(f"{parameter} must name a series")
    return series


def _values(page: bytes, series: Series) -> Iterator[float]:
    for sample in scan(page, (series.name,)).get(series.name, ()):
        if all(sample.labels.get(label) == value for label, value in series.labels.items()):
            yield sample.value


PLUGIN = PluginType(
    MULTICLUSTER_METRICS,
    MulticlusterMetricsParameters,
    configured(MulticlusterMetricsExtractor),
    stability=Stability.ALPHA,
)
