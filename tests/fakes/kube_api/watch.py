"""Watches: the changes that a client receives, and the faults of a watch.

A feed is filled within each write, so its order is the store's order and no change is lost
between its start and its first event. The connection's task empties it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.resources import Object, Resource
from tests.fakes.kube_api.selectors import Selector
from tests.fakes.kube_api.statuses import ApiError, expired
from tests.fakes.kube_api.store import Change, Store, Stored, Type, stored

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
_BOOKMARK_SECONDS = 60.0  # between two
_TIMEOUT_SECONDS = 1800.0  # of a watch that names no time


class End(Enum):
    CLEAN = auto()  # the reply ends as it should: the client may resume
    ABORTED = auto()  # the connection is reset in the middle


@dataclass(frozen=True, slots=True)
class WatchRequest:
    resource: Resource
    selector: Selector
    version: int | None = None
    timeout_seconds: float | None = None
    bookmarks: bool = False
    initial_events: bool = False


class Feed:
    def __init__(self, request: WatchRequest, store: Store) -> None:
        self.request = request
        self.wake = asyncio.Event()
        self.end: End | None = None
        self.silent = False
        self._listens = False
        self._store = store
        self._lines: deque[bytes] = deque()
        self._sent = request.version or 0

    def start(self) -> None:
        request = self.request
        if request.version in (None, 0) or request.initial_events:
            for one in self._store.all(request.resource):
                if request.selector(one.obj):
                    self.say(Type.ADDED, one.raw)
            self._sent = self._store.version
            if request.initial_events and request.bookmarks:
                self.bookmark({INITIAL_EVENTS_END: "true"})
        else:
            try:
                missed = self._store.since(request.resource, request.version or 0)
            except ApiError as error:
                self.fail(error)
                return
            for change in missed:
                self.offer(change)
        self._store.listen(request.resource, self.offer)
        self._listens = True

    def stop(self) -> None:
        if self._listens:
            self._store.unlisten(self.request.resource, self.offer)
            self._listens = False

    def offer(self, change: Change) -> None:
        """Send a change as the selector sees it: entering is ADDED, leaving is DELETED."""
        if change.version <= self._sent or self.end is not None:
            return  # a watch from the future gets nothing until the counter passes it
        self._sent = change.version
        event = _sent(change, self.request.selector)
        if event is not None:
            self.say(*event)

    def say(self, kind: str, raw: bytes) -> None:
        self.put(b'{"type":"%s","object":%s}\n' % (kind.encode(), raw))

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self.wake.set()

    def bookmark(self, annotations: Object | None = None) -> None:
        resource = self.request.resource
        metadata: Object = {"resourceVersion": str(self._store.version)}
        if annotations:
            metadata["annotations"] = annotations
        body = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        self.say("BOOKMARK", msgspec.json.encode(body))

    def fail(self, error: ApiError) -> None:
        self.say("ERROR", msgspec.json.encode(error.body()))
        self.finish(End.CLEAN)

    def finish(self, end: End) -> None:
        self.end = self.end or end
        self.wake.set()

    def take(self) -> bytes:
        if self.silent:
            return b""
        taken = b"".join(self._lines)
        self._lines.clear()
        return taken

    @property
    def ended_cleanly(self) -> bool:
        return self.end is End.CLEAN

    @property
    def over(self) -> bool:
        if self.end is End.ABORTED:
            return True
        return self.end is End.CLEAN and not self._lines and not self.silent


def _sent(change: Change, selected: Selector) -> tuple[str, bytes] | None:
    was = change.old is not None and selected(change.old.obj)
    if change.type is Type.DELETED:
        return (Type.DELETED, change.new.raw) if was else None
    if selected(change.new.obj):
        return (Type.MODIFIED if was else Type.ADDED), change.new.raw
    if was and change.old is not None:
        return Type.DELETED, _as_of(change.old, change.version)
    return None


def _as_of(old: Stored, version: int) -> bytes:
    return stored(old.obj, version).raw


class Watches:
    def __init__(self, store: Store, clock: LoopClock) -> None:
        self.silent = False
        self._store = store
        self._clock = clock
        self._feeds: list[Feed] = []
        self._changed = asyncio.Event()

    def of(self, plural: str | None = None) -> list[Feed]:
        return [feed for feed in self._feeds if feed.request.resource.is_called(plural)]

    async def wait_for(self, count: int, plural: str | None = None) -> None:
        def reached() -> bool:
            found = len(self.of(plural))
            return found >= count if count else not found

        while not reached():
            await self._changed.wait()

    def opened(self, request: WatchRequest) -> Feed:
        feed = Feed(request, self._store)
        feed.silent = self.silent
        feed.start()
        self._feeds.append(feed)
        self._notify()
        return feed

    def closed(self, feed: Feed) -> None:
        self._feeds.remove(feed)
        feed.stop()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def timers(self, feed: Feed) -> list[asyncio.TimerHandle | _Bookmarks]:
        asked = feed.request.timeout_seconds
        seconds = _TIMEOUT_SECONDS if asked is None else asked
        return [
            self._clock.call_later(seconds, lambda: feed.finish(End.CLEAN)),
            *([_Bookmarks(feed, self._clock)] if feed.request.bookmarks else []),
        ]

    def end(self, plural: str | None = None, *, abruptly: bool = False) -> None:
        for feed in self.of(plural):
            feed.finish(End.ABORTED if abruptly else End.CLEAN)

    def expire(self, plural: str | None = None) -> None:
        resources = {feed.request.resource for feed in self.of(plural)}
        for resource in resources:
            self._store.compact(resource)
        for feed in self.of(plural):
            feed.fail(expired(feed.request.version or 0, self._store.version))

    def fail(self, error: ApiError, plural: str | None = None) -> None:
        for feed in self.of(plural):
            feed.fail(error)

    def silence(self) -> None:
        """Withhold all events while connections stay open and new ones are accepted."""
        self.silent = True
        for feed in self._feeds:
            feed.silent = True

    def speak(self) -> None:
        self.silent = False
        for feed in self._feeds:
            feed.silent = False
            feed.wake.set()

    def inject(self, lines: Iterable[bytes], plural: str | None = None) -> None:
        for feed in self.of(plural):
            for line in lines:
                feed.put(line)

    def inject_object(self, kind: str, obj: Object, plural: str | None = None) -> None:
        """Send an event whose object violates what the server itself guarantees."""
        self.inject([msgspec.json.encode({"type": kind, "object": obj}) + b"\n"], plural)


class _Bookmarks:
    def __init__(self, feed: Feed, clock: LoopClock) -> None:
        self._feed = feed
        self._clock = clock
        self._timer = clock.call_later(_BOOKMARK_SECONDS, self._due)

    def cancel(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        self._feed.bookmark()
        self._timer = self._clock.call_later(_BOOKMARK_SECONDS, self._due)
