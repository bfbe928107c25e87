"""The JSON of the HTTP port, which other programs read too."""

from collections.abc import Mapping
from typing import Final

import msgspec

from picker.admin.history import HistoryView
from picker.types import EndpointMetrics, Percentiles

LIST: Final = "/pools"
PREFIX: Final = "/pools/"


class HealthView(msgspec.Struct, frozen=True):
    """An endpoint's `state`: healthy, suspect, ejected, on-trial, or unknown (no recent answer)."""

    state: str
    consecutive_failures: int = 0
    ejections: int = 0
    next_probe_seconds: float | None = None


class ConfigView(msgspec.Struct, frozen=True):
    """The configuration in use."""

    source: str
    written: str
    effective: str
    loaded_unix_seconds: float
    warnings: tuple[str, ...] = ()
    last_error: str | None = None
    experimental: tuple[str, ...] = ()


HEALTHY: Final = HealthView("healthy")
UNKNOWN: Final = HealthView("unknown")
NOT_USABLE: Final = frozenset({"ejected", "unknown"})  # states


class EndpointView(msgspec.Struct, frozen=True):
    """An endpoint, with rates of `traffic.Recent`, `ttft` of `traffic.Served`; None: unknown."""

    key: str
    name: str
    namespace: str
    address: str
    labels: Mapping[str, str]
    health: HealthView
    inflight_requests: int
    metrics: EndpointMetrics | None = None
    last_metrics: EndpointMetrics | None = None
    metrics_age_seconds: float | None = None
    requests_per_second: float | None = None
    prefix_hit_share: float | None = None
    failures_per_second: float | None = None
    tokens_per_second: float | None = None
    ttft: Percentiles | None = None


class PoolRates(msgspec.Struct, frozen=True):
    """The rates of `PoolValues`, and the times to the first token that clients see."""

    requests_per_second: float | None = None
    refusals_per_second: float | None = None
    failures_per_second: float | None = None
    tokens_per_second: float | None = None
    ttft: Percentiles | None = None


class AboutView(msgspec.Struct, frozen=True):
    pool: str = ""
    version: str = ""
    started_unix_seconds: float = 0.0


class EndpointsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The endpoints in the order of discovery; with `history`, numbers are from its last sample."""

    endpoints: tuple[EndpointView, ...]  # no default, so that an empty pool is encoded too
    pool: PoolRates = PoolRates()
    history: HistoryView | None = None
    about: AboutView = AboutView()


class PoolSummary(msgspec.Struct, frozen=True):
    name: str
    path: str
    ready: bool
    endpoints: int = 0
    inflight_requests: int = 0
    problem: str | None = None


class PoolsView(msgspec.Struct, frozen=True):
    pools: tuple[PoolSummary, ...]
