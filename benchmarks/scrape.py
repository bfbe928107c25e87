"""What scraping costs the picker's event loop, with the production code.

    python benchmarks/scrape.py [--endpoints 100] [--seconds 10]

A child process plays that many workers, each with its own port and a vLLM page of 4 KB or 64 KB.
First pages are fetched, read and stored as fast as they come, by a client made with aiohttp and by
the picker's own: CPU microseconds per scrape. Then the scraper runs as in the picker: cores used
while requests are decided (an interval of 50 ms) and while nothing happens. CPU seconds of this
process are counted, not time, so other programs change little. Fixed seed. Prints tables and writes
benchmarks/results/scrape.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from random import Random
from typing import cast

import aiohttp
import uvloop
from result_files import RESULTS, write_results

from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.activity import Activity, WatchedSnapshots
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.scrape.engines import EngineTable
from picker.scrape.extract import extract
from picker.scrape.http_client import HttpPages
from picker.scrape.reading import EndpointReading, StalenessLimits
from picker.scrape.scrape import PolledSource, Scraper, ScrapeSettings
from picker.scrape.sources import Extraction, PageLocation, Scrape
from picker.types import Endpoint

SEED = 5
HOST = "127.0.0.1"
PAGE_BYTES = (4 * 1024, 64 * 1024)
SETTLE_SECONDS = 8.0  # until an idle pool is asked at its longest interval
RESULTS_FILE = RESULTS / "scrape.json"

Fetch = Callable[[str], Awaitable[bytes]]


def page(size: int, rng: Random) -> bytes:
    """A vLLM exposition: the series a picker reads among histograms that it does not."""
    labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
    lines = [
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{{{labels}}} {rng.randrange(20)}.0",
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {rng.randrange(60)}.0",
        "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{{{labels}}} {rng.random()}",
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",'
        'gpu_memory_utilization="0.9",num_gpu_blocks="27600",swap_space="4"} 1.0',
        "process_start_time_seconds 1.7e+09",
    ]
    while sum(map(len, lines)) + len(lines) < size:
        bound = rng.random()
        lines.append(
            f'vllm:e2e_request_latency_seconds_bucket{{{labels},le="{bound:.3f}"}} '
            f"{rng.randrange(10**6)}.0"
        )
    return "\n".join(lines).encode()[: size - 1] + b"\n"


class Worker(asyncio.Protocol):
    """Answers whatever is asked with a page, as uvicorn would."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pending += data
        asked = self._pending.count(b"\r\n\r\n")
        if asked and self._transport is not None:
            self._pending = self._pending.rpartition(b"\r\n\r\n")[2]
            self._transport.write(self._answer * asked)


def play_workers(count: int, size: int, pipe: Connection) -> None:
    """The child process: open ports, tell them, serve until it is ended."""

    async def serve() -> None:
        rng = Random(SEED)
        loop = asyncio.get_running_loop()
        ports = []
        for _ in range(count):
            body = page(size, rng)
            head = (
                "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                f"content-length: {len(body)}\r\n"
                "content-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n"
            )
            answer = head.encode() + body
            server = await loop.create_server(lambda a=answer: Worker(a), HOST, 0)
            ports.append(server.sockets[0].getsockname()[1])
        pipe.send(ports)
        await asyncio.Event().wait()

    uvloop.run(serve())


