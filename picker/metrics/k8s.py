"""The series about following Kubernetes: how often it was asked, what it said, what went wrong; and
about who leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries, Counter, Gauge

_LABELS = ("resource", "namespace")
_KINDS = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


class KubernetesSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.lists_total = self._own_counter(
            "kubernetes_lists_total", "Lists asked of the API server.", _LABELS
        )
        self.watches_total = self._own_counter(
            "kubernetes_watches_total", "Watches opened at the API server.", _LABELS
        )
        self.events_total = self._own_counter(
            "kubernetes_events_total", "Events of watches.", (*_LABELS, "type")
        )
        self.errors_total = self._own_counter(
            "kubernetes_errors_total",
            "Lists and watches that failed, by HTTP status, unreachable or silent.",
            (*_LABELS, "reason"),
        )
        self.changes_total = self._own_counter(
            "kubernetes_changes_total", "Times that the known objects changed.", _LABELS
        )
        self.age_seconds = self._own_gauge(
            "kubernetes_silent_seconds",
            "Seconds since the API server was last heard of a selection.",
            (*_LABELS, "selector"),
        )

        self.election = ElectionSeries(declared)

    def of(self, resource: str, namespace: str) -> SubjectSeries:
        """Those of one subject."""
        return SubjectSeries(
            resource,
            namespace,
            lists=self.lists_total.labels(resource, namespace),
            watches=self.watches_total.labels(resource, namespace),
            changes=self.changes_total.labels(resource, namespace),
            events=self.events_total,
            errors=self.errors_total,
            age=self.age_seconds,
        )


@dataclass(frozen=True, slots=True)
class SubjectSeries:
    """The series with the labels of one subject."""

    resource: str
    namespace: str
    lists: Counter
    watches: Counter
    changes: Counter
    events: Counter
    errors: Counter
    age: Gauge

    def count(self, kind: str) -> None:
        """An event of a watch; kinds that do not exist share a label."""
        label = kind if kind in _KINDS else "unknown"
        self.events.labels(self.resource, self.namespace, label).inc()

    def count_error(self, reason: str) -> None:
        """A list or a watch that failed."""
        self.errors.labels(self.resource, self.namespace, reason).inc()

    @contextmanager
    def age_shown(self, selector: str, age: Callable[[], float | None]) -> Iterator[None]:
        """Tell how long nothing was heard, for the length of the block."""
        began = self.age.labels(self.resource, self.namespace, selector)
        began.set_function(lambda: age() or 0.0)
        try:
            yield
        finally:
            self.age.remove(self.resource, self.namespace, selector)


class ElectionSeries(Declarations):
    """Owns those about who leads; there are none without an election."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.leader = self._own_gauge("leader", "1 while this replica leads.", ("lease",))
        self.renewal_age_seconds = self._own_gauge(
            "lease_renewal_age_seconds",
            "Seconds since this replica last took or renewed the lease.",
            ("lease",),
        )
        self.changes_total = self._own_counter(
            "leader_changes_total",
            "Times that this replica began and ceased to lead.",
            ("lease", "change"),
        )
        self.errors_total = self._own_counter(
            "lease_errors_total",
            "Requests about the lease that failed, by HTTP status or unreachable.",
            ("lease", "reason"),
        )
        self.all = (self.leader, self.renewal_age_seconds, self.changes_total, self.errors_total)

    def of(self, lease: str) -> LeaseSeries:
        """Those of one lease."""
        return LeaseSeries(lease, self)


@dataclass(frozen=True, slots=True)
class LeaseSeries:
    """The series with the label of one lease."""

    lease: str
    series: ElectionSeries

    @contextmanager
    def shown(self, is_leader: Callable[[], bool]) -> Iterator[None]:
        """Tell whether this replica leads, for the length of the block."""
        self.series.leader.labels(self.lease).set_function(lambda: float(is_leader()))
        for change in ("gained", "lost"):
            self.series.changes_total.labels(self.lease, change)
        try:
            yield
        finally:
            self.series.leader.remove(self.lease)

    def renewed(self, clock: Callable[[], float]) -> None:
        """The lease was written at this moment of `clock`."""
        at = clock()
        age = self.series.renewal_age_seconds.labels(self.lease)
        age.set_function(lambda: clock() - at)

    def count_change(self, change: str) -> None:
        """Leading began or ended."""
        self.series.changes_total.labels(self.lease, change).inc()

    def count_error(self, reason: str) -> None:
        """A request that failed."""
        self.series.errors_total.labels(self.lease, reason).inc()
