"""Scraping follows the pool and its activity, in virtual time."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from picker.errors import ConfigError
from picker.pool.datastore import Datastore
from picker.scrape.http_client import HttpPages
from picker.scrape.scrape import SLICE_BYTES, polled
from picker.scrape.sources import PageLocation, SourceBinding, TlsFiles, describers
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured
from tests.support.picker.scrape_scene import (
    HOST,
    PAGE,
    Core,
    Length,
    Pages,
    endpoint,
    scraping,
    source,
)


@pytest.mark.looptime
async def test_every_endpoint_is_scraped_twenty_times_a_second() -> None:
    pages = Pages({1: PAGE, 2: PAGE})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2)])
        await asyncio.sleep(1.0)
        metrics = scene.candidate("a").metrics
    assert 17 <= pages.asked[1] <= 23
    assert 17 <= pages.asked[2] <= 23
    assert (metrics.waiting_requests, metrics.kv_cache_usage) == (3, 0.5)
    assert metrics.interval_seconds == 0.05
    assert sorted(pages.forgotten) == [f"{HOST}:1", f"{HOST}:2"]


@pytest.mark.looptime
async def test_a_large_pool_is_scraped_less_often() -> None:
    """About 2,500 scrapes a second in all are spread evenly over the endpoints."""
    pages = Pages(dict.fromkeys(range(1, 251), PAGE))
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(2.0)
        metrics = scene.candidate("w1").metrics
        asked = pages.asked.copy()
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in range(1, 11)])
        await asyncio.sleep(0.5)
        small = scene.candidate("w1").metrics
    assert 4500 < asked.total() < 5500
    assert min(asked.values()) >= 16
    assert metrics.interval_seconds == 0.1
    assert small.interval_seconds == 0.05


@pytest.mark.looptime
async def test_the_first_scrapes_of_endpoints_that_join_together_are_spread() -> None:
    pages = Pages(dict.fromkeys(range(1, 1002), PAGE))
    ports = range(1, 1001)
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in ports])
        await asyncio.sleep(0.1)
        assert 150 < len(pages.asked) < 350
        await asyncio.sleep(0.31)
        assert len(pages.asked) == 1000
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(0.01)
        assert pages.asked[1001] == 1


@pytest.mark.looptime
async def test_an_endpoint_that_returns_is_scraped_again() -> None:
    pages = Pages({1: PAGE})
    async with scraping(source(pages)) as scene:
        for _ in range(2):
            scene.store.set_endpoints([endpoint("a", 1)])
            await asyncio.sleep(0.12)
            assert scene.candidate("a").metrics.waiting_requests == 3
            scene.store.set_endpoints([])
            await asyncio.sleep(0.12)
    assert pages.forgotten == [f"{HOST}:1"] * 2


@pytest.mark.looptime
async def test_very_many_endpoints_share_an_address() -> None:
    pages = Pages({9: PAGE})
    crowd = [
        endpoint(f"w{number}", 1 + number, metrics_host_port=f"{HOST}:9") for number in range(2000)
    ]
    async with scraping(source(pages)) as scene:
        for some in (crowd, crowd[1:], crowd[:1000]):
            scene.store.set_endpoints(some)
            await asyncio.sleep(0.12)
            found = scene.store.snapshot().candidates
            assert len(found) == len(some)
            assert all(one.metrics and one.metrics.waiting_requests == 3 for one in found)
    assert pages.forgotten == [f"{HOST}:9"]


@pytest.mark.looptime
async def test_an_idle_pool_is_scraped_once_a_second_until_a_decision() -> None:
    pages = Pages(dict.fromkeys(range(1, 11), PAGE))
    async with scraping(source(pages), watched=True) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(10.0)
        before = pages.asked.copy()
        await asyncio.sleep(10.0)
        asked = pages.asked - before
        assert 8 <= min(asked.values()) <= max(asked.values()) <= 12
        metrics = scene.candidate("w1").metrics
        assert metrics.interval_seconds == 1.0

        before = pages.asked.copy()
        scene.decide()
        await asyncio.sleep(0.055)
        assert len(pages.asked - before) == 10
        await asyncio.sleep(0.9)
        assert min((pages.asked - before).values()) >= 15
        await asyncio.sleep(10.0)
        before = pages.asked.copy()
        await asyncio.sleep(10.0)
        assert max((pages.asked - before).values()) <= 12


@pytest.mark.looptime
async def test_a_request_in_flight_keeps_the_pool_busy() -> None:
    """Its response may take minutes, while the load changes."""
    pages = Pages({1: PAGE})
    async with scraping(source(pages), watched=True) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        scene.decide()
        scene.inflight.acquire("default/a")
        await asyncio.sleep(20.0)
        assert pages.asked[1] > 350
        scene.inflight.release("default/a")
        await asyncio.sleep(5.0)
        before = pages.asked[1]
        await asyncio.sleep(10.0)
        assert pages.asked[1] - before <= 12


@pytest.mark.looptime
async def test_the_interval_of_a_source_is_rounded_to_ticks() -> None:
    quick, slow = Pages({1: PAGE}), Pages({1: PAGE})
    rare = PageLocation(interval_seconds=4.98)
    async with scraping(
        source(quick), source(slow, ("length", Length()), location=rare), watched=True
    ) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.02)
        assert slow.asked[1] == 1
        await asyncio.sleep(29.0)
        assert 5 <= slow.asked[1] <= 8
        assert scene.candidate("a").attributes == {"Length/test": len(PAGE)}
        assert scene.candidate("a").metrics is not None


@pytest.mark.looptime
async def test_scraping_follows_the_endpoints() -> None:
    pages = Pages({1: PAGE, 2: PAGE})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("b", 2)])
        await asyncio.sleep(0.01)
        asked = pages.asked[1]
        assert scene.candidate("b").metrics is not None
        await asyncio.sleep(0.5)
        assert pages.asked[1] == asked
        assert pages.forgotten == [f"{HOST}:1"]


@pytest.mark.looptime
async def test_a_restarted_server_at_the_same_address_is_scraped() -> None:
    pages = Pages({1: PAGE})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1, incarnation="first")])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1, incarnation="second")])
        assert scene.candidate("a").metrics is None
        await asyncio.sleep(0.2)
        assert scene.candidate("a").metrics is not None


@pytest.mark.looptime
async def test_a_new_metrics_port_replaces_the_old_one() -> None:
    pages = Pages({1: PAGE, 9: PAGE.replace(b" 3", b" 7")})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1, metrics_host_port=f"{HOST}:9")])
        await asyncio.sleep(0.01)
        asked = pages.asked[1]
        metrics = scene.candidate("a").metrics
        assert metrics.waiting_requests == 7
        await asyncio.sleep(0.5)
        assert pages.asked[1] == asked


@pytest.mark.looptime
async def test_ranks_that_share_a_page_read_their_own_samples() -> None:
    page = b"".join(
        b'vllm:num_requests_waiting{engine="%d"} %d\nvllm:num_requests_running{engine="%d"} 0\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.5\n' % (rank, rank + 4, rank, rank)
        for rank in (0, 1)
    )
    pages = Pages({9: page})
    ranks = [
        endpoint(f"p-rank-{rank}", 1 + rank, rank_index=rank, metrics_host_port=f"{HOST}:9")
        for rank in (0, 1)
    ]
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints(ranks)
        await asyncio.sleep(1.0)
        assert 17 <= pages.asked[9] <= 23
        found = [scene.candidate(f"p-rank-{rank}").metrics for rank in (0, 1)]
        assert [metrics.waiting_requests for metrics in found if metrics] == [4, 5]
        scene.store.set_endpoints(ranks[:1])
        await asyncio.sleep(0.2)
        alone = scene.candidate("p-rank-0").metrics
        assert alone.waiting_requests == 9


@pytest.mark.looptime
async def test_a_large_page_is_searched_in_slices() -> None:
    bucket = b'vllm:request_latency_seconds_bucket{engine="%d",le="0.5"} 7\n'
    filler = b"".join(bucket % number for number in range(20_000))
    extractor = configured("core-metrics-extractor")
    pages = Pages({1: filler + PAGE + filler})
    async with scraping(source(pages, ("core", extractor))) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await pages.served.wait()
        turns = 0
        while scene.candidate("a").metrics is None:
            turns += 1
            await asyncio.sleep(0)
        assert scene.candidate("a").metrics.waiting_requests == 3
        assert turns >= len(filler) * 2 // SLICE_BYTES


class Site:
    def __init__(self, location: PageLocation | None) -> None:
        self.location = location


class Named:
    def describe(self, endpoint: Endpoint) -> Mapping[str, Any]:
        return {"Name/test": endpoint.name}


def test_sources_with_a_location_are_polled_and_extractors_describe_endpoints() -> None:
    named = Named()
    bindings = (
        SourceBinding("with-pages", Site(PageLocation()), (("core", Core()),)),
        SourceBinding("without", Site(None), (("named", named),)),
    )
    (one,) = polled(bindings)
    assert (one.source_type, [name for name, _ in one.extractors]) == ("with-pages", ["core"])
    assert isinstance(one.pages, HttpPages)
    store = Datastore((), describers([Core(), named, object()]))
    store.set_endpoints([endpoint("a")])
    assert store.snapshot().candidates[0].attributes == {"Name/test": "a"}


def test_a_source_and_an_extractor_must_match() -> None:
    with pytest.raises(ValueError, match="a without has nothing that a core can read"):
        SourceBinding("without", Site(None), (("core", Core()),))
    with pytest.raises(ValueError, match="a with-pages has nothing that a named can read"):
        SourceBinding("with-pages", Site(PageLocation()), (("named", Named()),))


def test_unusable_certificates_are_a_configuration_error() -> None:
    secure = PageLocation("https", tls=TlsFiles(verify=True, ca_cert_path="/none.pem"))
    with pytest.raises(ConfigError, match="some-source: cannot use its certificates"):
        polled((SourceBinding("some-source", Site(secure), ()),))
