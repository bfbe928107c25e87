"""The HTTP routes: requests become verbs, refusals a `Status`, watches a stream."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakSet

import msgspec
from aiohttp import web

from tests.fakes.kube_api import reviews
from tests.fakes.kube_api.access import Access
from tests.fakes.kube_api.discovery import answer_about_itself
from tests.fakes.kube_api.faults import DroppedError, Faults
from tests.fakes.kube_api.listing import Lists
from tests.fakes.kube_api.objects import DeleteOptions, Objects, WriteOptions, Written
from tests.fakes.kube_api.resources import Catalogue
from tests.fakes.kube_api.scale import scale_of, with_scale
from tests.fakes.kube_api.statuses import ApiError, bad_request, method_not_allowed, success
from tests.fakes.kube_api.store import Store, Stored
from tests.fakes.kube_api.target import Target, target_of
from tests.fakes.kube_api.watch import Feed, Watches, WatchRequest
from tests.fakes.kube_api.writes import FieldValidation

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Asked:
    verb: str
    group: str
    plural: str
    namespace: str | None
    name: str | None
    subresource: str | None
    query: dict[str, str]
    agent: str


@dataclass(slots=True)
class Routes:
    catalogue: Catalogue
    store: Store
    objects: Objects
    lists: Lists
    watches: Watches
    access: Access
    faults: Faults
    asked: list[Asked] = field(default_factory=list)
    connections: WeakSet[asyncio.Transport] = field(default_factory=WeakSet)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if isinstance(transport, asyncio.Transport):
            self.connections.add(transport)
        try:
            return await self._answer(request)
        except ApiError as error:
            raw = msgspec.json.encode(error.body())
            return web.Response(
                body=raw, status=error.code, content_type=_JSON, headers=error.headers
            )
        except DroppedError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and request.path.startswith(reviews.PATH):
            return await self._review(request)
        target = target_of(self.catalogue, request.method, request.path, request.query)
        if target is None:
            answer = answer_about_itself(self.catalogue, request.method, request.path)
            if answer is not None:
                is_object = isinstance(answer, dict)
                return _reply(msgspec.json.encode(answer)) if is_object else _text(answer)
            return web.Response(status=404, text="404 page not found\n")
        self.asked.append(
            Asked(
                target.verb,
                target.resource.group,
                target.resource.plural,
                target.namespace,
                target.name,
                target.subresource,
                dict(target.query),
                request.headers.get("User-Agent", ""),
            )
        )
        self.access.check(target, request.headers.get("Authorization"))
        await self.faults.befall(target)
        verbs: dict[str, Callable[[Target, web.Request], Awaitable[web.StreamResponse]]] = {
            "get": self._get,
            "list": self._list,
            "watch": self._watch,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
        }
        return await verbs[target.verb](target, request)

    async def _review(self, request: web.Request) -> web.StreamResponse:
        asked, authorization = await _body(request), request.headers.get("Authorization")
        found = reviews.review(self.access, self.catalogue, request.path, asked, authorization)
        if found is None:
            return web.Response(status=404, text="404 page not found\n")
        return _reply(msgspec.json.encode(found), 201)

    async def _get(self, target: Target, _: web.Request) -> web.StreamResponse:
        found = self.store.get(target.resource, target.key)
        return _scaled(found) if target.subresource == "scale" else _reply(found.raw)

    async def _list(self, target: Target, _: web.Request) -> web.StreamResponse:
        return _reply(self.lists.page(target))

    async def _create(self, target: Target, request: web.Request) -> web.StreamResponse:
        body, options = await _body(request), _options(target)
        namespace = target.namespace or ""
        return _written(self.objects.create(target.resource, namespace, body, options))

    async def _update(self, target: Target, request: web.Request) -> web.StreamResponse:
        body, options = await _body(request), _options(target)
        if target.subresource == "scale":
            body = with_scale(self.store.get(target.resource, target.key).obj, body)
            return _scaled(self.objects.put(target.resource, target.key, body, options).stored)
        return _written(self.objects.put(target.resource, target.key, body, options))

    async def _patch(self, target: Target, request: web.Request) -> web.StreamResponse:
        patch = (request.content_type, await _body(request))
        options = _options(target)
        return _written(self.objects.patch(target.resource, target.key, patch, options))

    async def _delete(self, target: Target, request: web.Request) -> web.StreamResponse:
        body = await _body(request) if request.can_read_body else None
        options = DeleteOptions.of(body, target.query)
        stored, gone = self.objects.delete(target.resource, target.key, options)
        if gone and not target.resource.graceful:
            uid = stored.obj["metadata"]["uid"]
            return _reply(msgspec.json.encode(success(target.resource, target.name or "", uid)))
        return _reply(stored.raw)

    async def _watch(self, target: Target, request: web.Request) -> web.StreamResponse:
        asked = _watch_request(target)
        feed = self.watches.opened(asked)
        timers = self.watches.timers(feed)
        response = web.StreamResponse()
        response.content_type = _JSON
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            await _pour(feed, response)
        except ConnectionError:
            return response
        finally:
            for timer in timers:
                timer.cancel()
            self.watches.closed(feed)
        if not feed.ended_cleanly and request.transport is not None:
            request.transport.abort()
        return response


async def _pour(feed: Feed, response: web.StreamResponse) -> None:
    while not feed.over:
        feed.wake.clear()
        taken = feed.take()
        if taken:
            await response.write(taken)
        elif not feed.over:
            await feed.wake.wait()


def _watch_request(target: Target) -> WatchRequest:
    initial = target.flag("sendInitialEvents")
    bookmarks = target.flag("allowWatchBookmarks")
    if initial and target.query.get("resourceVersionMatch") != "NotOlderThan":
        raise bad_request(
            "sendInitialEvents: Forbidden: sendInitialEvents requires setting "
            "resourceVersionMatch to NotOlderThan"
        )
    return WatchRequest(
        target.resource,
        target.selector(),
        target.version(),
        target.number("timeoutSeconds"),
        bookmarks,
        initial,
    )


async def _body(request: web.Request) -> object:
    raw = await request.read()
    if request.method == "POST" and request.content_type.endswith("protobuf"):
        raise bad_request("this server reads JSON")
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {error}") from error


def _options(target: Target) -> WriteOptions:
    validation = FieldValidation(target.query.get("fieldValidation") or FieldValidation.WARN)
    if target.subresource and target.verb not in ("update", "patch"):
        raise method_not_allowed()
    dry = target.query.get("dryRun", "") == "All"
    return WriteOptions(validation, dry, target.subresource == "status")


def _written(written: Written) -> web.Response:
    response = _reply(written.stored.raw, written.code)
    for warning in written.warnings:
        quoted = warning.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _scaled(found: Stored) -> web.Response:
    return _reply(msgspec.json.encode(scale_of(found.obj)))


def _reply(raw: bytes, code: int = 200) -> web.Response:
    return web.Response(body=raw, status=code, content_type=_JSON)


def _text(text: str) -> web.Response:
    return web.Response(text=text)
