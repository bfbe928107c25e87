"""Keeps what clients are told equal to the pool.

Draining endpoints have left the pool already, and so they are told of no more; endpoints that the
picker has ejected are in it still. Nothing at all is said before the pool is known: a picker that
has just started must not take from a proxy the endpoints that it has.
"""

from __future__ import annotations

import asyncio
import logging

from picker.datalayer.datastore import Datastore, EndpointChanges
from picker.xds import wire
from picker.xds.assignment import assignment_of
from picker.xds.cache import Cache
from picker.xds_series import XdsSeries

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05  # between two sets: what changes faster is told of together
MAX_SHARE = 0.05  # of the thread's time, which decisions need: a pool of thousands is told slower


class EndpointFeed:
    """Tells `cache` the endpoints of `datastore`, as those of `cluster`."""

    def __init__(self, datastore: Datastore, cache: Cache, cluster: str, series: XdsSeries) -> None:
        self._datastore, self._cache = datastore, cache
        self._cluster, self._series = cluster, series
        self._changed, self._known = asyncio.Event(), asyncio.Event()
        self._encoder = wire.AssignmentEncoder()
        self._skipped: frozenset[str] = frozenset()
        datastore.watch(self._look)
        self._look()

    async def run(self) -> None:
        """Follow the pool until cancelled. The first change is told of at once."""
        clock = asyncio.get_running_loop().time
        self._datastore.subscribe(self._note)
        try:
            await self._known.wait()
            while True:
                self._changed.clear()
                began = clock()
                self.publish()
                await asyncio.sleep(max(GATHER_SECONDS, (clock() - began) / MAX_SHARE))
                await self._changed.wait()
        finally:
            self._datastore.unsubscribe(self._note)

    def publish(self) -> None:
        """Tell of the pool as it is now."""
        candidates = self._datastore.snapshot().candidates
        assignment = assignment_of(self._cluster, (one.endpoint for one in candidates))
        skipped = frozenset(assignment.skipped)
        for key in sorted(skipped - self._skipped):
            log.warning("a proxy cannot be told of %s: its address is no IP address", key)
        self._skipped = skipped
        if self._cache.update(self._encoder.encode(assignment)):
            self._series.endpoints.set(assignment.size)
            self._series.version.inc()

    def _look(self) -> None:
        # A pool without endpoints becomes known without any change of its endpoints.
        if self._datastore.synced:
            self._known.set()

    def _note(self, _changes: EndpointChanges) -> None:
        self._changed.set()
