"""Routing between clusters: an endpoint is a whole pool, and its address that of a gateway.

multicluster-file-discovery: the pools of other clusters, listed in a file. It is file-discovery,
but `address`, that of the pool's gateway, may also be a DNS name, which is not resolved: the
gateway in front must be able to route to names. The labels `metricsAddress` and `metricsPort` say
where the picker of that pool publishes its metrics.

multicluster-metrics-data-source: where other clusters' pickers report load. It is
metrics-data-source with defaults for a path between clusters.

multicluster-metrics-extractor: a pool's load, from its picker's page.

    llm-d.ai/multicluster-queue-size            = `queueSizeMetric`, at least 0
    llm-d.ai/multicluster-kv-cache-utilization  = `kvCacheUtilizationMetric`, in [0, 1]

Both have the producer multicluster-metrics-extractor. A spec is `name` or `name{label=value,…}`; of
several samples (a page that reports several pools) the greatest counts. A missing or unusable
series is reported as a problem, and its number is unknown.

multicluster-session-affinity-filter: session-affinity-filter where the endpoints are clusters.

multicluster-approx-prefix-cache-producer: guess which cluster has seen the prompt. It is
approx-prefix-cache-producer; set `lruCapacityPerServer` to the capacity of a pool.

multicluster-prefix-cache-scorer: prefer pools that saw the prompt before. It is prefix-cache-scorer
for the matches of a multicluster-approx-prefix-cache-producer.

multicluster-queue-scorer: prefer pools with short queues.

    score = (max − q) / (max − min)        over the candidates; 1.0 when all are equal

multicluster-kv-cache-utilization-scorer: prefer pools with free KV cache.

    score = 1 − u        clamped to 0..1

`q` and `u` are the attributes above. A pool that reports only the other one gets the mean of the
other pools; one that reports neither scores 0.0 and is left out of min and max.
"""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability
from picker.plugins._shared.load_signals import least_first, with_neutral
from picker.plugins.discoveries import FileDiscoverySettings
from picker.plugins.endpoint_attribute import attribute_number
from picker.plugins.producers.approx_prefix_cache_producer import ApproxPrefixCacheProducer
from picker.plugins.scorers.prefix_cache_scorers import PrefixCacheParameters, PrefixCacheScorer
from picker.plugins.session_affinity import SessionAffinityFilter
from picker.prefix.match import MATCH_INFO
from picker.scrape.engines import Series, parse_series
from picker.scrape.exposition import scan
from picker.scrape.sources import (
    ExtractError,
    Extraction,
    PageLocation,
    PageParameters,
    Scrape,
    checked_source,
)
from picker.types import Candidates, Endpoint, InferenceRequest

EXTRACTOR = "multicluster-metrics-extractor"
QUEUE_SIZE = "llm-d.ai/multicluster-queue-size"
KV_CACHE_UTILIZATION = "llm-d.ai/multicluster-kv-cache-utilization"


class MulticlusterFileDiscoverySettings(FileDiscoverySettings, frozen=True):
    routes_to_names: ClassVar[bool] = True


class MulticlusterMetricsDataSource(PageParameters, frozen=True, kw_only=True):
    scheme: str = "https"
    insecure_skip_verify: bool = False
    path: str = "/metrics"
    port: int | None = None

    @property
    def location(self) -> PageLocation:
        return self.locate(self.path, self.port)


class MulticlusterMetricsParameters(Parameters, frozen=True):
    kv_cache_utilization_metric: str = "llm_d_epp_average_kv_cache_utilization"
    queue_size_metric: str = "llm_d_epp_average_queue_size"


class MulticlusterMetricsExtractor:
    def __init__(self, parameters: MulticlusterMetricsParameters) -> None:
        self._queue = _series("queueSizeMetric", parameters.queue_size_metric)
        self._usage = _series("kvCacheUtilizationMetric", parameters.kv_cache_utilization_metric)

    def extract(self, scrape: Scrape) -> Extraction:
        found: dict[str, float] = {}
        problems: list[str] = []
        for attribute, series, limit in (
            (QUEUE_SIZE, self._queue, math.inf),
            (KV_CACHE_UTILIZATION, self._usage, 1.0),
        ):
            values = [one for one in _values(scrape.page, series) if 0 <= one <= limit]
            finite = [one for one in values if math.isfinite(one)]
            if finite:
                found[f"{attribute}/{EXTRACTOR}"] = max(finite)
            else:
                problems.append(f"series '{series.name}' has no usable sample")
        if not found:
            raise ExtractError("; ".join(problems))
        return Extraction(attributes=found, problems=tuple(problems))

    def series(self, endpoint: Endpoint) -> Sequence[str]:
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


class MulticlusterPrefixCacheParameters(PrefixCacheParameters, frozen=True):
    prefix_match_info_producer_name: str = "multicluster-approx-prefix-cache-producer"


class MulticlusterQueueScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return least_first(_reported(candidates, QUEUE_SIZE))


class MulticlusterKvCacheUtilizationScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        usages = _reported(candidates, KV_CACHE_UTILIZATION)
        return [0.0 if usage is None else 1.0 - min(max(usage, 0.0), 1.0) for usage in usages]


def _reported(candidates: Candidates, attribute: str) -> list[float | None]:
    """Return the `attribute` of each pool: the mean of the others if it is missing, None if queue
    size and KV cache use are both missing.
    """
    other = KV_CACHE_UTILIZATION if attribute == QUEUE_SIZE else QUEUE_SIZE
    found = [attribute_number(one, attribute, EXTRACTOR) for one in candidates]
    unknown = [
        number is None and attribute_number(one, other, EXTRACTOR) is None
        for one, number in zip(candidates, found, strict=True)
    ]
    return with_neutral(found, unknown)


PLUGINS = (
    PluginType("multicluster-file-discovery", MulticlusterFileDiscoverySettings, Stability.ALPHA),
    PluginType(
        "multicluster-metrics-data-source",
        checked_source,
        Stability.ALPHA,
        parameters=MulticlusterMetricsDataSource,
    ),
    PluginType(EXTRACTOR, MulticlusterMetricsExtractor, Stability.ALPHA),
    PluginType("multicluster-session-affinity-filter", SessionAffinityFilter, Stability.ALPHA),
    PluginType(
        "multicluster-approx-prefix-cache-producer",
        ApproxPrefixCacheProducer,
        Stability.ALPHA,
        default_for=(MATCH_INFO,),
    ),
    PluginType(
        "multicluster-prefix-cache-scorer",
        PrefixCacheScorer,
        Stability.ALPHA,
        parameters=MulticlusterPrefixCacheParameters,
    ),
    PluginType("multicluster-queue-scorer", MulticlusterQueueScorer, Stability.ALPHA),
    PluginType(
        "multicluster-kv-cache-utilization-scorer",
        MulticlusterKvCacheUtilizationScorer,
        Stability.ALPHA,
    ),
)
