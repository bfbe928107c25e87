"""Looks at the pool once a second, for its history."""

from __future__ import annotations

import asyncio

from picker.admin.history import INTERVAL_SECONDS, History, Sample
from picker.admin.sources import AdminSource
from picker.admin.traffic import Recent
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.types import Candidate


class HistorySampler:
    """Owns the history of the pool. `source` says what was sent where."""

    def __init__(self, datastore: Datastore, inflight: InflightLoad, source: AdminSource) -> None:
        self.history = History()
        self._datastore = datastore
        self._inflight = inflight
        self._source = source

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.sample()

    async def sample(self) -> None:
        """Look at the pool now."""
        recent = await self._source.traffic()
        candidates = self._datastore.snapshot().candidates
        self.history.record({one.key: self._of(one, recent.get(one.key)) for one in candidates})

    def _of(self, candidate: Candidate, recent: Recent | None) -> Sample:
        metrics = candidate.metrics
        return Sample(
            running=None if metrics is None else metrics.running_requests,
            waiting=None if metrics is None else metrics.waiting_requests,
            kv_cache_usage=None if metrics is None else metrics.kv_cache_usage,
            prefix_hit_share=None if recent is None else recent.prefix_hit_share,
            inflight=self._inflight.requests(candidate.key),
            requests_per_second=None if recent is None else recent.requests_per_second,
        )
