"""Keeps what clients are sent equal to the pool.

Draining endpoints have left the pool already, and so they are not sent any more; endpoints that the
picker has ejected are in it still. Nothing at all is sent before the pool is known: a picker that
has just started must not take from a proxy the endpoints that it has.
"""

from __future__ import annotations

import asyncio
import logging

from picker.metrics.families import XdsSeries
from picker.pool.datastore import Datastore, EndpointChanges
from picker.xds import wire
from picker.xds.state.cache import Cache

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05  # between two sets: what changes faster is sent together
MAX_SHARE = 0.05  # of the thread's time, which decisions need: a pool of thousands is sent slower


class EndpointFeed:
    """Publishes the endpoints of `datastore` in `cache`, as those of `cluster`."""

    def __init__(self, datastore: Datastore, cache: Cache, cluster: str, series: XdsSeries) -> None:
        self._datastore, self._cache, self._series = datastore, cache, series
        self._changed, self._known = asyncio.Event(), asyncio.Event()
        known = datastore.snapshot().candidates
        self._assignment = wire.assignment(cluster, (one.endpoint for one in known))
        self._skipped: frozenset[str] = frozenset()
        datastore.subscribe(self._note)
        datastore.watch(self._look)
        self._look()

    async def run(self) -> None:
        """Follow the pool until cancelled. The first change is published at once."""
        clock = asyncio.get_running_loop().time
        await self._known.wait()
        while True:
            self._changed.clear()
            began = clock()
            self.publish()
            await asyncio.sleep(max(GATHER_SECONDS, (clock() - began) / MAX_SHARE))
            await self._changed.wait()

    def publish(self) -> None:
        """Publish the pool as it is now."""
        skipped = frozenset(self._assignment.skipped)
        for key in sorted(skipped - self._skipped):
            log.warning("a proxy cannot be sent %s: its address is no IP address", key)
        self._skipped = skipped
        if self._cache.update(wire.resource(self._assignment)):
            self._series.endpoints.set(self._assignment.size)
            self._series.version.inc()

    def _look(self) -> None:
        # A pool without endpoints becomes known without any change of its endpoints.
        if self._datastore.synced:
            self._known.set()

    def _note(self, changes: EndpointChanges) -> None:
        for endpoint in changes.removed:
            self._assignment.remove(endpoint.key)
        for endpoint in (*changes.added, *changes.updated):
            self._assignment.put(endpoint)
        self._changed.set()
