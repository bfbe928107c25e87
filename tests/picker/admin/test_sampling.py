"""The pool is looked at once a second."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from admin_scene import MadeUpSource, decision

from picker.admin.empty_source import EmptySource
from picker.admin.history import Sample
from picker.admin.sampling import HistorySampler
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.types import Endpoint, EndpointMetrics


async def test_a_sample_holds_what_is_known() -> None:
    """Load as it was scraped, requests as they were counted here."""
    store, inflight, source = Datastore(), InflightLoad(), MadeUpSource()
    store.set_endpoints([Endpoint(name, "10.0.0.1", 8000) for name in "ab"])
    store.update_metrics("default/a", EndpointMetrics(2, 1, 0.25))
    inflight.acquire("default/a")
    source.counts_for = ["default/a"]
    source.counted.decided(decision("a", 64, 16))
    sampler = HistorySampler(store, inflight, source)
    await sampler.sample()
    assert sampler.history.latest("default/a") == Sample(1, 2, 0.25, 0.25, 1, 1.0)
    assert sampler.history.latest("default/b") == Sample(inflight=0)


@pytest.mark.looptime
async def test_a_minute_is_sixty_samples() -> None:
    """Until cancelled."""
    store = Datastore()
    store.set_endpoints([Endpoint("a", "10.0.0.1", 8000)])
    sampler = HistorySampler(store, InflightLoad(), EmptySource())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.5):
            await sampler.run()
    assert sampler.history.view(1).last == 60
