"""The settings of flow control, as values with their policies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from picker.framework.flow import (
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    OrderingPolicy,
    UsageLimitPolicy,
)
from picker.framework.interfaces import SaturationDetector

DEFAULT_BAND_BYTES = 1_000_000_000
DEFAULT_BAND_REQUESTS = 5000
DEFAULT_TTL_SECONDS = 60.0
DEFAULT_MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class BandSettings:
    """A band's policies, and its caps on what waits there and for how long (None: for ever)."""

    fairness: FairnessPolicy
    ordering: OrderingPolicy
    max_bytes: int = DEFAULT_BAND_BYTES
    max_requests: int = DEFAULT_BAND_REQUESTS
    request_ttl_seconds: float | None = DEFAULT_TTL_SECONDS


@dataclass(frozen=True, slots=True)
class FlowControlSettings:
    """Everything that the section `flowControl` decides.

    A cap of None is no limit, and a time of None never ends. `max_bytes` limits the bodies of
    waiting requests, `max_memory_bytes` all the memory that they take. With `eviction`, requests
    under way may be stopped.
    """

    default_band: BandSettings
    default_negative_band: BandSettings
    usage_limits: UsageLimitPolicy
    detector: SaturationDetector
    detector_name: str
    bands: Mapping[int, BandSettings] = field(default_factory=lambda: MappingProxyType({}))
    max_bytes: int | None = None
    max_requests: int | None = None
    max_memory_bytes: int | None = DEFAULT_MEMORY_BYTES
    no_endpoint_ttl_seconds: float | None = DEFAULT_TTL_SECONDS
    eviction: tuple[EvictionFilter, EvictionOrder] | None = None
