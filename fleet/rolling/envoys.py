"""The restart of Envoy."""

from __future__ import annotations

import asyncio
import socket

from fleet import probe
from fleet.errors import FleetError
from fleet.members import Envoy, Say, arrive, write_bootstrap
from fleet.proc import connections
from fleet.rolling.scene import MARGIN_SECONDS, Scene


class EnvoyRestart:
    """Replaces Envoy by one that takes over its port. Owns the address of the one before it."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._address_of_the_gone: socket.socket | None = None

    async def run(self, say: Say) -> None:
        """Raises `FleetError` when the new one does not come; then the old one goes on."""
        scene, old = self._scene, self._scene.members.envoy
        if scene.plan.site.hot_restart_id is None:
            raise FleetError("Envoy hands over through shared memory, and /dev/shm is not writable")
        plan = scene.plan.envoy(old.plan.number + 1, old.epoch + 1)
        new = scene.members.new_envoy(plan)
        write_bootstrap(plan)
        say("envoy: starting a new one, which takes over the port")
        try:
            await arrive(new.child, scene.group, scene.limit_seconds)
        except FleetError:
            await self._see_that_somebody_listens(old)
            raise
        old.child.retire()
        scene.members.envoy = new
        left = await self._until_deserted(old, say)
        await old.child.stop(MARGIN_SECONDS)
        self._answer_for(old)
        cut = f", with {left} connections cut" if left else ""
        say(f"envoy: restarted{cut}; settings in {plan.bootstrap_path}")

    async def _until_deserted(self, old: Envoy, say: Say) -> int:
        """Wait, not for ever, until the old one has no connections; how many there are."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._scene.plan.options.drain_seconds
        port, told = self._scene.plan.ingress.port, False
        while True:
            # Its admin port is closed, and its successor may not ask (see `Plan`).
            left = 0 if old.child.pid is None else connections(old.child.pid, port)
            if left == 0 or loop.time() >= deadline:
                return left
            if not told:
                told = True
                say(f"envoy: the new one serves; the old one still has {left} connections")
            await asyncio.sleep(probe.POLL_SECONDS)

    def _answer_for(self, gone: Envoy) -> None:
        """Take what an Envoy that is gone is told.

        Its successor will send it an order to end, once, and aborts when nobody is there to take it
        (measured); it waits ten seconds for somebody.
        """
        path = self._scene.plan.hot_restart_socket(gone.epoch)
        if self._address_of_the_gone is not None:
            self._address_of_the_gone.close()  # of one that nobody knows any more
        if path is not None:
            path.unlink(missing_ok=True)
            self._address_of_the_gone = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._address_of_the_gone.bind(str(path))

    async def _see_that_somebody_listens(self, old: Envoy) -> None:
        """An Envoy that died just after it took over has left nobody at the port."""
        try:
            await probe.request(self._scene.plan.ingress, "/v1/models")
        except probe.NoReplyError:
            await old.child.renew(0.0, MARGIN_SECONDS)
