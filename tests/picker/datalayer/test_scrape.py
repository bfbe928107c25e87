"""Scraping follows the pool and its activity, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from picker.datalayer.activity import Activity, WatchedSnapshots
from picker.datalayer.datastore import Datastore
from picker.datalayer.engines import EngineTable
from picker.datalayer.extract import extract
from picker.datalayer.http_pages import HttpPages, ScrapeError
from picker.datalayer.inflight import InflightLoad
from picker.datalayer.scrape import PolledSource, Scraper, ScrapeSettings, polled
from picker.datalayer.sources import (
    ExtractError,
    Findings,
    PageLocation,
    Scrape,
    SourceBinding,
    TlsFiles,
    describers,
)
from picker.errors import ConfigError
from picker.metrics import PickerMetrics
from picker.types import Candidate, Endpoint

PAGE = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"
HOST = "10.0.0.1"


def endpoint(name: str, port: int = 8000, **fields: Any) -> Endpoint:
    return Endpoint(name, HOST, port, **fields)


class Pages:
    """A fetcher that serves pages by port and counts; a missing page is a failure."""

    def __init__(self, pages: Mapping[int, bytes]) -> None:
        self.pages = dict(pages)
        self.asked: Counter[int] = Counter()
        self.forgotten: list[str] = []

    async def fetch(self, address: str) -> bytes:
        port = int(address.rpartition(":")[2])
        self.asked[port] += 1
        await asyncio.sleep(0.001)
        if port not in self.pages:
            raise ScrapeError("connection refused")
        return self.pages[port]

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


class Core:
    """Reads the load, as the core-metrics-extractor does."""

    def extract(self, scrape: Scrape) -> Findings:
        return extract(scrape, EngineTable().of(scrape.endpoint.labels))


class Length:
    """Finds out how long a page is; an empty one says nothing."""

    def extract(self, scrape: Scrape) -> Findings:
        if not scrape.page:
            raise ExtractError("empty")
        return Findings(attributes={"Length/test": len(scrape.page)})


def source(
    pages: Pages, *extractors: tuple[str, Any], location: PageLocation | None = None
) -> PolledSource:
    readers = extractors or (("core-metrics-extractor", Core()),)
    return PolledSource("metrics-data-source", location or PageLocation(), pages, readers)


class Scene:
    """A datastore and a scraper."""

    def __init__(self, sources: Sequence[PolledSource], watched: bool) -> None:
        self.metrics = PickerMetrics()
        self.store = Datastore()
        self.inflight = InflightLoad()
        self.activity = Activity(self.inflight)
        self.decide = WatchedSnapshots(self.store, self.activity).snapshot
        self.scraper = Scraper(
            self.store,
            sources,
            self.metrics,
            ScrapeSettings(),
            Random(1),
            self.activity if watched else None,
        )

    def candidate(self, name: str) -> Candidate:
        found = self.store.get(f"default/{name}")
        assert found is not None
        return found

    def counted(self, series: str) -> float:
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"llm_d_epp_{series}"
        )


@asynccontextmanager
async def scraping(*sources: PolledSource, watched: bool = False) -> AsyncIterator[Scene]:
    scene = Scene(sources, watched)
    task = asyncio.create_task(scene.scraper.run())
    try:
        yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.looptime
async def test_every_endpoint_is_asked_about_twenty_times_a_second() -> None:
    """The interval is 50 ms, give or take the jitter; the metrics tell it."""
    pages = Pages({1: PAGE, 2: PAGE})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2)])
        await asyncio.sleep(1.0)
        metrics = scene.candidate("a").metrics
    assert 17 <= pages.asked[1] <= 23
    assert 17 <= pages.asked[2] <= 23
    assert metrics is not None
    assert (metrics.waiting_requests, metrics.kv_cache_usage) == (3, 0.5)
    assert metrics.interval_seconds == 0.05
    assert sorted(pages.forgotten) == [f"{HOST}:1", f"{HOST}:2"]


@pytest.mark.looptime
async def test_a_large_pool_is_asked_less_often() -> None:
    """About 2,500 scrapes a second in all, spread evenly over the endpoints."""
    pages = Pages(dict.fromkeys(range(1, 251), PAGE))
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(2.0)
        metrics = scene.candidate("w1").metrics
    assert 4500 < pages.asked.total() < 5500
    assert min(pages.asked.values()) >= 16
    assert metrics is not None
    assert metrics.interval_seconds == 0.1


@pytest.mark.looptime
async def test_an_idle_pool_is_asked_once_a_second_and_a_decision_wakes_it() -> None:
    """Everybody is asked within a tick of the first decision."""
    pages = Pages(dict.fromkeys(range(1, 11), PAGE))
    async with scraping(source(pages), watched=True) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(10.0)
        before = pages.asked.copy()
        await asyncio.sleep(10.0)
        asked = pages.asked - before
        assert 8 <= min(asked.values()) <= max(asked.values()) <= 12
        metrics = scene.candidate("w1").metrics
        assert metrics is not None
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
async def test_a_request_under_way_keeps_the_pool_busy() -> None:
    """Its answer may take minutes, during which the endpoints' load changes."""
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
async def test_a_sources_interval_is_rounded_to_ticks() -> None:
    """The first page is asked for at once; an idle pool does not hurry a slow source."""
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
    """One that joins is asked at once, one that leaves no more."""
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
async def test_a_new_place_of_the_metrics_is_asked_and_the_old_one_not() -> None:
    """Its address stays, so what is known stays known until then."""
    pages = Pages({1: PAGE, 9: PAGE.replace(b" 3", b" 7")})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1, metrics_host_port=f"{HOST}:9")])
        await asyncio.sleep(0.01)
        asked = pages.asked[1]
        metrics = scene.candidate("a").metrics
        assert metrics is not None
        assert metrics.waiting_requests == 7
        await asyncio.sleep(0.5)
        assert pages.asked[1] == asked


