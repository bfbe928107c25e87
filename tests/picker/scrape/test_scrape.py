"""Scraping follows the pool and its activity, and limits failures, in virtual time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from picker.errors import ConfigError
from picker.pool.datastore import Datastore
from picker.scrape.http_client import HttpPages
from picker.scrape.scrape import SLICE_BYTES, polled
from picker.scrape.sources import (
    Extraction,
    PageLocation,
    Scrape,
    SourceBinding,
    TlsFiles,
    describers,
)
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

pytestmark = pytest.mark.looptime
A = [endpoint("a", 1)]


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


class TimedPages(Pages):
    """Notes how many scrapes begin at each moment."""

    def __init__(self, pages: Mapping[int, bytes]) -> None:
        super().__init__(pages)
        self.begun: Counter[float] = Counter()

    async def fetch(self, address: str) -> bytes:
        self.begun[round(asyncio.get_running_loop().time(), 4)] += 1
        return await super().fetch(address)


@pytest.mark.parametrize(("endpoints", "moments", "most"), [(10, 50, 10), (100, 300, 24)])
async def test_scrapes_begin_at_common_moments_but_not_too_many(
    endpoints: int, moments: int, most: int
) -> None:
    """Each moment wakes the picker once, and delays decisions by the scrapes that begin then."""
    pages = TimedPages(dict.fromkeys(range(1, endpoints + 1), PAGE))
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint(f"w{port}", port) for port in pages.pages])
        await asyncio.sleep(1.0)
        pages.begun.clear()
        await asyncio.sleep(1.0)
    assert pages.begun.total() > 17 * endpoints
    assert len(pages.begun) < moments
    assert max(pages.begun.values()) <= most


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


async def test_a_request_in_flight_keeps_the_pool_busy() -> None:
    """Its response may take minutes, while the load changes."""
    pages = Pages({1: PAGE})
    async with scraping(source(pages), watched=True, pool=A) as scene:
        scene.decide()
        scene.inflight.acquire("default/a")
        await asyncio.sleep(20.0)
        assert pages.asked[1] > 350
        scene.inflight.release("default/a")
        await asyncio.sleep(5.0)
        before = pages.asked[1]
        await asyncio.sleep(10.0)
        assert pages.asked[1] - before <= 12


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


async def test_scraping_follows_the_endpoints() -> None:
    pages = Pages({1: PAGE, 2: PAGE})
    async with scraping(source(pages), pool=A) as scene:
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("b", 2)])
        await asyncio.sleep(0.01)
        asked = pages.asked[1]
        assert scene.candidate("b").metrics is not None
        await asyncio.sleep(0.5)
        assert pages.asked[1] == asked
        assert pages.forgotten == [f"{HOST}:1"]


async def test_a_restarted_server_at_the_same_address_is_scraped() -> None:
    pages = Pages({1: PAGE})
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1, incarnation="first")])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1, incarnation="second")])
        assert scene.candidate("a").metrics is None
        await asyncio.sleep(0.2)
        assert scene.candidate("a").metrics is not None


async def test_a_new_metrics_port_replaces_the_old_one() -> None:
    pages = Pages({1: PAGE, 9: PAGE.replace(b" 3", b" 7")})
    async with scraping(source(pages), pool=A) as scene:
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1, metrics_host_port=f"{HOST}:9")])
        await asyncio.sleep(0.01)
        asked = pages.asked[1]
        metrics = scene.candidate("a").metrics
        assert metrics.waiting_requests == 7
        await asyncio.sleep(0.5)
        assert pages.asked[1] == asked


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


async def test_a_large_page_is_searched_in_slices() -> None:
    bucket = b'vllm:request_latency_seconds_bucket{engine="%d",le="0.5"} 7\n'
    filler = b"".join(bucket % number for number in range(20_000))
    extractor = configured("core-metrics-extractor")
    pages = Pages({1: filler + PAGE + filler})
    async with scraping(source(pages, ("core", extractor)), pool=A) as scene:
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


async def test_the_load_is_unknown_after_four_failures_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = Pages({1: PAGE})
    caplog.set_level(logging.INFO)
    async with scraping(source(pages), pool=A) as scene:
        await asyncio.sleep(0.2)
        del pages.pages[1]
        await asyncio.sleep(0.12)
        assert scene.candidate("a").metrics is not None
        await asyncio.sleep(4.0)
        candidate = scene.candidate("a")
        assert candidate.metrics is None
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


async def test_a_failing_source_loses_only_its_own_values() -> None:
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


async def test_several_extractors_read_the_same_page() -> None:
    class Other(Length):
        def extract(self, scrape: Scrape) -> Extraction:
            return Extraction(attributes={"Other/test": 1})

    pages = Pages({1: b"no metrics"})
    readers = (("core", Core()), ("length", Length()), ("length", Other()))
    async with scraping(source(pages, *readers), pool=A) as scene:
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2)])
        await asyncio.sleep(0.2)
        assert scene.candidate("a").attributes == {"Length/test": 10, "Other/test": 1}
        assert scene.candidate("a").metrics is None


async def test_a_bug_in_the_scrape_of_one_endpoint_does_not_stop_the_others() -> None:

    class Trap(Pages):
        async def fetch(self, address: str) -> bytes:
            if address.endswith(":2"):
                raise KeyError("surprise")
            return await super().fetch(address)

    class Surprised(Core):
        def extract(self, scrape: Scrape) -> Extraction:
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


async def test_a_page_that_arrives_after_its_endpoint_moved_is_dropped() -> None:
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
    async with scraping(source(pages), pool=A) as scene:
        await asyncio.sleep(0.01)
        scene.store.set_endpoints([endpoint("a", 2)])
        await asyncio.sleep(0.5)
        assert pages.asked[2] > 0
        assert pages.asked[1] == 1
        assert scene.candidate("a").metrics is None


async def test_an_endpoint_with_an_unknown_node_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = Pages({9400: b"12345"})
    nodes = PageLocation(port=9400, use_node_address=True)
    async with scraping(source(pages, ("length", Length()), location=nodes)) as scene:
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2, node_address="10.9.0.1")])
        await asyncio.sleep(0.1)
        scene.store.set_endpoints([endpoint("a", 1), endpoint("b", 2, node_address="10.9.0.2")])
        await asyncio.sleep(0.1)
        assert scene.candidate("a").attributes == {}
        assert scene.candidate("b").attributes == {"Length/test": 5}
        assert scene.counted("datalayer_poll_errors_total") == 1
    assert [record.message for record in caplog.records] == [
        "metrics-data-source: the node of default/a is unknown"
    ]


async def test_the_problems_of_a_usable_page_are_logged_when_they_change(
    caplog: pytest.LogCaptureFixture,
) -> None:

    class Partly(Length):
        def extract(self, scrape: Scrape) -> Extraction:
            problems = () if scrape.page == b"good" else ("no queue",)
            return Extraction(attributes={"Length/test": len(scrape.page)}, problems=problems)

    pages = Pages({1: b"bad"})
    async with scraping(source(pages, ("length", Partly()))) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.5)
        assert scene.candidate("a").attributes == {"Length/test": 3}
        counted = scene.counted("datalayer_extract_errors_total")
        assert counted >= 4
        pages.pages[1] = b"good"
        await asyncio.sleep(0.5)
        assert scene.counted("datalayer_extract_errors_total") - counted <= 1
    lines = [record.message.partition("default/a: ")[2] for record in caplog.records]
    assert [line for line in lines if line] == ["no queue (change 1)", "complete again (change 2)"]


async def test_a_series_that_comes_and_goes_is_unknown_while_it_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Coming(Length):
        pages = 0

        def extract(self, scrape: Scrape) -> Extraction:
            self.pages += 1
            if self.pages % 2:
                return Extraction(attributes={"Length/test": 7, "Other/test": 1})
            return Extraction(attributes={"Length/test": 7}, problems=("no other",))

    reader = Coming()
    async with scraping(source(Pages({1: b"page"}), ("length", reader)), pool=A) as scene:
        seen: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
        while reader.pages < 100:
            await asyncio.sleep(0.02)
            if reader.pages:
                names = tuple(scene.candidate("a").attributes)
                seen[reader.pages % 2 == 1].add(names)
        assert seen == {True: {("Length/test", "Other/test")}, False: {("Length/test",)}}
    assert sum("of default/a: " in record.message for record in caplog.records) == 7
