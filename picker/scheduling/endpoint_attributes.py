"""Numbers that the data layer knows of an endpoint, by the name of the attribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from picker.types import Candidate, EndpointMetrics

CORE_METRICS = "core-metrics-extractor"

_CORE: Mapping[str, Callable[[EndpointMetrics], float | None]] = MappingProxyType(
    {
        "WaitingQueueSize": lambda metrics: metrics.waiting_requests,
        "RunningRequestsSize": lambda metrics: metrics.running_requests,
        "KVCacheUsagePercent": lambda metrics: metrics.kv_cache_usage,
        "CacheBlockSize": lambda metrics: metrics.block_size_tokens,
        "CacheNumBlocks": lambda metrics: metrics.num_kv_blocks,
        "MaxActiveModels": lambda metrics: metrics.max_active_models,
    }
)


def check_attribute(attribute: str, producer: str | None) -> str:
    """The producer that is meant, `core-metrics-extractor` when none is named.

    Raises `ValueError` for an empty name, and for one with a slash when no producer is named: it
    would look like `Type/producer`.
    """
    if not attribute:
        raise ValueError("the name of the attribute is missing")
    if "/" in attribute and not producer:
        raise ValueError(f"'{attribute}' has a slash: name its producer in 'producer'")
    return producer or CORE_METRICS


def attribute_number(candidate: Candidate, attribute: str, producer: str) -> float | None:
    """The number called `attribute/producer`, None while it is unknown or no finite number.

    Findings of extractors come first; the core metrics are known by their names as well, while the
    endpoint's load is known.
    """
    value = candidate.attributes.get(f"{attribute}/{producer}")
    if value is None and producer == CORE_METRICS and candidate.metrics is not None:
        read = _CORE.get(attribute)
        value = None if read is None else read(candidate.metrics)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
