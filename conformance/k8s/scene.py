"""A case's environment: an API server, pools with their Pods, a picker for each, one Envoy."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from conformance.case import NotApplicable, Violation, expect
from conformance.epp.scene import Reply, Scene
from conformance.gateway.envoy import Envoy
from conformance.k8s.api import KubeApi
from conformance.k8s.objects import (
    Document,
    PodState,
    PoolPlan,
    pod_document,
    pod_status,
    pool_document,
)
from conformance.k8s.server_process import TestServer
from conformance.waiting import until
from conformance.wire.messages import SELECTION, Request

PRIMARY, SECONDARY, PARALLEL, H2C, LATE = "primary", "secondary", "dp", "h2c", "late"
FOLLOW_SECONDS = 20.0
_TRAFFIC_AT_ONCE, _PAUSE_SECONDS = 4, 0.005


@dataclass(slots=True)
class Side:
    """A pool as planned, and the picker that follows it."""

    plan: PoolPlan
    scene: Scene
    follow_seconds: float = FOLLOW_SECONDS

    async def endpoints(self) -> set[str]:
        """The known addresses that the picker picks when a request selects them."""
        asked = [Request({SELECTION: one}) for one in self.plan.served]
        answers = [await self.scene.ask(request) for request in asked]
        pairs = zip(self.plan.served, answers, strict=True)
        return {one for one, answer in pairs if answer.endpoints == [one]}

    async def until_endpoints(self, expected: Sequence[str], why: str) -> None:
        """Wait until the endpoints are exactly these; raises `Violation` with `why` and those that
        are there instead.

        One look takes a request for each address, during which the pool may change: two looks in a
        row have to agree.
        """
        last: set[str] = set()

        async def right() -> bool:
            nonlocal last
            before, last = last, await self.endpoints()
            return before == last == set(expected)

        try:
            await until(right, why, self.follow_seconds)
        except Violation as violation:
            missing, extra = sorted(set(expected) - last), sorted(last - set(expected))
            raise Violation(f"{violation}; missing {missing}, left over {extra}") from None

    def at(self, *indices: int, ports: Sequence[int] | None = None) -> list[str]:
        """The endpoints of these Pods."""
        wanted = self.plan.ports if ports is None else ports
        return [f"{self.plan.addresses[index]}:{port}" for index in indices for port in wanted]


def of_several(pool: str) -> str:
    """The gateway's name of a pool that a picker of several pools serves."""
    return f"several-{pool}"


@dataclass(slots=True)
class SeveralPools:
    """One picker of several of the pools, each at a port of its own, which its side has. It runs
    only where cases ask for it.
    """

    sides: Mapping[str, Side]

    @asynccontextmanager
    async def running(self, envoy: Envoy) -> AsyncIterator[Mapping[str, Side]]:
        """It runs, knows all pools, and the gateway uses it, for the length of the block."""
        try:
            for name, side in self.sides.items():
                await side.scene.until_ready()
                await side.until_endpoints(side.plan.endpoints, f"{name} is known")
                await envoy.until_healthy(of_several(name), 1)
            yield self.sides
        finally:
            for side in self.sides.values():
                await side.scene.disconnect()
                await side.scene.picker.kill()


