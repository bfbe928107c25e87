"""What people are shown of the endpoints."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from picker.admin.history import HistoryView
from picker.admin.sources import HealthView
from picker.types import EndpointMetrics

HEALTHY = HealthView("healthy")


class EndpointView(msgspec.Struct, frozen=True):
    """One endpoint.

    `metrics` is None while its load is unknown; then `last_metrics` is what was known last, and
    `metrics_age_seconds` how old that is. `requests_per_second` and `prefix_hit_share` are those of
    the last ten seconds (see `traffic.Recent`), None where this process does not know them.
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


class EndpointsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pool, in the order in which endpoints were first named; `history` where asked for."""

    endpoints: tuple[EndpointView, ...]  # without a default: none are told of as well
    history: HistoryView | None = None
