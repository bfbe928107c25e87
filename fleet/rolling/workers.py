"""The restart of the workers, one after the other."""

from __future__ import annotations

import asyncio

from fleet import probe
from fleet.envoy.clusters import POOL
from fleet.envoy.settings import Mechanism, SocketAddress
from fleet.errors import FleetError
from fleet.members import Say, Worker, arrive
from fleet.ports import free_ports
from fleet.rolling.scene import MARGIN_SECONDS, Scene

_IDLE_LOOKS = 2  # a request that was picked a moment ago may not have arrived yet


class WorkerRestart:
    """Restarts workers."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._envoy_has_pool = scene.plan.options.routing is Mechanism.OVERRIDE_HOST

    async def run(self, say: Say) -> None:
        """Raises `FleetError` for the first that does not come back; the others are left alone."""
        count = len(self._scene.members.workers)
        if count == 1:
            await self._replace_the_only_one(say)
            return
        for index in range(count):
            await self._restart(self._scene.members.workers[index], say)

    async def _restart(self, worker: Worker, say: Say) -> None:
        scene, name, address = self._scene, worker.plan.program.name, worker.plan.address
        everybody = scene.members.workers
        others = [one for one in everybody if one is not worker]
        try:
            self._tell_picker(others)
            await scene.until(lambda: scene.picker_forgot(address), "the picker kept a worker")
            patience = await self._until_idle(address, name, say)
            await self._tell_envoy(others, absent=address)
            await worker.child.renew(patience, MARGIN_SECONDS)
            await self._until_serving(worker)
            await self._tell_envoy(everybody, present=address)
        finally:
            # Also when it did not come back: it is then like any that died, and started again.
            scene.rotation.pool(one.plan.address for one in everybody)
            self._tell_picker(everybody)
        await scene.until(lambda: scene.picker_uses(address), f"the picker did not see {name} back")
        say(f"{name}: restarted at {address.host}:{address.port}")

    async def _replace_the_only_one(self, say: Say) -> None:
        """Somebody has to serve meanwhile."""
        scene, old = self._scene, self._scene.members.workers[0]
        (port,) = free_ports("127.0.0.1", 1, scene.plan.options.port + 1)
        new = scene.members.new_worker(scene.plan.worker(0, port))
        name, address = new.plan.program.name, new.plan.address
        say(f"{name}: it is the only one; starting a new one beside it")
        await arrive(new.child, scene.group, scene.limit_seconds)
        try:
            await self._tell_envoy([old, new], present=address)
        except FleetError:
            scene.rotation.pool([old.plan.address])
            new.child.kill()
            raise
        old.child.retire()
        scene.members.workers[:] = [new]
        self._tell_picker([new])
        await scene.until(
            lambda: scene.picker_uses(address), f"the picker did not see the new {name}"
        )
        patience = await self._until_idle(old.plan.address, name, say)
        await self._tell_envoy([new], absent=old.plan.address)
        await old.child.stop(patience, MARGIN_SECONDS)
        say(f"{name}: restarted, now at {address.host}:{address.port}")

    def _tell_picker(self, workers: list[Worker]) -> None:
        self._scene.rotation.endpoints({one.plan.program.name: one.plan.address for one in workers})

    async def _tell_envoy(
        self,
        workers: list[Worker],
        *,
        present: SocketAddress | None = None,
        absent: SocketAddress | None = None,
    ) -> None:
        """The pool is these `workers`; wait until Envoy uses the one that is `present` now, or
        has forgotten the one that is `absent` now.
        """
        scene = self._scene
        scene.rotation.pool(one.plan.address for one in workers)
        if not self._envoy_has_pool:
            return
        if present is not None:
            await scene.until(
                lambda: scene.envoy_uses(POOL, present), "Envoy did not find a worker healthy"
            )
        if absent is not None:
            await scene.until(lambda: scene.envoy_forgot(POOL, absent), "Envoy kept a worker")

    async def _until_idle(self, address: SocketAddress, name: str, say: Say) -> float:
        """Wait for what a worker has under way, not for ever; the seconds that are left for it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._scene.plan.options.drain_seconds
        looks, told = 0, False
        while looks < _IDLE_LOOKS and loop.time() < deadline:
            try:
                active = await self._scene.active(POOL, address)
            except probe.NoReplyError:
                active = 1
            looks = 0 if active else looks + 1
            if active and not told:
                told = True
                say(f"{name}: {active} requests are under way there")
            await asyncio.sleep(probe.POLL_SECONDS)
        return max(0.0, deadline - loop.time())

    async def _until_serving(self, worker: Worker) -> None:
        child, limit = worker.child, self._scene.limit_seconds
        try:
            async with asyncio.timeout(limit):
                await child.serving.wait()
        except TimeoutError as error:
            name = child.program.name
            text = f"{name} did not come back within {limit:g} s{child.last_words()}"
            raise FleetError(text) from error
