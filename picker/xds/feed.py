"""Keeps the published endpoints equal to the pool.

Nothing is published before the pool is known, because a picker that has just started must not
remove the endpoints of a proxy.
"""

import asyncio
import logging

from picker.metrics.picker_metrics import XdsSeries
from picker.pool.datastore import Datastore, EndpointChanges
from picker.xds import wire
from picker.xds.state.cache import Cache

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05  # between two sets; faster changes are sent together
MAX_SHARE = 0.05  # of the thread's time, so that a pool of thousands does not delay decisions


class EndpointFeed:
    """Publishes the endpoints of `datastore` in `cache` under the name `cluster`."""

    def __init__(self, datastore: Datastore, cache: Cache, cluster: str, series: XdsSeries) -> None:
        self._datastore, self._cache, self._series = datastore, cache, series
        self._changed, self._known = asyncio.Event(), asyncio.Event()
        known = datastore.snapshot().candidates
        self._assignment = wire.assignment(cluster, (one.endpoint for one in known))
        self._skipped: frozenset[str] = frozenset()
        datastore.subscribe(self._note)
        datastore.watch(self._check_known)
        self._check_known()

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
        skipped = frozenset(self._assignment.skipped)
        for key in sorted(skipped - self._skipped):
            log.warning("%s is not published to proxies: its address is not an IP address", key)
        self._skipped = skipped
        if self._cache.update(wire.resource(self._assignment)):
            self._series.endpoints.set(self._assignment.size)
            self._series.version.inc()

    def _check_known(self) -> None:
        # A pool without endpoints becomes known without a change of endpoints.
        if self._datastore.synced:
            self._known.set()

    def _note(self, changes: EndpointChanges) -> None:
        for endpoint in changes.removed:
            self._assignment.remove(endpoint.key)
        for endpoint in (*changes.added, *changes.updated):
            self._assignment.put(endpoint)
        self._changed.set()
