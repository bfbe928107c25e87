"""The pool is looked at once a second."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from admin_scene import decision

from picker.admin.history import Sample
from picker.admin.sampling import HistorySampler
from picker.admin.traffic import EndpointTraffic
from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.types import Endpoint, EndpointMetrics


def test_a_sample_holds_what_is_known() -> None:
    """Load as it was scraped, requests as they were counted here."""
    store, inflight, traffic = Datastore(), InflightLoad(), EndpointTraffic()
    store.set_endpoints([Endpoint(name, "10.0.0.1", 8000) for name in "ab"])
    store.update_metrics("default/a", EndpointMetrics(2, 1, 0.25))
    inflight.acquire("default/a")
    traffic.decided(decision("a", 64, 16))
    sampler = HistorySampler(store, inflight, traffic)
    sampler.sample()
    assert sampler.history.latest("default/a") == Sample(1, 2, 0.25, 0.25, 1, 1.0)
    assert sampler.history.latest("default/b") == Sample(inflight=0, requests_per_second=0.0)


def test_where_others_decide_only_the_pool_is_known() -> None:
    """The process that watches the pool for several that serve has not seen their requests."""
    store = Datastore()
    store.set_endpoints([Endpoint("a", "10.0.0.1", 8000)])
    sampler = HistorySampler(store, InflightLoad())
    sampler.sample()
    assert sampler.history.latest("default/a") == Sample(inflight=0)


@pytest.mark.looptime
async def test_a_minute_is_sixty_samples() -> None:
    """Until cancelled."""
    store = Datastore()
    store.set_endpoints([Endpoint("a", "10.0.0.1", 8000)])
    sampler = HistorySampler(store, InflightLoad())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.5):
            await sampler.run()
    assert sampler.history.view(1).last == 60
