"""A failure affects only its endpoint and source, and is logged once; in virtual time."""

import asyncio
import logging
from contextlib import suppress

import pytest

from picker.scrape.sources import Extraction, PageLocation, Scrape
from tests.support.picker.scrape_scene import PAGE, Core, Length, Pages, endpoint, scraping, source


@pytest.mark.looptime
async def test_the_load_is_unknown_after_four_failures_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


@pytest.mark.looptime
async def test_several_extractors_read_the_same_page() -> None:
    class Other(Length):
        def extract(self, scrape: Scrape) -> Extraction:
            return Extraction(attributes={"Other/test": 1})

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


@pytest.mark.looptime
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
    async with scraping(source(pages)) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        await asyncio.sleep(0.01)
        scene.store.set_endpoints([endpoint("a", 2)])
        await asyncio.sleep(0.5)
        assert pages.asked[2] > 0
        assert pages.asked[1] == 1
        assert scene.candidate("a").metrics is None


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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
    async with scraping(source(Pages({1: b"page"}), ("length", reader))) as scene:
        scene.store.set_endpoints([endpoint("a", 1)])
        seen: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
        while reader.pages < 100:
            await asyncio.sleep(0.02)
            if reader.pages:
                names = tuple(scene.candidate("a").attributes)
                seen[reader.pages % 2 == 1].add(names)
        assert seen == {True: {("Length/test", "Other/test")}, False: {("Length/test",)}}
    assert sum("of default/a: " in record.message for record in caplog.records) == 7
