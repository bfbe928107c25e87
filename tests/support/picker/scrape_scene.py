"""A scraper with fake pages, for tests in virtual time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.activity import Activity
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.scrape.engines import EngineTable
from picker.scrape.extract import extract
from picker.scrape.http_client import ScrapeError
from picker.scrape.scrape import PolledSource, Scraper, ScrapeSettings
from picker.scrape.sources import ExtractError, Extraction, PageLocation, Scrape
from picker.types import Candidate, Endpoint

PAGE = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"
HOST = "10.0.0.1"


def endpoint(name: str, port: int = 8000, **fields: Any) -> Endpoint:
    return Endpoint(name, HOST, port, **fields)


class Pages:
    def __init__(self, pages: Mapping[int, bytes]) -> None:
        self.pages = dict(pages)
        self.asked: Counter[int] = Counter()
        self.forgotten: list[str] = []
        self.served = asyncio.Event()

    async def fetch(self, address: str) -> bytes:
        port = int(address.rpartition(":")[2])
        self.asked[port] += 1
        await asyncio.sleep(0.001)
        if port not in self.pages:
            raise ScrapeError("connection refused")
        self.served.set()
        return self.pages[port]

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


class Core:
    def extract(self, scrape: Scrape) -> Extraction:
        return extract(scrape, EngineTable().of(scrape.endpoint.labels))


class Length:
    def extract(self, scrape: Scrape) -> Extraction:
        if not scrape.page:
            raise ExtractError("empty")
        return Extraction(attributes={"Length/test": len(scrape.page)})


def source(
    pages: Pages, *extractors: tuple[str, Any], location: PageLocation | None = None
) -> PolledSource:
    readers = extractors or (("core-metrics-extractor", Core()),)
    return PolledSource("metrics-data-source", location or PageLocation(), pages, readers)


class Scene:
    def __init__(self, sources: Sequence[PolledSource], watched: bool) -> None:
        self.metrics = PickerMetrics()
        self.store = Datastore()
        self.inflight = InflightLoad()
        self.activity = Activity(self.store, self.inflight)
        self.decide = self.activity.snapshot
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
async def scraping(
    *sources: PolledSource, watched: bool = False, pool: Sequence[Endpoint] = ()
) -> AsyncIterator[Scene]:
    scene = Scene(sources, watched)
    if pool:
        scene.store.set_endpoints(pool)
    task = asyncio.create_task(scene.scraper.run())
    try:
        yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