@pytest.mark.looptime
async def test_ranks_that_share_a_page_each_read_their_part_of_it() -> None:
    """It is asked for once; as soon as one is alone there, the whole page is its own."""
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
        assert alone is not None
        assert alone.waiting_requests == 9


@pytest.mark.looptime
async def test_failures_keep_the_values_then_make_the_load_unknown_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fourth failure in a row marks the endpoint stale; success brings it back."""
    pages = Pages({1: PAGE})
    caplog.set_level(logging.INFO)
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        del pages.pages[1]
        await asyncio.sleep(0.12)
        assert scene.candidate("a").metrics is not None
        await asyncio.sleep(4.0)
        candidate = scene.candidate("a")
        assert candidate.metrics is None
        assert candidate.last_metrics is not None
        assert candidate.last_metrics.waiting_requests == 3
        assert 15 < scene.counted("datalayer_poll_errors_total") < 30  # it is asked less often
        pages.pages[1] = PAGE
        await asyncio.sleep(0.3)
        assert scene.candidate("a").metrics is not None
    said = [record.message for record in caplog.records if "default/a" in record.message]
    assert [line for line in said if "unknown" in line] == [
        "endpoint default/a: load unknown after 4 failed scrapes: connection refused"
    ]
    assert sum("answers scrapes again" in line for line in said) == 1


@pytest.mark.looptime
async def test_a_source_that_fails_takes_only_its_own_findings_along() -> None:
    """The load is known from elsewhere."""
    load, extra = Pages({1: PAGE}), Pages({1: b"12345"})
    async with scraping(source(load), source(extra, ("length", Length()))) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        assert scene.candidate("a").attributes == {"Length/test": 5}
        extra.pages[1] = b""
        await asyncio.sleep(1.0)
        assert scene.candidate("a").attributes == {}
        assert scene.candidate("a").metrics is not None
        assert scene.counted("datalayer_extract_errors_total") >= 4
        assert scene.counted("datalayer_poll_errors_total") == 0


@pytest.mark.looptime
async def test_several_extractors_read_the_same_page() -> None:
    """Also two of one type; what one cannot read does not stop the others."""

    class Other(Length):
        def extract(self, scrape: Scrape) -> Findings:
            return Findings(attributes={"Other/test": 1})

    pages = Pages({1: b"no metrics"})
    readers = (("core", Core()), ("length", Length()), ("length", Other()))
    async with scraping(source(pages, *readers)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2)])
        await asyncio.sleep(0.2)
        assert scene.candidate("a").attributes == {"Length/test": 10, "Other/test": 1}
        assert scene.candidate("a").metrics is None


@pytest.mark.looptime
async def test_a_mistake_while_scraping_one_endpoint_does_not_stop_the_others() -> None:
    """Anything a fetch or an extractor raises stays with its endpoint."""

    class Trap(Pages):
        async def fetch(self, address: str) -> bytes:
            if address.endswith(":2"):
                raise KeyError("surprise")
            return await super().fetch(address)

    class Surprised(Core):
        def extract(self, scrape: Scrape) -> Findings:
            if scrape.endpoint.name == "odd":
                raise ZeroDivisionError
            return super().extract(scrape)

    pages = Trap({1: PAGE, 3: PAGE})
    async with scraping(source(pages, ("core", Surprised()))) as scene:
        scene.store.set_endpoints([endpoint("bad", 2), endpoint("good", 1), endpoint("odd", 3)])
        await asyncio.sleep(0.5)
        assert scene.candidate("good").metrics is not None
        assert scene.candidate("bad").metrics is None
        assert scene.candidate("odd").metrics is None
        assert scene.counted("datalayer_extract_errors_total") >= 4


@pytest.mark.looptime
async def test_a_page_that_arrives_after_its_endpoint_moved_is_dropped() -> None:
    """The old server's load says nothing about the new one."""
    release = asyncio.Event()

    class Slow(Pages):
        async def fetch(self, address: str) -> bytes:
            if address.endswith(":1"):
                with suppress(asyncio.CancelledError):  # the worst case: it cannot be stopped
                    await release.wait()
                self.asked[1] += 1
                return PAGE
            return await super().fetch(address)

    pages = Slow({})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.01)
        scene.store.set_endpoints([endpoint("a", 2)])
        await asyncio.sleep(0.5)
        assert pages.asked[2] > 0
        assert pages.asked[1] == 1
        assert scene.candidate("a").metrics is None


