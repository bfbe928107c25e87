"""`KubernetesApi` over the parts of the fake API server, without sockets: for virtual time.

Replies pass through the bytes of a real server and the same decoding. `requests` records every
request with its time.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from picker.k8s.api import (
    ApiError,
    ApiResource,
    Listing,
    Selection,
    SilentError,
    UnreachableError,
    WatchEvent,
)
from picker.k8s.client import ClientLimits, WatchLines, api_error, decode_event, decode_listing
from tests.fakes.kube_api import statuses
from tests.fakes.kube_api.faults import DroppedError
from tests.fakes.kube_api.objects import WriteOptions
from tests.fakes.kube_api.scale import scale_of, with_scale
from tests.fakes.kube_api.server import KubeApi
from tests.fakes.kube_api.target import Target, target_of
from tests.fakes.kube_api.watch import Feed, WatchRequest

_LATENCY_SECONDS = 0.001
_LIMITS = ClientLimits()


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    verb: str
    plural: str


class InProcessKubeApi:
    def __init__(self, server: KubeApi, rng: Random, token: str = "") -> None:
        self.server = server
        self.requests: list[Request] = []
        self.away = False
        self._rng = rng
        self._authorization = f"Bearer {token}" if token else None

    def go_away(self) -> None:
        self.away = True
        self.server.watches.end(abruptly=True)

    def come_back(self, *, forget_changes: bool = False) -> None:
        self.away = False
        if forget_changes:
            self.server.store.compact()
            self.server.lists.expire()

    async def list(self, resource: ApiResource, selection: Selection) -> Listing:
        target = self._target("list", resource, selection.namespace, query=_query(selection))
        async with self._answer(target, _LIMITS.list_seconds) as found:
            page = decode_listing(self.server.lists.page(found))
            return Listing(page.objects, page.metadata.resource_version)

    @asynccontextmanager
    async def watch(
        self, resource: ApiResource, selection: Selection, resource_version: str
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Watch with the real client's bound on the time."""
        seconds = self._rng.randint(*_LIMITS.watch_seconds)
        query = _query(selection) | {"resourceVersion": resource_version}
        target = self._target("watch", resource, selection.namespace, query=query)
        async with self._answer(target, _LIMITS.silent_seconds) as found:
            request = WatchRequest(
                found.resource, found.selector(), found.version(), seconds, bookmarks=True
            )
        feed = self.server.watches.opened(request)
        timers = self.server.watches.timers(feed)
        try:
            async with aclosing(_events(feed)) as events:
                yield events
        finally:
            for timer in timers:
                timer.cancel()
            self.server.watches.closed(feed)

    async def get(self, resource: ApiResource, namespace: str, name: str) -> dict[str, Any]:
        target = target_of(self.server.catalogue, "GET", resource.path(namespace, name), {})
        self._note("get", resource.plural)
        async with self._answer(target, _LIMITS.request_seconds) as found:
            stored = self.server.store.get(found.resource, found.key)
            return scale_of(stored.obj) if found.subresource == "scale" else _copy(stored.raw)

    async def send(self, method: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
        target = target_of(self.server.catalogue, method, path, {})
        if target is not None:
            self._note(target.verb, target.resource.plural)
        objects = self.server.objects
        async with self._answer(target, _LIMITS.request_seconds) as found:
            if found.subresource == "scale":
                document = with_scale(
                    self.server.store.get(found.resource, found.key).obj, document
                )
            if found.verb == "create":
                namespace = found.namespace or ""
                written = objects.create(found.resource, namespace, document, WriteOptions())
            else:
                written = objects.put(found.resource, found.key, document, WriteOptions())
            return _copy(written.stored.raw)

    async def has(self, resource: ApiResource) -> bool:
        await self._reached()
        return self._find(resource) is not None

    def _find(self, resource: ApiResource) -> Any:
        return self.server.catalogue.find(resource.group, resource.version, resource.plural)

    def _target(
        self,
        verb: str,
        resource: ApiResource,
        namespace: str,
        name: str | None = None,
        query: dict[str, str] | None = None,
    ) -> Target | None:
        self._note(verb, resource.plural)
        found = self._find(resource)
        return None if found is None else Target(found, verb, namespace, name, None, query or {})

    def _note(self, verb: str, plural: str) -> None:
        self.requests.append(Request(asyncio.get_running_loop().time(), verb, plural))

    async def _reached(self) -> None:
        await asyncio.sleep(_LATENCY_SECONDS)
        if self.away:
            raise UnreachableError("connection refused")

    @asynccontextmanager
    async def _answer(self, target: Target | None, seconds: float) -> AsyncIterator[Target]:
        await self._reached()
        if target is None:
            raise ApiError(404, "", "404 page not found")
        try:
            self.server.access.check(target, self._authorization)
            async with asyncio.timeout(seconds):
                await self.server.faults.befall(target)
            if self.away:
                raise UnreachableError("connection reset")
            yield target
        except statuses.ApiError as error:
            body = msgspec.json.encode(error.body())
            raise api_error(error.code, error.headers, body) from error
        except DroppedError as error:
            raise UnreachableError("connection reset") from error
        except TimeoutError as error:
            raise UnreachableError("no answer in time") from error


async def _events(feed: Feed) -> AsyncGenerator[WatchEvent, None]:
    lines, loop = WatchLines(), asyncio.get_running_loop()
    received_at = loop.time()
    while not feed.over:
        feed.wake.clear()
        taken = feed.take()
        received_at = loop.time() if taken else received_at
        for line in lines.added(taken):
            yield decode_event(line)
        if not taken and not feed.over:
            try:
                async with asyncio.timeout_at(received_at + _LIMITS.silent_seconds):
                    await feed.wake.wait()
            except TimeoutError as error:
                raise SilentError("no answer in time") from error
    if not feed.ended_cleanly:
        raise UnreachableError("connection reset")
    lines.check_whole()


def _query(selection: Selection) -> dict[str, str]:
    return {"labelSelector": selection.label_selector, "fieldSelector": selection.field_selector}


def _copy(raw: bytes) -> dict[str, Any]:
    return msgspec.json.decode(raw)
