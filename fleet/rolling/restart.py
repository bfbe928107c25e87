"""Restarts of several parts, one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from fleet import probe
from fleet.control import Order, Part
from fleet.envoy import admin
from fleet.errors import FleetError
from fleet.members import Say
from fleet.rolling.envoys import EnvoyRestart
from fleet.rolling.pickers import PickerRestart
from fleet.rolling.scene import Scene
from fleet.rolling.workers import WorkerRestart

_COUNTED = (admin.COMPLETED, admin.FAILED, admin.WITHOUT_PICKER)


class RollingRestart:
    """Carries out orders, one at a time."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._runs = {
            Part.PICKER: PickerRestart(scene).run,
            Part.ENVOY: EnvoyRestart(scene).run,
            Part.WORKERS: WorkerRestart(scene).run,
        }
        self._busy: str | None = None

    async def obey(self, order: Order, say: Say) -> None:
        """Restart the parts of `order`, in its order.

        Raises `FleetError` for the first that does not come back, and leaves the others alone; and
        at once while another restart is under way.
        """
        if self._busy is not None:
            raise FleetError(f"a restart of {self._busy} is under way; wait until it is done")
        self._busy = ", ".join(part.value for part in order.restart)
        begun, counts = asyncio.get_running_loop().time(), Counter[str]()
        try:
            for part in order.restart:
                # A new Envoy counts from 0.
                before = {} if part is Part.ENVOY else await self._counts()
                await self._runs[part](say)
                counts.update(Counter(await self._counts()) - Counter(before))
            say(f"done in {asyncio.get_running_loop().time() - begun:.1f} s{_meanwhile(counts)}")
        finally:
            self._busy = None

    async def _counts(self) -> Mapping[str, int]:
        """What Envoy has counted so far."""
        try:
            return await admin.stats(self._scene.members.envoy.plan.admin, _COUNTED)
        except probe.NoReplyError:
            return {}


def _meanwhile(counts: Mapping[str, int]) -> str:
    requests, failed, unpicked = (counts[name] for name in _COUNTED)
    return f": {requests} requests, {failed} with a status of 5xx, {unpicked} past the picker"