@pytest.mark.looptime
async def test_an_endpoint_whose_node_is_unknown_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exporter on its node cannot be asked."""
    pages = Pages({9400: b"12345"})
    nodes = PageLocation(port=9400, use_node_address=True)
    async with scraping(source(pages, ("length", Length()), location=nodes)) as scene:
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2, node_address="10.9.0.1")])
        await asyncio.sleep(0.1)
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2, node_address="10.9.0.2")])
        await asyncio.sleep(0.1)
        assert scene.candidate("a").attributes == {}
        assert scene.candidate("b").attributes == {"Length/test": 5}
        assert scene.counted("datalayer_poll_errors_total") == 2
    assert [record.message for record in caplog.records] == [
        "metrics-data-source: the node of default/a is unknown"
    ]


class Site:
    """A source, wherever its location says."""

    def __init__(self, location: PageLocation | None) -> None:
        self.location = location


class Named:
    """Finds an endpoint's name."""

    def describe(self, endpoint: Endpoint) -> Mapping[str, Any]:
        return {"Name/test": endpoint.name}


def test_a_configurations_sources_become_what_is_asked_and_what_is_told() -> None:
    """Pages for those with a location, descriptions for the others."""
    bindings = (
        SourceBinding("with-pages", Site(PageLocation()), (("core", Core()),)),
        SourceBinding("without", Site(None), (("named", Named()),)),
    )
    (one,) = polled(bindings)
    assert (one.source_type, [name for name, _ in one.extractors]) == ("with-pages", ["core"])
    assert isinstance(one.pages, HttpPages)
    store = Datastore((), describers(bindings))
    store.set_endpoints([endpoint("a")])
    assert store.snapshot().candidates[0].attributes == {"Name/test": "a"}


def test_a_source_and_an_extractor_must_fit() -> None:
    """Who reads pages has nothing to read where there are none, and the other way round."""
    with pytest.raises(ValueError, match="a without has nothing that a core can read"):
        SourceBinding("without", Site(None), (("core", Core()),))
    with pytest.raises(ValueError, match="a with-pages has nothing that a named can read"):
        SourceBinding("with-pages", Site(PageLocation()), (("named", Named()),))


def test_unusable_certificates_are_a_mistake_of_the_configuration() -> None:
    """Found before the first scrape."""
    secure = PageLocation("https", tls=TlsFiles(verify=True, ca_cert_path="/none.pem"))
    with pytest.raises(ConfigError, match="some-source: cannot use its certificates"):
        polled((SourceBinding("some-source", Site(secure), ()),))
