"""The shapes of what the HTTP port answers with, which other programs read too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from picker.admin.history import HistoryView
from picker.types import EndpointMetrics, Percentiles

LIST: Final = "/pools"
PREFIX: Final = "/pools/"


class HealthView(msgspec.Struct, frozen=True):
    """How an endpoint has answered lately: `state` is healthy, suspect, ejected, on-trial, or
    unknown for one that has answered neither a scrape nor a request lately, or never.
    """

    state: str
    consecutive_failures: int = 0
    ejections: int = 0
    next_probe_seconds: float | None = None


class ConfigView(msgspec.Struct, frozen=True):
    """The configuration in use: whence it came, as it was written, with its defaults, since when,
    and the names of its plugins whose types are alpha.
    """

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
    """One endpoint.

    `metrics` is None while its load is unknown; then `last_metrics` is what was known last, and
    `metrics_age_seconds` how old that is. Rates of requests and `prefix_hit_share` are those of the
    last ten seconds (see `traffic.Recent`), None where this process does not know them, as are
    `tokens_per_second` and `ttft`, which counts from the arrival at the endpoint (see
    `traffic.Served`).
    """

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
    """Rates of the pool as in `PoolSample`, and times to the first token that its clients see."""

    requests_per_second: float | None = None
    refusals_per_second: float | None = None
    failures_per_second: float | None = None
    tokens_per_second: float | None = None
    ttft: Percentiles | None = None


class AboutView(msgspec.Struct, frozen=True):
    """The identity of a picker: its pool, its version, and its start."""

    pool: str = ""
    version: str = ""
    started_unix_seconds: float = 0.0


class EndpointsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pool and its endpoints, in the order in which they were first named; `history` where
    asked for. Then all numbers are those of its last sample, else those of now.
    """

    endpoints: tuple[EndpointView, ...]  # without a default: none are told of as well
    pool: PoolRates = PoolRates()
    history: HistoryView | None = None
    about: AboutView = AboutView()


class PoolSummary(msgspec.Struct, frozen=True):
    """One pool: what it is called, where more is told of it, and how it is."""

    name: str
    path: str
    ready: bool
    endpoints: int = 0
    inflight_requests: int = 0
    problem: str | None = None


class PoolsView(msgspec.Struct, frozen=True):
    """All of them."""

    pools: tuple[PoolSummary, ...]