@dataclass(slots=True)
class Traffic:
    """Endless requests of clients, with their results."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answered: int = 0

    async def goes_on(self, count: int, limit_seconds: float) -> None:
        """Wait for `count` further answers."""
        seen = self.answered

        async def enough() -> bool:
            return self.answered >= seen + count

        await until(enough, f"{count} more requests are answered", limit_seconds)

    def served_by(self) -> set[str]:
        """Every endpoint that has served since the last call."""
        found = {reply.endpoint or "" for reply in self.replies}
        self.replies.clear()
        return found


@dataclass(slots=True)
class ClusterScene:
    """The sole owner of the suite's objects. `server` is None for a real API server, and `several`
    without `Provision.SEVERAL_POOLS`.

    A change of an object may take `follow_seconds` to be followed.
    """

    api: KubeApi
    namespace: str
    sides: Mapping[str, Side]
    envoy: Envoy
    server: TestServer | None = None
    several: SeveralPools | None = None
    follow_seconds: float = FOLLOW_SECONDS
    _is_touched: bool = False

    def side(self, name: str) -> Side:
        """A pool and its picker."""
        return self.sides[name]

    # Objects

    async def put_pool(
        self, name: str, ports: Sequence[int] | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Create or change a pool."""
        self._is_touched = True
        document = pool_document(self.side(name).plan, ports, labels)
        await self.api.replace(document, self.namespace)

    async def delete_pool(self, name: str) -> None:
        """Delete a pool and wait until it is gone."""
        self._is_touched = True
        await self.api.delete("InferencePool", self.side(name).plan.name, self.namespace)

    async def run_pod(self, name: str, state: PodState, is_held: bool = False) -> None:
        """A new Pod that runs."""
        self._is_touched = True
        document = pod_document(name, state.labels, is_held)
        await self.api.create(document, self.namespace)
        await self.set_pod(name, state.ip, state.is_ready)

    async def set_pod(self, name: str, ip: str, is_ready: bool = True) -> None:
        """Write the status of a Pod."""
        self._is_touched = True
        await self.api.merge("Pod", name, pod_status(ip, is_ready), self.namespace, "status")

    async def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Set labels, or take those away that are None."""
        self._is_touched = True
        patch: Document = {"metadata": {"labels": dict(labels)}}
        await self.api.merge("Pod", name, patch, self.namespace)

    async def delete_pod(self, name: str) -> None:
        """It is gone, or terminating if it is held."""
        self._is_touched = True
        await self.api.delete("Pod", name, self.namespace)

    async def release_pod(self, name: str) -> None:
        """Take the finalizer away."""
        patch: Document = {"metadata": {"finalizers": None}}
        await self.api.merge("Pod", name, patch, self.namespace)

    async def tidy(self) -> None:
        """All objects as planned, and all pickers at work."""
        for side in self.sides.values():
            await side.scene.picker.start()
        was_touched = self._is_touched
        if was_touched:
            await self._tidy_objects()
        for name, side in self.sides.items():
            if side.plan.has_object:
                await self.until_ready(name)
                if was_touched:
                    why = "the pool is as planned again"
                    await side.until_endpoints(side.plan.endpoints, why)
        self._is_touched = False

    async def _tidy_objects(self) -> None:
        planned = {
            side.plan.pod(at): side.plan
            for side in self.sides.values()
            for at in range(len(side.plan.addresses))
        }
        for found in await self.api.items("Pod", self.namespace):
            name = found["metadata"]["name"]
            if found["metadata"].get("finalizers"):
                await self.release_pod(name)
            if name not in planned or _is_odd(found, planned[name]):
                await self.api.delete("Pod", name, self.namespace)
        for side in self.sides.values():
            await self._as_planned(side)

    async def _as_planned(self, side: Side) -> None:
        plan = side.plan
        if plan.has_object:
            await self.put_pool(plan.name)
        else:
            await self.delete_pool(plan.name)
        for at, ip in enumerate(plan.addresses):
            if await self.api.read("Pod", plan.pod(at), self.namespace) is None:
                await self.run_pod(plan.pod(at), PodState(ip, plan.labels))
            else:
                await self.set_pod(plan.pod(at), ip)

    # Pickers

    async def until_ready(self, name: str) -> None:
        """Wait until the picker of a pool routes, and Envoy uses it."""
        await self.side(name).scene.until_ready()
        await self.envoy.until_healthy(self.side(name).plan.name, 1)

    @asynccontextmanager
    async def several_pools(self) -> AsyncIterator[Mapping[str, Side]]:
        """The sides of the picker of several, which runs for the length of the block."""
        if self.several is None:
            raise NotApplicable("no command starts one picker for several pools")
        async with self.several.running(self.envoy) as sides:
            yield sides

    # Requests

    async def post(
        self, path: str, chosen: Sequence[str] = (), listener: str = "main", method: str = "POST"
    ) -> Reply:
        """A client's request, which may choose endpoints; `path` begins with the pool's."""
        scene = self.side(PRIMARY).scene
        headers = {SELECTION: ",".join(chosen)} if chosen else {}
        if method == "GET":
            return await scene.get(listener, f"{path}/v1/models", headers)
        return await scene.post(listener, f"{path}/v1/completions", headers=headers)

    @asynccontextmanager
    async def traffic(self, path: str = "/primary") -> AsyncIterator[Traffic]:
        """Requests for the length of the block, and a little before and after; raises `Violation`
        if one of them fails.
        """
        traffic, is_over = Traffic(), asyncio.Event()
        clients = [
            asyncio.create_task(self._client(path, traffic, is_over), name=f"client {at}")
            for at in range(_TRAFFIC_AT_ONCE)
        ]

        try:
            await traffic.goes_on(_TRAFFIC_AT_ONCE, self.follow_seconds)
            yield traffic
            await traffic.goes_on(_TRAFFIC_AT_ONCE, self.follow_seconds)
        finally:
            is_over.set()
            await asyncio.gather(*clients, return_exceptions=True)
        expect(not traffic.failures, f"failed requests: {sorted(set(traffic.failures))[:5]}")

    async def _client(self, path: str, traffic: Traffic, is_over: asyncio.Event) -> None:
        at = 0
        while not is_over.is_set():
            at += 1
            try:
                reply = await self.post(path, method="POST" if at % 2 else "GET")
            except Violation as violation:
                traffic.failures.append(str(violation))
                continue
            finally:
                traffic.answered += 1
            if reply.status != 200:
                traffic.failures.append(f"status {reply.status} {reply.body[:120]!r}")
            else:
                traffic.replies.append(reply)
            await asyncio.sleep(_PAUSE_SECONDS)


def _is_odd(found: Document, plan: PoolPlan) -> bool:
    """A Pod of the plan's name that is about to go, or has other labels."""
    metadata = found["metadata"]
    return "deletionTimestamp" in metadata or metadata.get("labels") != dict(plan.labels)
