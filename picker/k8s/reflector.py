"""A map of small records that follows one selection of objects of an API server.

It lists, then watches from the list's version; a watch that ends is reopened from the last received
version, so no event is lost or repeated. It lists again if that version is too old (410), after a
long silence, and every ten minutes, since a version from the future (a restored backup) is answered
with silence. Failures are retried with a growing back-off, which only a watch that lasted resets,
so that a server that accepts and drops at once is not flooded; after several such watches without
an event, lists take their place. A failure never empties the view.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Generic, TypeAlias, TypeVar

from base.backoff import Backoff
from picker.k8s.api import (
    PODS,
    ApiError,
    ApiResource,
    KubernetesApi,
    Selection,
    SilentError,
    UnreachableError,
    WatchEvent,
)
from picker.k8s.object_map import Decode, ObjectKey, ObjectMap, metadata_of
from picker.metrics.picker_metrics import KubernetesSeries

logger = logging.getLogger(__name__)

R = TypeVar("R")
Listener: TypeAlias = Callable[[Mapping[ObjectKey, R], Collection[ObjectKey]], None]
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _GONE = 401, 403, 404, 410
_TO_BE_MENDED: Final = frozenset({400, 403, 404, 405, 406, 422})
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})
_MAX_BARREN: Final = 3  # watches in a row that end at once without an event, before a list
_SLICE: Final = 64  # objects of a list to decode before the loop gets a turn


@dataclass(frozen=True, slots=True)
class Subject(Generic[R]):
    """The objects to follow; a record must not reference the bytes that `decode` receives."""

    resource: ApiResource
    selection: Selection
    decode: Decode[R]


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals of a reflector."""

    gather_seconds: float = 0.005  # the minimum between two calls of listeners
    # A watch from a version of the future is silent.
    relist_seconds: float = 600.0  # the mean between two lists
    trust_seconds: float = 30.0  # after a failure, in which a watch may resume from its version
    steady_seconds: float = 5.0  # the minimum of a successful watch
    refused_seconds: float = 15.0  # after an error that an operator has to fix
    absent_seconds: float = 60.0  # after which an unknown kind has no objects


