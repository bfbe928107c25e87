"""The activity of a pool: fresh metrics matter while requests are being decided."""

from __future__ import annotations

import asyncio

from picker.pool.datastore import Datastore, Snapshot
from picker.pool.inflight import InflightLoad

QUIET_SECONDS = 1.0


class Activity:
    """Knows whether anything was decided within the last second or is under way.

    `note` is called for every decision and costs next to nothing. The task that awaits `began`
    finds out that the pool is idle; until then it counts as busy.
    """

    def __init__(self, inflight: InflightLoad, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._inflight = inflight
        self._quiet_seconds = quiet_seconds
        self._noted = True
        self._idle_noted = asyncio.Event()
        self._busy = True

    @property
    def busy(self) -> bool:
        """Whether metrics should be fresh."""
        return self._busy

    def note(self) -> None:
        """A decision is being made."""
        self._noted = True
        if not self._busy:
            self._busy = True
            self._idle_noted.set()

    async def began(self) -> None:
        """Return at the first decision after an idle time; the pool counts as busy by then."""
        while self._noted or self._inflight.total:
            self._noted = False
            await asyncio.sleep(self._quiet_seconds)
        self._idle_noted.clear()
        self._busy = False
        await self._idle_noted.wait()


class WatchedSnapshots:
    """The datastore as decisions see it: asking for a snapshot is what a decision begins with."""

    def __init__(self, datastore: Datastore, activity: Activity) -> None:
        self._datastore = datastore
        self._activity = activity

    def snapshot(self) -> Snapshot:
        """The pool now."""
        self._activity.note()
        return self._datastore.snapshot()
