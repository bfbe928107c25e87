"""The pool as this process knows it: which endpoints exist and what their last scrape said.

`Datastore` is the sole owner of that state. Discovery writes the endpoints, the scraper writes the
metrics, everybody else reads immutable snapshots. All methods are synchronous, do no I/O and read
no clock; they are called from the event-loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from picker.framework.interfaces import EndpointObserver
from picker.types import Candidate, Endpoint, EndpointMetrics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment.

    `candidates` are in the order in which endpoints were first named; `metrics` is None for an
    endpoint that was never scraped or whose scrapes went stale.
    """

    candidates: tuple[Candidate, ...]
    version: int


@dataclass(frozen=True, slots=True)
class EndpointChanges:
    """What one `set_endpoints` did; an endpoint whose address changed is in both."""

    added: tuple[Endpoint, ...]
    removed: tuple[Endpoint, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


ChangeListener = Callable[[EndpointChanges], None]


class Datastore:
    """Owns the endpoints and their metrics.

    `observers` are told when an endpoint left or restarted.
    """

    def __init__(self, observers: Iterable[EndpointObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._listeners: list[ChangeListener] = []
        self._candidates: dict[str, Candidate] = {}
        self._process_starts: dict[str, float] = {}
        self._snapshot: Snapshot | None = Snapshot((), 0)
        self._version = 0
        self._synced = False

    @property
    def synced(self) -> bool:
        """Whether discovery has said at least once which endpoints exist."""
        return self._synced

    def subscribe(self, listener: ChangeListener) -> None:
        """Call `listener` after every change of the endpoint set, for the life of the process."""
        self._listeners.append(listener)

    def snapshot(self) -> Snapshot:
        """The pool now; the same object until something changes."""
        if self._snapshot is None:
            self._snapshot = Snapshot(tuple(self._candidates.values()), self._version)
        return self._snapshot

    def get(self, key: str) -> Candidate | None:
        """The endpoint `key` as a snapshot would show it, or None when it is not in the pool."""
        return self._candidates.get(key)

    def set_endpoints(self, desired: Iterable[Endpoint]) -> EndpointChanges:
        """Make the pool exactly `desired` (a later duplicate key wins) and tell who listens.

        An endpoint that only changed its labels keeps its metrics. One whose address or port
        changed is another server: its metrics go, and observers forget it.
        """
        wanted = {endpoint.key: endpoint for endpoint in desired}
        removed: list[Endpoint] = []
        for key, candidate in list(self._candidates.items()):
            endpoint = wanted.get(key)
            if endpoint is None or endpoint.host_port != candidate.endpoint.host_port:
                removed.append(self._candidates.pop(key).endpoint)
                self._process_starts.pop(key, None)
            elif endpoint != candidate.endpoint:
                self._candidates[key] = replace(candidate, endpoint=endpoint)
        added = [endpoint for key, endpoint in wanted.items() if key not in self._candidates]
        self._candidates.update((endpoint.key, Candidate(endpoint)) for endpoint in added)
        self._synced = True
        self._changed()
        changes = EndpointChanges(tuple(added), tuple(removed))
        for endpoint in removed:
            self._forget(endpoint.key)
        if changes:
            for listener in self._listeners:
                listener(changes)
        return changes

    def update_metrics(self, key: str, metrics: EndpointMetrics) -> None:
        """Store what a scrape said; ignored when the endpoint has left meanwhile.

        A process start time other than the last known one means the worker restarted with an empty
        cache, also when scrapes failed in between: observers forget it.
        """
        candidate = self._candidates.get(key)
        if candidate is None:
            return
        started = metrics.process_start_time_seconds
        if started is not None:
            before = self._process_starts.get(key)
            self._process_starts[key] = started
            if before is not None and before != started:
                self._forget(key)
        self._candidates[key] = replace(candidate, metrics=metrics)
        self._changed()

    def mark_stale(self, key: str) -> None:
        """Drop the metrics of an endpoint whose scrapes keep failing; the endpoint stays usable."""
        candidate = self._candidates.get(key)
        if candidate is None or candidate.metrics is None:
            return
        self._candidates[key] = replace(candidate, metrics=None)
        self._changed()

    def _forget(self, key: str) -> None:
        for observer in self._observers:
            observer.endpoint_removed(key)

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None
