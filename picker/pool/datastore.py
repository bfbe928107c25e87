"""The pool as this process knows it: its endpoints, and their metrics as last scraped.

Discovery writes the endpoints, the scraper writes metrics and attributes, everything else reads
immutable snapshots. All methods are synchronous and are called from the event-loop thread only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from picker.framework.interfaces import EndpointObserver
from picker.types import Candidate, Endpoint, EndpointMetrics

MAX_MODELS = 10_000  # bounded, because a worker may load adapters without end
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment; `candidates` are in the order in which discovery first named them."""

    candidates: tuple[Candidate, ...]
    version: int


@dataclass(frozen=True, slots=True)
class EndpointChanges:
    """One change of the endpoints.

    An endpoint whose address changed was removed and added; one with another change was `updated`.
    `restarted` are the keys of endpoints whose worker restarted at the same address.
    """

    added: tuple[Endpoint, ...] = ()
    removed: tuple[Endpoint, ...] = ()
    updated: tuple[Endpoint, ...] = ()
    restarted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


ChangeListener = Callable[[EndpointChanges], None]
Describe = Callable[[Endpoint], Mapping[str, Any]]


class Datastore:
    """Owns the endpoints; `describers` derive attributes, by "Type/producer", from one endpoint."""

    def __init__(
        self, observers: Iterable[EndpointObserver] = (), describers: Iterable[Describe] = ()
    ) -> None:
        self._observers = tuple(observers)
        self._describers = tuple(describers)
        self._listeners: list[ChangeListener] = []
        self._watchers: list[Callable[[], None]] = []
        self._candidates: dict[str, Candidate] = {}
        self._process_starts: dict[str, float] = {}
        self._models: frozenset[str] = frozenset()  # all that endpoints have ever named
        self._model_listeners: list[Callable[[frozenset[str]], None]] = []
        self._snapshot: Snapshot | None = Snapshot((), 0)
        self._version = 0
        self.synced = False  # True once discovery has set the endpoints

    def subscribe(self, listener: ChangeListener) -> None:
        """Call `listener` after every change of the endpoints and every restart."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: ChangeListener) -> None:
        self._listeners.remove(listener)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever the next snapshot will differ; it must be quick and not fail."""
        self._watchers.append(watcher)

    def follow_models(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` with models and adapters that an endpoint names for the first time."""
        self._model_listeners.append(listener)

    def use(self, observers: Iterable[EndpointObserver], describers: Iterable[Describe]) -> None:
        """Continue with the plugins of another configuration; metrics and other attributes stay."""
        before, self._describers = self._describers, tuple(describers)
        self._observers = tuple(observers)
        for key, candidate in self._candidates.items():
            endpoint = candidate.endpoint
            gone = frozenset(name for describe in before for name in describe(endpoint))
            rest = _without(candidate, gone)
            self._candidates[key] = self._described(rest, endpoint)
        self._changed()

    def snapshot(self) -> Snapshot:
        """Return the current pool; the same object until the pool changes."""
        if self._snapshot is None:
            self._snapshot = Snapshot(tuple(self._candidates.values()), self._version)
        return self._snapshot

    @property
    def size(self) -> int:
        return len(self._candidates)

    def get(self, key: str) -> Candidate | None:
        """Return the endpoint `key` as in a snapshot; None if it is not in the pool."""
        return self._candidates.get(key)

    def is_answering(self, candidate: Candidate) -> bool:
        """Return whether any scraped value of the candidate, load or attribute, is still valid."""
        if candidate.metrics is not None:
            return True
        describe = self._describers
        described = {name for one in describe for name in one(candidate.endpoint)}
        return not candidate.attributes.keys() <= described

    def set_endpoints(self, desired: Iterable[Endpoint]) -> EndpointChanges:
        """Make the pool exactly `desired`; of endpoints with the same key the last wins."""
        wanted = {endpoint.key: endpoint for endpoint in desired}
        gone = [key for key in self._candidates if key not in wanted]
        self.synced = True
        return self.change_endpoints(wanted.values(), gone)

    def change_endpoints(
        self, present: Iterable[Endpoint], gone: Iterable[str] = ()
    ) -> EndpointChanges:
        """Replace the endpoints with the keys of `present`, and remove those of `gone`."""
        removed = [self._candidates.pop(key).endpoint for key in gone if key in self._candidates]
        added: list[Endpoint] = []
        updated: list[Endpoint] = []
        for endpoint in present:
            candidate = self._candidates.get(endpoint.key)
            if candidate is None:
                added.append(endpoint)
            elif endpoint is candidate.endpoint:
                continue
            elif not endpoint.is_same_server(candidate.endpoint):
                removed.append(self._candidates.pop(endpoint.key).endpoint)
                added.append(endpoint)
            elif endpoint != candidate.endpoint:
                self._candidates[endpoint.key] = self._described(candidate, endpoint)
                updated.append(endpoint)
        for endpoint in removed:
            self._process_starts.pop(endpoint.key, None)
        for endpoint in added:
            self._candidates[endpoint.key] = self._described(Candidate(endpoint), endpoint)
        self._changed()
        changes = EndpointChanges(tuple(added), tuple(removed), tuple(updated))
        for endpoint in removed:
            self._forget(endpoint.key)
        if changes or changes.updated:
            self._notify(changes)
        return changes

    def forget_pool(self) -> None:
        """Remove all endpoints of a deleted pool; discovery is then not synced."""
        self.set_endpoints(())
        self.synced = False

    def update_metrics(
        self, key: str, metrics: EndpointMetrics, attributes: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Store the result of a scrape; ignored if the endpoint has left."""
        candidate = self._candidates.get(key)
        if candidate is None:
            return
        started = metrics.process_start_time_seconds
        if started is not None:
            before = self._process_starts.get(key)
            self._process_starts[key] = started
            # The worker restarted with an empty cache, even if scrapes failed in between.
            if before is not None and before != started:
                self._forget(key)
                self._notify(EndpointChanges(restarted=(key,)))
        known = _merged(candidate.attributes, attributes) if attributes else candidate.attributes
        self._candidates[key] = Candidate(candidate.endpoint, metrics, 0, metrics, known)
        self._changed()

    def set_attributes(self, key: str, attributes: Mapping[str, Any]) -> None:
        """Add attributes of an endpoint, by "Type/producer"; ignored if it has left."""
        candidate = self._candidates.get(key)
        if candidate is None:
            return
        known = candidate.attributes
        if all(name in known and known[name] == value for name, value in attributes.items()):
            return
        self._candidates[key] = replace(candidate, attributes=_merged(known, attributes))
        self._changed()

    def add_models(self, models: frozenset[str]) -> None:
        new = models - self._models
        if new and len(self._models) < MAX_MODELS:
            self._models |= new
            for listener in self._model_listeners:
                listener(new)

    def drop_attributes(self, key: str, names: Iterable[str]) -> None:
        candidate = self._candidates.get(key)
        gone = frozenset(names)
        if candidate is None or gone.isdisjoint(candidate.attributes):
            return
        self._candidates[key] = _without(candidate, gone)
        self._changed()

    def mark_stale(self, key: str) -> None:
        """Drop the metrics of an endpoint whose scrapes keep failing, except as `last_metrics`."""
        candidate = self._candidates.get(key)
        if candidate is None or candidate.metrics is None:
            return
        self._candidates[key] = replace(candidate, metrics=None)
        self._changed()

    def _described(self, candidate: Candidate, endpoint: Endpoint) -> Candidate:
        attributes = candidate.attributes
        for describe in self._describers:
            attributes = _merged(attributes, describe(endpoint))
        return replace(candidate, endpoint=endpoint, attributes=attributes)

    def _notify(self, changes: EndpointChanges) -> None:
        for listener in tuple(self._listeners):  # a copy, since listeners may unsubscribe
            listener(changes)

    def _forget(self, key: str) -> None:
        for observer in self._observers:
            observer.endpoint_removed(key)

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None
        for watcher in self._watchers:
            watcher()


def _merged(known: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({**known, **new}) if new else known


def _without(candidate: Candidate, names: frozenset[str]) -> Candidate:
    rest = {name: value for name, value in candidate.attributes.items() if name not in names}
    return replace(candidate, attributes=MappingProxyType(rest))
