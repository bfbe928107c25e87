"""Ask every endpoint for its metrics, a task each, about twenty times a second.

A scrape that fails changes nothing: the last values stay. Once scrapes have failed long enough the
endpoint is marked stale, which makes its load unknown; scorers then rate it worst but it stays
usable. A change of an endpoint's state is logged once, every failure is counted.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType

import aiohttp

from picker.datalayer.datastore import Datastore, EndpointChanges
from picker.datalayer.extract import DEFAULT_ENGINE, ExtractError, engine_of, extract
from picker.errors import PickerError
from picker.metrics import PickerMetrics
from picker.types import Endpoint

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 1024 * 1024
JITTER = 0.1  # share of the interval by which a wait is shorter or longer
SOURCE_TYPE = "metrics-data-source"
EXTRACTOR_TYPE = "core-metrics-extractor"

FetchPage = Callable[[Endpoint], Awaitable[bytes]]


class ScrapeError(PickerError):
    """A metrics page that could not be had."""


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How often to ask, and when to stop believing old answers.

    A scrape costs about half a millisecond of the event loop that also decides. So that a large
    pool does not crowd out the decisions, all endpoints together are asked at most
    `max_scrapes_per_second` times: beyond 30 endpoints the interval grows with the pool.
    """

    interval_seconds: float = 0.05
    max_scrapes_per_second: float = 600.0
    staleness_seconds: float = 2.0
    failures_until_stale: int = 4
    default_engine: str = DEFAULT_ENGINE


class HttpPages:
    """Fetches metrics pages over HTTP with kept-alive connections. An async context manager.

    A page must come with status 200, without redirect, within `timeout_seconds`, and have at most
    `MAX_PAGE_BYTES`. Certificates are not verified unless a `ssl_context` says how.
    """

    def __init__(
        self,
        *,
        scheme: str = "http",
        path: str = "/metrics",
        port: int | None = None,
        timeout_seconds: float = 1.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._scheme, self._path, self._port = scheme, path, port
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._ssl = ssl_context or False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpPages:
        # No limit: one connection per endpoint, and each endpoint has one task.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=self._ssl)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, endpoint: Endpoint) -> bytes:
        """The page of one endpoint. Raises `ScrapeError`."""
        if self._session is None:
            raise RuntimeError("HttpPages is used outside of its `async with`")
        try:
            async with self._session.get(self._url(endpoint), allow_redirects=False) as response:
                if response.status != 200:
                    raise ScrapeError(f"status {response.status}")
                page = bytearray()
                async for chunk in response.content.iter_any():
                    page += chunk
                    if len(page) > MAX_PAGE_BYTES:
                        raise ScrapeError(f"page is larger than {MAX_PAGE_BYTES} bytes")
                return bytes(page)
        except TimeoutError:
            raise ScrapeError(f"no answer within {self._timeout.total} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ScrapeError(str(error) or type(error).__name__) from error

    def _url(self, endpoint: Endpoint) -> str:
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        return f"{self._scheme}://{host}:{self._port or endpoint.port}{self._path}"


class Scraper:
    """Keeps one scrape task per endpoint of the datastore.

    Owns the tasks; the metrics belong to the datastore. `rng` jitters the waits, so that a large
    pool is asked evenly instead of in bursts.
    """

    def __init__(
        self,
        datastore: Datastore,
        fetch: FetchPage,
        metrics: PickerMetrics,
        settings: ScrapeSettings,
        rng: Random,
    ) -> None:
        self._datastore = datastore
        self._fetch = fetch
        self._settings = settings
        self._rng = rng
        self._poll_errors = metrics.datalayer_poll_errors_total.labels(SOURCE_TYPE)
        self._extract_errors = metrics.datalayer_extract_errors_total.labels(
            SOURCE_TYPE, EXTRACTOR_TYPE
        )
        self._changed = asyncio.Event()
        datastore.subscribe(self._note_changes)

    async def run(self) -> None:
        """Scrape until cancelled, following the datastore's endpoints."""
        tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                wanted = {
                    (candidate.key, candidate.endpoint.host_port)
                    for candidate in self._datastore.snapshot().candidates
                }
                for gone in tasks.keys() - wanted:
                    tasks.pop(gone).cancel()
                for key, address in wanted - tasks.keys():
                    watch = _Watch(key, address)
                    tasks[key, address] = group.create_task(
                        self._follow(watch), name=f"scrape {key}"
                    )
                await self._changed.wait()

    def _note_changes(self, _changes: EndpointChanges) -> None:
        self._changed.set()

    async def _follow(self, watch: _Watch) -> None:
        while True:
            await self._scrape(watch)
            jitter = self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(self._interval_seconds() * jitter)

    def _interval_seconds(self) -> float:
        pool = len(self._datastore.snapshot().candidates)
        settings = self._settings
        return max(settings.interval_seconds, pool / settings.max_scrapes_per_second)

    async def _scrape(self, watch: _Watch) -> None:
        before = self._datastore.get(watch.key)
        if before is None:
            return
        try:
            page = await self._fetch(before.endpoint)
            self._store(watch, page)
        except ScrapeError as error:
            self._poll_errors.inc()
            self._failed(watch, str(error))
        except ExtractError as error:
            self._extract_errors.inc()
            self._failed(watch, str(error))
        except Exception as error:
            # A page that trips over a mistake of ours must not take the whole pool down.
            self._extract_errors.inc()
            if not watch.failures:
                log.exception("scraping %s", watch.key)
            self._failed(watch, repr(error))

    def _store(self, watch: _Watch, page: bytes) -> None:
        candidate = self._datastore.get(watch.key)
        if candidate is None or candidate.endpoint.host_port != watch.address:
            return  # it left, or moved, while the page was on its way
        now = asyncio.get_running_loop().time()
        engine = engine_of(candidate.endpoint.labels, self._settings.default_engine)
        extraction = extract(page, engine, candidate.metrics, now)
        self._datastore.update_metrics(watch.key, extraction.metrics)
        if extraction.problems:
            self._extract_errors.inc()
        if extraction.problems != watch.problems:
            watch.problems = extraction.problems
            said = "; ".join(extraction.problems) or "complete again"
            log.warning("metrics of %s: %s", watch.key, said)
        if watch.stale:
            log.info("endpoint %s answers scrapes again", watch.key)
        watch.failures, watch.stale, watch.failing_since = 0, False, None

    def _failed(self, watch: _Watch, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        watch.failures += 1
        if watch.failing_since is None:
            watch.failing_since = now
        lost = (
            watch.failures >= self._settings.failures_until_stale
            or now - watch.failing_since >= self._settings.staleness_seconds
        )
        if lost and not watch.stale:
            watch.stale = True
            self._datastore.mark_stale(watch.key)
            log.warning(
                "endpoint %s: load unknown after %d failed scrapes: %s",
                watch.key,
                watch.failures,
                reason,
            )


@dataclass(slots=True)
class _Watch:
    """What one scrape task remembers of its endpoint."""

    key: str
    address: str
    failures: int = 0
    failing_since: float | None = None
    stale: bool = False
    problems: tuple[str, ...] = ()
