"""The cost of scraping for the picker's event loop, with the production code.

    python benchmarks/scrape.py [--endpoints 100] [--seconds 10] [--idle-after 8]

A child process plays that many workers, each with its own port and a vLLM page of 4 KB or 64 KB.
First pages are fetched, read and stored as fast as they come, by a client made with aiohttp and by
the picker's own: CPU microseconds per scrape. Then the scraper runs as in the picker: cores used
while requests are decided (an interval of 50 ms) and while nothing happens. CPU seconds of this
process are counted, not time, so other programs change little. Fixed seed. Prints tables and writes
benchmarks/results/scrape.json.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from random import Random
from typing import cast

import aiohttp
import uvloop
from measuring import Table, child, command_line, write_results

from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.activity import Activity
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

Fetch = Callable[[str], Awaitable[bytes]]


def page(size: int, rng: Random) -> bytes:
    """A vLLM exposition: the series that a picker reads, among histograms that it does not."""
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


def play_workers(pipe: Connection, count: int, size: int) -> None:
    """The child process: open ports, send their numbers, serve until the end."""

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
        reading = EndpointReading(endpoint, 0, "core", core, store, StalenessLimits(), lambda: None)
        while (now := time.monotonic()) < deadline:
            reading.take(await fetch(endpoint.host_port), now, 0.05)

    await asyncio.gather(*(fetch(endpoint.host_port) for endpoint in endpoints))  # connect
    started = time.process_time()
    await asyncio.gather(*map(one, endpoints))
    return (time.process_time() - started) / core.pages * 1e6


async def with_aiohttp(endpoints: Sequence[Endpoint], seconds: float) -> float:
    """Fetch the pages with aiohttp."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def fetch(address: str) -> bytes:
            async with session.get(f"http://{address}/metrics", allow_redirects=False) as response:
                assert response.status == 200
                return await response.read()

        return await per_scrape(fetch, endpoints, seconds)


async def with_ours(endpoints: Sequence[Endpoint], seconds: float) -> float:
    """Fetch the pages with the picker's client."""
    async with HttpPages(PageLocation()) as pages:
        return await per_scrape(pages.fetch, endpoints, seconds)


async def as_a_whole(
    endpoints: Sequence[Endpoint], seconds: float, idle_after: float
) -> dict[str, float]:
    """Cores and scrapes a second of the scraper, busy and idle."""
    store, inflight, core = Datastore(), InflightLoad(), Core()
    store.set_endpoints(endpoints)
    activity = Activity(store, inflight)
    decide = activity.snapshot
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
    await asyncio.sleep(idle_after)
    await count("idle")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return found


async def measure(
    endpoints: Sequence[Endpoint], seconds: float, idle_after: float
) -> dict[str, float]:
    """Everything for one size of page."""
    gc.collect()
    usual = await with_aiohttp(endpoints, seconds)
    gc.collect()
    ours = await with_ours(endpoints, seconds)
    gc.collect()
    whole = await as_a_whole(endpoints, seconds, idle_after)
    ratio = round(usual / ours, 1)
    return {"aiohttp_us": round(usual, 1), "ours_us": round(ours, 1), "ratio": ratio, **whole}


def main() -> None:
    """Measure every size of page."""
    parser = command_line(__doc__)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--idle-after", type=float, default=8.0, help="seconds until the interval is the longest"
    )
    options = parser.parse_args()
    whole = ("busy_cores", "busy_scrapes_per_second", "idle_cores", "idle_scrapes_per_second")
    table = Table("endpoints", "page_bytes", "aiohttp_us", "ours_us", "ratio", *whole)
    for size in PAGE_BYTES:
        with child(play_workers, options.endpoints, size) as pipe:
            endpoints = [Endpoint(f"w{port}", HOST, port) for port in pipe.recv()]
            row = uvloop.run(measure(endpoints, options.seconds, options.idle_after))
        table.add(endpoints=options.endpoints, page_bytes=size, **row)
    write_results(options, rows=table.rows)


if __name__ == "__main__":
    main()
