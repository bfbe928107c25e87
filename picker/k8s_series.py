"""The series about following Kubernetes: how often it was asked, what it said, what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from picker.declarations import Declarations
from picker.series import AnySeries, Counter, Gauge

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
