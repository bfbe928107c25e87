"""The published endpoints follow the pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.types import Endpoint, EndpointMetrics
from picker.xds.feed import GATHER_SECONDS, EndpointFeed
from picker.xds.state.cache import Cache

pytestmark = pytest.mark.looptime
ONE, TWO = Endpoint("one", "10.0.0.1", 8000), Endpoint("two", "10.0.0.2", 8000)


class Followed:
    def __init__(self, *endpoints: Endpoint) -> None:
        self.datastore, self.cache = Datastore(), Cache()
        if endpoints:
            self.datastore.set_endpoints(endpoints)
        self.series = PickerMetrics().xds
        self.feed = EndpointFeed(self.datastore, self.cache, "pool", self.series)

    @property
    def number(self) -> int | None:
        return None if self.cache.current is None else self.cache.current.number

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.feed.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_published_before_the_pool_is_known() -> None:
    followed = Followed()
    async with followed.running():
        await asyncio.sleep(60)
        assert followed.number is None
        followed.datastore.set_endpoints([])
        await asyncio.sleep(0.001)
        assert followed.number == 1
        assert dict(followed.series.endpoints.numbers()) == {(): 0.0}


async def test_the_first_change_is_published_at_once_and_later_ones_together() -> None:
    """A thousand changes a second are twenty sets."""
    followed = Followed(ONE)
    async with followed.running():
        await asyncio.sleep(10)
        followed.datastore.set_endpoints([ONE, TWO])
        await asyncio.sleep(0.001)
        assert followed.number == 2
        for n in range(1000):
            port = 8000 + n
            followed.datastore.set_endpoints([ONE, Endpoint("two", "10.0.0.2", port)])
            await asyncio.sleep(0.001)
        assert 15 <= followed.number <= 25
        await asyncio.sleep(GATHER_SECONDS)
        assert dict(followed.series.version.numbers()) == {(): float(followed.number)}
        current = followed.cache.current
        assert current is not None
        followed.feed.publish()
        assert followed.cache.current is current, "the last change was told"


async def test_changes_without_meaning_for_proxies_are_not_published() -> None:
    followed = Followed(ONE)
    async with followed.running():
        await asyncio.sleep(1)
        followed.datastore.update_metrics(ONE.key, EndpointMetrics(waiting_requests=7))
        labelled = Endpoint("one", "10.0.0.1", 8000, labels={"role": "decode"})
        followed.datastore.set_endpoints([labelled])
        await asyncio.sleep(1)
        assert followed.number == 1


async def test_an_endpoint_with_a_host_name_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = Endpoint("named", "worker.example", 8000)
    followed = Followed(named, ONE)
    async with followed.running():
        await asyncio.sleep(1)
        followed.datastore.set_endpoints([named, ONE, TWO])
        await asyncio.sleep(1)
    assert dict(followed.series.endpoints.numbers()) == {(): 2.0}
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("default/named is not published to proxies")
