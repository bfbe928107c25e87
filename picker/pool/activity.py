"""The pool as decisions see it, and its activity: scrapes are frequent only while it is busy."""

import asyncio

from picker.pool.datastore import Datastore, Snapshot
from picker.pool.inflight import InflightLoad

QUIET_SECONDS = 1.0


class Activity:
    """Tracks whether a decision was made within the last second or a request is under way."""

    def __init__(
        self, datastore: Datastore, inflight: InflightLoad, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        self._datastore = datastore
        self._inflight = inflight
        self._quiet_seconds = quiet_seconds
        self._noted = True
        self._idle_noted = asyncio.Event()
        self.busy = True

    def snapshot(self) -> Snapshot:
        """Return the pool as it is now, for a decision."""
        self._noted = True
        if not self.busy:
            self.busy = True
            self._idle_noted.set()
        return self._datastore.snapshot()

    async def began(self) -> None:
        """Wait for the first decision after an idle time; the pool is busy when this returns."""
        while self._noted or self._inflight.total:
            self._noted = False
            await asyncio.sleep(self._quiet_seconds)
        self._idle_noted.clear()
        self.busy = False
        await self._idle_noted.wait()