@asynccontextmanager
async def workers(count: int, size: int) -> AsyncIterator[list[Endpoint]]:
    """Endpoints that answer."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=play_workers, args=(count, size, there), daemon=True)
    process.start()
    try:
        ports = await asyncio.to_thread(here.recv)
        yield [Endpoint(f"w{index}", HOST, port) for index, port in enumerate(ports)]
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


class Core:
    """Reads pages as the core-metrics-extractor does."""

    def __init__(self) -> None:
        self._table = EngineTable()
        self.pages = 0

    def extract(self, scrape: Scrape) -> Extraction:
        self.pages += 1
        return extract(scrape, self._table.of(scrape.endpoint.labels))


async def per_scrape(fetch: Fetch, endpoints: Sequence[Endpoint], seconds: float) -> float:
    """CPU microseconds of fetching, reading and storing one page."""
    store, core = Datastore(), Core()
    store.set_endpoints(endpoints)
    deadline = time.monotonic() + seconds

    async def one(endpoint: Endpoint) -> None:
        reading = EndpointReading(
            endpoint, 0, ("core", core), store, StalenessLimits(), lambda: None
        )
        while (now := time.monotonic()) < deadline:
            reading.take(await fetch(endpoint.host_port), now, 0.05)

    await asyncio.gather(*(fetch(endpoint.host_port) for endpoint in endpoints))  # connect
    started = time.process_time()
    await asyncio.gather(*map(one, endpoints))
    return (time.process_time() - started) / core.pages * 1e6


async def with_aiohttp(endpoints: Sequence[Endpoint], seconds: float) -> float:
    """The usual way."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def fetch(address: str) -> bytes:
            async with session.get(f"http://{address}/metrics", allow_redirects=False) as response:
                assert response.status == 200
                return await response.read()

        return await per_scrape(fetch, endpoints, seconds)


async def with_ours(endpoints: Sequence[Endpoint], seconds: float) -> float:
    """The picker's way."""
    async with HttpPages(PageLocation()) as pages:
        return await per_scrape(pages.fetch, endpoints, seconds)


async def as_a_whole(endpoints: Sequence[Endpoint], seconds: float) -> dict[str, float]:
    """Cores and scrapes a second of the scraper, busy and idle."""
    store, inflight, core = Datastore(), InflightLoad(), Core()
    store.set_endpoints(endpoints)
    activity = Activity(inflight)
    decide = WatchedSnapshots(store, activity).snapshot
    location = PageLocation()
    source = PolledSource("metrics-data-source", location, HttpPages(location), (("core", core),))
    settings = ScrapeSettings()
    scraper = Scraper(store, [source], PickerMetrics(), settings, Random(SEED), activity)
    found: dict[str, float] = {}

    async def count(name: str) -> None:
        pages, cpu, at = core.pages, time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        spent = time.monotonic() - at
        found[f"{name}_cores"] = round((time.process_time() - cpu) / spent, 4)
        found[f"{name}_scrapes_per_second"] = round((core.pages - pages) / spent, 1)

    task = asyncio.create_task(scraper.run())
    await asyncio.sleep(1.0)
    decide()
    inflight.acquire("x")
    await count("busy")
    inflight.release("x")
    await asyncio.sleep(SETTLE_SECONDS)
    await count("idle")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return found


async def measure(count: int, size: int, seconds: float) -> dict[str, float]:
    """Everything for one size of page."""
    async with workers(count, size) as endpoints:
        gc.collect()
        usual = await with_aiohttp(endpoints, seconds)
        gc.collect()
        ours = await with_ours(endpoints, seconds)
        gc.collect()
        whole = await as_a_whole(endpoints, seconds)
    return {
        "endpoints": count,
        "page_bytes": size,
        "aiohttp_us": round(usual, 1),
        "ours_us": round(ours, 1),
        "ratio": round(usual / ours, 1),
        **whole,
    }


def main() -> None:
    """Measure every size of page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    rows = []
    print(
        f"{'endpoints':>9} {'page':>7} {'aiohttp µs':>10} {'ours µs':>8} {'ratio':>6}"
        f" {'busy cores':>10} {'scrapes/s':>9} {'idle cores':>10} {'scrapes/s':>9}"
    )
    for size in PAGE_BYTES:
        row = uvloop.run(measure(options.endpoints, size, options.seconds))
        rows.append(row)
        print(
            f"{row['endpoints']:>9} {size:>7} {row['aiohttp_us']:>10} {row['ours_us']:>8}"
            f" {row['ratio']:>6} {row['busy_cores']:>10} {row['busy_scrapes_per_second']:>9}"
            f" {row['idle_cores']:>10} {row['idle_scrapes_per_second']:>9}"
        )
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    write_results(RESULTS_FILE, {"seed": SEED, **machine, "rows": rows})


if __name__ == "__main__":
    main()