class Reflector(Generic[R]):
    """Follows one subject while `run` runs; is the sole owner of its records."""

    def __init__(
        self,
        api: KubernetesApi,
        subject: Subject[R],
        *,
        rng: Random,
        clock: Callable[[], float],
        series: KubernetesSeries | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._api = api
        self._subject = subject
        self._rng = rng
        self._clock = clock
        self._pace = pace or Pace()
        resource, namespace = subject.resource.qualified, subject.selection.namespace
        self._series = (KubernetesSeries([]) if series is None else series).of(resource, namespace)
        self._objects: ObjectMap[R] = ObjectMap(subject.decode, resource)
        self._contact = Contact(subject.resource, subject.selection)
        self._backoff = Backoff(rng)
        self._listeners: list[Listener[R]] = []
        self._version: str | None = None
        self._relist_at = 0.0
        self._absent_since: float | None = None
        self._barren = 0
        self.synced = False  # True once the objects are listed, or the kind is unknown
        self._notified_at: float | None = None
        self._notifying: asyncio.TimerHandle | None = None

    @property
    def view(self) -> Mapping[ObjectKey, R]:
        return self._objects.view

    @property
    def malformed(self) -> Mapping[ObjectKey, str]:
        return self._objects.malformed

    @property
    def installed(self) -> bool:
        """False if the server does not know the kind, according to its last answer."""
        return self._absent_since is None

    def problem(self) -> str | None:
        """Return why the view may be outdated, as a sentence; None if it is current."""
        return self._contact.problem(self._clock())

    def subscribe(self, listener: Listener[R]) -> None:
        """Call `listener`, which is quick, with the view and the changed keys after each change."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow until cancelled. No behaviour of a server or an object raises an error."""
        selection = self._subject.selection
        selector = selection.label_selector or selection.field_selector
        with self._series.age_shown(selector, lambda: self._contact.silent_seconds(self._clock())):
            try:
                while True:
                    wait = await self._round()
                    await asyncio.sleep(wait)
            finally:
                if self._notifying is not None:
                    self._notifying.cancel()
                    self._notifying = None

    async def _round(self) -> float:
        """List if that is due, then watch; return the wait before the next round."""
        listing = self._version is None or self._clock() >= self._relist_at
        listing = listing or self._barren >= _MAX_BARREN
        try:
            if listing:
                await self._list()
                listing = False
            lasted = await self._watch()
        except (ApiError, UnreachableError) as error:
            return self._failed(await self._confirmed(error), listing=listing)
        if lasted >= self._pace.steady_seconds:
            return 0.0
        return self._backoff.next_seconds()

    async def _list(self) -> None:
        self._series.lists.inc()
        self._barren = 0
        listing = await self._api.list(self._subject.resource, self._subject.selection)
        listed = []
        for index, raw in enumerate(listing.items, 1):
            listed.append(self._objects.read(raw))
            if index % _SLICE == 0:
                await asyncio.sleep(0)
        changed = self._objects.replace(listed)
        self._version = listing.resource_version or None
        self._relist_at = self._clock() + self._pace.relist_seconds * self._rng.uniform(0.9, 1.1)
        self._absent_since = None
        self._note(well_again=self._contact.answered(self._clock()))
        if changed or not self.synced:
            self.synced = True
            self._notify_soon()

    async def _watch(self) -> float:
        """Watch once, to the end; return the duration in seconds."""
        self._series.watches.inc()
        resource, selection = self._subject.resource, self._subject.selection
        began = self._clock()
        try:
            async with self._api.watch(resource, selection, self._version or "") as events:
                self._barren += 1
                self._note(well_again=self._contact.answered(self._clock()))
                async for event in events:
                    self._apply(event)
                    if self._clock() >= self._relist_at:
                        break
            self._note(well_again=self._contact.received(self._clock()))
        finally:
            lasted = self._clock() - began
            if lasted >= self._pace.steady_seconds:
                self._backoff.reset()
                self._barren = 0
        return lasted

    def _apply(self, event: WatchEvent) -> None:
        self._series.count(event.kind)
        metadata = metadata_of(event.object)
        if metadata is None or not metadata.resource_version:
            self._note_unusable(f"{event.kind} without metadata or resourceVersion")
            return
        version = metadata.resource_version
        changed = False
        if event.kind == "BOOKMARK":
            self._check_onward(version)
        elif not metadata.name or event.kind not in _CHANGES:
            self._note_unusable(f"{event.kind} of {metadata.name or 'an object without name'}")
        elif event.kind == "DELETED":
            changed = self._objects.remove(metadata)
        else:
            changed = self._objects.put(metadata, event.object)
        self._version = version
        self._barren = 0
        self._note(well_again=self._contact.received(self._clock()))
        if changed:
            self._notify_soon()

    def _note_unusable(self, why: str) -> None:
        """Note an unusable event; it may hide a change, so list again soon."""
        self._objects.unreadable(why)
        self._relist_at = min(self._relist_at, self._clock() + self._pace.trust_seconds)

    def _note(self, *, well_again: bool) -> None:
        if well_again:
            logger.info("%s can be followed again", self._subject.resource.qualified)

    def _check_onward(self, version: str) -> None:
        """Raise `ApiError` for an older version: the server was restored from a backup."""
        known = self._version or ""
        if known.isdigit() and version.isdigit() and int(version) < int(known):
            raise ApiError(_GONE, "Expired", f"resource versions went back to {version}")

    async def _confirmed(self, error: ApiError | UnreachableError) -> ApiError | UnreachableError:
        """Return the error to report: a 404 means an unknown kind only if discovery confirms it."""
        if not isinstance(error, ApiError) or error.status != _NOT_FOUND:
            return error
        try:
            missing = await is_missing(self._api, self._subject.resource)
        except (ApiError, UnreachableError) as doubt:
            return UnreachableError(f"{error}; {doubt}")
        return error if missing else UnreachableError(f"{error}; yet discovery has the kind")

    def _failed(self, error: ApiError | UnreachableError, *, listing: bool) -> float:
        """Note a failed round; return the wait before the next one."""
        now = self._clock()
        too_old = isinstance(error, ApiError) and error.status == _GONE
        if listing and self._version is not None:
            self._relist_at = now + self._pace.relist_seconds * self._rng.uniform(0.1, 0.2)
        elif not self._may_resume(error, now):
            self._version = None
        self._series.count_error(_reason(error))
        if too_old:
            return self._backoff.next_seconds()
        if self._contact.failed(now, error):
            logger.warning("%s", self._contact.problem(now))
        if not isinstance(error, ApiError):
            return self._backoff.next_seconds()
        if error.status == _NOT_FOUND:
            self._absent(now)
        refused = error.status in _TO_BE_MENDED
        at_least = self._pace.refused_seconds if refused else 0.0
        return self._backoff.next_seconds(error.retry_after_seconds, at_least)

    def _may_resume(self, error: ApiError | UnreachableError, now: float) -> bool:
        silent = self._contact.silent_seconds(now)
        # A restored etcd answers a version of the future with silence.
        if silent is None or silent > self._pace.trust_seconds or isinstance(error, SilentError):
            return False
        return isinstance(error, UnreachableError) or error.status in (401, 403, 429, 500, 503)

    def _absent(self, now: float) -> None:
        """Note an unknown kind; its objects, if there were any, disappear after a while."""
        if self._absent_since is None:
            self._absent_since = now
        emptied = not self.synced
        if now - self._absent_since >= self._pace.absent_seconds:
            emptied = self._objects.clear() or emptied
        if emptied:
            self.synced = True
            self._notify_soon()

    def _notify_soon(self) -> None:
        if self._notifying is not None:
            return
        wait = 0.0
        if self._notified_at is not None:
            wait = max(0.0, self._notified_at + self._pace.gather_seconds - self._clock())
        self._notifying = asyncio.get_running_loop().call_later(wait, self._notify)

    def _notify(self) -> None:
        self._notifying = None
        self._notified_at = self._clock()
        self._series.changes.inc()
        view, changed = self._objects.view, self._objects.take_news()
        for listener in self._listeners:
            listener(view, changed)


def _reason(error: ApiError | UnreachableError) -> str:
    if isinstance(error, ApiError):
        return str(error.status)
    return "silent" if isinstance(error, SilentError) else "unreachable"


async def is_missing(api: KubernetesApi, resource: ApiResource) -> bool:
    """Return whether the server does not know the kind. Raises as `KubernetesApi` does."""
    if await api.has(resource):
        return False
    await check_api_server(api)
    return True


async def check_api_server(api: KubernetesApi) -> None:
    """Raise `UnreachableError` if the server knows no Pods: then it is a proxy that answers 404."""
    if not await api.has(PODS):
        raise UnreachableError("the server knows no Pods, so it is not an API server: 404")


class Contact:
    """The state of the connection to a server, for one selection of one resource."""

    def __init__(self, resource: ApiResource, selection: Selection) -> None:
        self._resource = resource
        self._selection = selection
        self._received_at: float | None = None
        self._failing_since: float | None = None
        self._error: ApiError | UnreachableError | None = None

    def received(self, now: float) -> bool:
        """Note an event, a bookmark, or a regular end; return whether that ends a failure."""
        self._received_at = now
        if self._error is None:
            return False
        self._error = self._failing_since = None
        return True

    def answered(self, now: float) -> bool:
        """Note a list or an opened watch; return whether it ends a failure other than silence."""
        # A path that swallows the stream of a watch may pass its beginning.
        return not isinstance(self._error, SilentError) and self.received(now)

    def failed(self, now: float, error: ApiError | UnreachableError) -> bool:
        """Note a failure; return whether it is the first one or differs from the last one."""
        before = self._error
        if self._failing_since is None:
            self._failing_since = now
        if not isinstance(before, SilentError) or isinstance(error, ApiError):
            self._error = error
        return before is None or _failure_of(before) != _failure_of(error)

    def silent_seconds(self, now: float) -> float | None:
        return None if self._received_at is None else now - self._received_at

    def problem(self, now: float) -> str | None:
        """Return why the view may be outdated, with a fix; None if it is current."""
        if self._error is None or self._failing_since is None:
            return None
        what = f"{self._resource.qualified} in namespace {self._selection.namespace!r}"
        since = f"for {now - self._failing_since:.0f} s"
        return f"{what}: {self._why(self._error)} ({since}; the last known state is in use)"

    def _why(self, error: ApiError | UnreachableError) -> str:
        if isinstance(error, UnreachableError):
            return f"the API server cannot be followed: {error}"
        if error.status == _FORBIDDEN:
            group = self._resource.group or '""'
            return (
                f"the API server forbids it; grant the verbs list and watch on "
                f"{self._resource.plural} (API group {group}) in namespace "
                f"{self._selection.namespace!r} to the picker's service account: {error.message}"
            )
        if error.status == _UNAUTHORIZED:
            return f"the API server rejects the credentials; renew them: {error.message}"
        if error.status == _NOT_FOUND:
            return (
                f"the API server knows no {self._resource.plural} of "
                f"{self._resource.api_version}; install its CustomResourceDefinition (see crds/)"
            )
        return f"the API server refuses: {error}"


def _failure_of(error: ApiError | UnreachableError) -> int:
    return error.status if isinstance(error, ApiError) else 0
