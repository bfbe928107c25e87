"""Scraping follows the pool in virtual time; fetching is tried against a real HTTP server."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from aiohttp import web

from picker.datalayer.datastore import Datastore
from picker.datalayer.scrape import (
    MAX_PAGE_BYTES,
    HttpPages,
    ScrapeError,
    Scraper,
    ScrapeSettings,
)
from picker.metrics import PickerMetrics
from picker.types import Candidate, Endpoint

PAGE = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"


def endpoint(name: str, port: int = 8000) -> Endpoint:
    return Endpoint(name, "127.0.0.1", port)


class Pages:
    """A fetcher that serves pages from a table and counts; a missing page is a failure."""

    def __init__(self, **pages: bytes) -> None:
        self.pages = pages
        self.asked: Counter[str] = Counter()

    async def __call__(self, wanted: Endpoint) -> bytes:
        self.asked[wanted.name] += 1
        await asyncio.sleep(0.001)
        if wanted.name not in self.pages:
            raise ScrapeError("connection refused")
        return self.pages[wanted.name]


class Scene:
    """A datastore and a running scraper."""

    def __init__(self, pages: Pages) -> None:
        self.metrics = PickerMetrics()
        self.store = Datastore()
        self.scraper = Scraper(self.store, pages, self.metrics, ScrapeSettings(), Random(1))

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
async def scraping(pages: Pages) -> AsyncIterator[Scene]:
    scene = Scene(pages)
    task = asyncio.create_task(scene.scraper.run())
    try:
        yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.looptime
async def test_every_endpoint_is_asked_about_twenty_times_a_second() -> None:
    """The interval is 50 ms, give or take the jitter."""
    pages = Pages(a=PAGE, b=PAGE)
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint("a"), endpoint("b")])
        await asyncio.sleep(1.0)
        metrics = scene.candidate("a").metrics
    assert 17 <= pages.asked["a"] <= 23
    assert 17 <= pages.asked["b"] <= 23
    assert metrics is not None
    assert (metrics.waiting_requests, metrics.kv_cache_usage) == (3, 0.5)


@pytest.mark.looptime
async def test_a_large_pool_is_asked_less_often() -> None:
    """About 600 scrapes a second in all, spread evenly over the endpoints."""
    names = [f"w{i}" for i in range(120)]
    pages = Pages(**dict.fromkeys(names, PAGE))
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint(name) for name in names])
        await asyncio.sleep(2.0)
    assert 1000 < pages.asked.total() < 1400
    assert min(pages.asked.values()) >= 8


@pytest.mark.looptime
async def test_scraping_follows_the_endpoints() -> None:
    """One that joins is asked at once, one that leaves no more."""
    pages = Pages(a=PAGE, b=PAGE)
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint("a")])
        await asyncio.sleep(0.2)
        scene.store.set_endpoints([endpoint("b")])
        await asyncio.sleep(0.01)
        asked = pages.asked["a"]
        assert scene.candidate("b").metrics is not None
        await asyncio.sleep(0.5)
        assert pages.asked["a"] == asked


@pytest.mark.looptime
async def test_failures_keep_the_values_then_make_the_load_unknown_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fourth failure in a row marks the endpoint stale; success brings it back."""
    pages = Pages(a=PAGE)
    caplog.set_level(logging.INFO)
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint("a")])
        await asyncio.sleep(0.2)
        del pages.pages["a"]
        await asyncio.sleep(0.12)
        assert scene.candidate("a").metrics is not None
        await asyncio.sleep(2.0)
        assert scene.candidate("a").metrics is None
        assert scene.counted("datalayer_poll_errors_total") > 30
        pages.pages["a"] = PAGE
        await asyncio.sleep(0.1)
        assert scene.candidate("a").metrics is not None
    said = [record.message for record in caplog.records if "a" in record.message]
    assert [line for line in said if "load unknown" in line] == [
        "endpoint default/a: load unknown after 4 failed scrapes: connection refused"
    ]
    assert sum("answers scrapes again" in line for line in said) == 1


@pytest.mark.looptime
async def test_a_page_without_load_counts_as_an_extract_error() -> None:
    """Somebody else listens on that port."""
    pages = Pages(a=b"hello")
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint("a")])
        await asyncio.sleep(0.5)
        assert scene.candidate("a").metrics is None
        assert scene.counted("datalayer_extract_errors_total") >= 4


@pytest.mark.looptime
async def test_a_mistake_while_scraping_one_endpoint_does_not_stop_the_others() -> None:
    """Anything a fetch raises stays with its endpoint."""

    class Trap(Pages):
        async def __call__(self, wanted: Endpoint) -> bytes:
            if wanted.name == "bad":
                raise KeyError("surprise")
            return await super().__call__(wanted)

    async with scraping(Trap(good=PAGE)) as scene:
        scene.store.set_endpoints([endpoint("bad"), endpoint("good")])
        await asyncio.sleep(0.5)
        assert scene.candidate("good").metrics is not None
        assert scene.candidate("bad").metrics is None


@pytest.mark.looptime
async def test_a_page_that_arrives_after_its_endpoint_moved_is_dropped() -> None:
    """The old server's load says nothing about the new one."""
    release = asyncio.Event()

    class Slow(Pages):
        async def __call__(self, wanted: Endpoint) -> bytes:
            self.asked[str(wanted.port)] += 1
            if wanted.port == 8000:
                with suppress(asyncio.CancelledError):  # the worst case: it cannot be stopped
                    await release.wait()
                return PAGE
            raise ScrapeError("not up yet")

    pages = Slow()
    async with scraping(pages) as scene:
        scene.store.set_endpoints([endpoint("a", 8000)])
        await asyncio.sleep(0.01)
        scene.store.set_endpoints([endpoint("a", 9000)])
        await asyncio.sleep(0.1)
        assert pages.asked["9000"] > 0
        assert scene.candidate("a").metrics is None


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def worker(answer: Answer) -> AsyncIterator[Endpoint]:
    """A real HTTP server on a free port."""
    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield endpoint("w", runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def test_pages_are_fetched_over_one_connection() -> None:
    """Twenty requests a second must not be twenty connections a second."""
    peers: set[object] = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=PAGE)

    async with worker(answer) as where, HttpPages() as pages:
        assert [await pages(where) for _ in range(3)] == [PAGE] * 3
    assert len(peers) == 1


async def moved(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "/metrics"})


async def broken(_: web.Request) -> web.Response:
    return web.Response(status=500)


async def huge(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * (MAX_PAGE_BYTES + 1))


async def silent(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (moved, "status 302"),
        (broken, "status 500"),
        (huge, "larger than"),
        (silent, "no answer within 0.05 s"),
    ],
)
async def test_what_is_no_page_is_an_error_with_a_reason(answer: Answer, reason: str) -> None:
    """Redirects are not followed, sizes and times are bounded."""
    patience = 0.05 if answer is silent else 5.0
    async with worker(answer) as where, HttpPages(timeout_seconds=patience) as pages:
        with pytest.raises(ScrapeError, match=reason):
            await pages(where)


async def test_nobody_listening_is_an_error_too() -> None:
    """A worker that is down."""
    async with worker(broken) as where:
        pass
    async with HttpPages() as pages:
        with pytest.raises(ScrapeError):
            await pages(where)
