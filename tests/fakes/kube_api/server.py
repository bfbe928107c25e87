"""The fake API server, which listens on the loopback.

Unlike a real one it has no server-side apply, managed fields, schemas of built-in objects beyond
their `check`, admission, OpenAPI, tables, deletion of collections or of a namespace's objects,
subresources other than `/status` and `/scale`, or conversion between CRD versions.
"""

import asyncio
import copy
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml
from aiohttp import web

from tests.fakes.kube_api.access import Access
from tests.fakes.kube_api.clock import LoopClock, stamp
from tests.fakes.kube_api.definitions import DEFINITIONS, Definitions, in_force
from tests.fakes.kube_api.faults import Faults
from tests.fakes.kube_api.listing import Lists
from tests.fakes.kube_api.objects import Objects
from tests.fakes.kube_api.resources import Catalogue, Object, Resource, typed
from tests.fakes.kube_api.routes import Asked, Routes
from tests.fakes.kube_api.store import Store, Stored
from tests.fakes.kube_api.watch import Watches

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_CRD_GONE_SECONDS = 1.0
_MAX_BODY_BYTES = 3 * 2**20


class KubeApi:
    """An API server whose parts are public; `asked` is the log of requests."""

    def __init__(
        self, clock: LoopClock | None = None, *, window: int = 1000, first_version: int = 1000
    ) -> None:
        self.clock = clock or LoopClock()
        self.store = Store(window, first_version)
        self.catalogue = Catalogue()
        self.access = Access()
        self.faults = Faults()
        self.watches = Watches(self.store, self.clock)
        self.objects = Objects(self.store, self.clock)
        self.lists = Lists(self.store)
        Definitions(self.store, self.catalogue, self._definition_gone)
        self._routes = Routes(
            self.catalogue,
            self.store,
            self.objects,
            self.lists,
            self.watches,
            self.access,
            self.faults,
        )
        self._ssl: ssl.SSLContext | None = None
        self._held: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        for name in NAMESPACES:
            self.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    @property
    def url(self) -> str:
        if self._held is None:
            raise RuntimeError("the server has not been started")
        scheme = "http" if self._ssl is None else "https"
        return f"{scheme}://127.0.0.1:{self._held.getsockname()[1]}"

    @property
    def asked(self) -> list[Asked]:
        return self._routes.asked

    async def start(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl = ssl_context
        self._held = _bound(0)
        await self.come_back()

    async def stop(self) -> None:
        await self.go_away()
        if self._held is not None:
            self._held.close()
            self._held = None

    async def go_away(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for transport in self._routes.connections:
            transport.abort()
        self._routes.connections.clear()
        await runner.cleanup()

    async def come_back(self, *, forget_changes: bool = False) -> None:
        """Listen again at the same port; a restarted server has forgotten its changes."""
        if self._held is None:
            raise RuntimeError("the server has not been started")
        if forget_changes:
            self.store.compact()
            self.lists.expire()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._routes.answer)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        listening = _bound(self._held.getsockname()[1])
        await web.SockSite(self._runner, listening, ssl_context=self._ssl).start()

    def install(self, *definitions: Object | Path) -> None:
        for definition in definitions:
            document: Object = (
                yaml.safe_load(definition.read_text())
                if isinstance(definition, Path)
                else definition
            )
            self.write(in_force(document))

    def remove(self, plural: str) -> None:
        """Delete a CRD and its objects: its paths become 404, its watches end within a second."""
        resource = self.catalogue.named(plural)
        self.store.delete(DEFINITIONS, ("", resource.qualified))

    def _definition_gone(self, name: str) -> None:
        self.clock.call_later(_CRD_GONE_SECONDS, lambda: self.watches.end(name))

    def write(self, obj: Object, *, even_if_same: bool = False) -> Stored:
        """Store an object as it is, as kubelets do; `even_if_same` makes an event of any state."""
        resource = self.catalogue.of_kind(obj["apiVersion"], obj["kind"])
        metadata = dict(obj["metadata"])
        if resource.namespaced:
            metadata.setdefault("namespace", "default")
        found = self.store.find(resource, (metadata.get("namespace") or "", metadata["name"]))
        stored = {} if found is None else found.obj["metadata"]
        metadata.setdefault("uid", stored.get("uid") or self.objects.new_uid())
        created = stored.get("creationTimestamp") or stamp(self.clock.now())
        metadata.setdefault("creationTimestamp", created)
        if resource.has_generation:
            metadata.setdefault("generation", stored.get("generation", 1))
        whole = copy.deepcopy(typed(resource, {**obj, "metadata": metadata}))
        if resource.rules is not None:
            resource.rules.apply_defaults(whole)
        if found is None:
            return self.store.insert(resource, whole)
        return self.store.replace(resource, whole, even_if_same=even_if_same)

    def erase(self, plural: str, name: str, namespace: str = "default") -> Stored:
        resource = self.catalogue.named(plural)
        return self.store.delete(resource, (namespace if resource.namespaced else "", name))

    def read(self, plural: str, name: str, namespace: str = "default") -> Object:
        resource = self.catalogue.named(plural)
        return self.store.get(resource, (namespace if resource.namespaced else "", name)).obj

    def resource(self, plural: str) -> Resource:
        return self.catalogue.named(plural)

    def write_kubeconfig(self, path: Path, token: str | None = None) -> Path:
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        context = {"cluster": "fake", "user": "fake", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "contexts": [{"name": "fake", "context": context}],
            "users": [{"name": "fake", "user": {"token": token} if token else {}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path


def _bound(port: int) -> socket.socket:
    """Return a socket on the loopback that shares its port with our other one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


@asynccontextmanager
async def running_kube_api(
    clock: LoopClock | None = None,
    *definitions: Object | Path,
    window: int = 1000,
    first_version: int = 1000,
) -> AsyncIterator[KubeApi]:
    api = KubeApi(clock, window=window, first_version=first_version)
    api.install(*definitions)
    await api.start()
    try:
        yield api
    finally:
        await asyncio.shield(api.stop())
