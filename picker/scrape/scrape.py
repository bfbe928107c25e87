"""Scrapes the pages of every endpoint, with one task per address of each source.

A tick is the shortest interval between two scrapes; a source's own interval is a multiple of it and
grows with the pool, so that scraping does not crowd out the decisions on the same event loop. While
the pool is idle, the interval doubles with each scrape up to a limit; the first decision after that
triggers a scrape of every address within one tick. If many addresses join together, their first
scrapes are spread at the later rate. Scrapes begin at common moments, about eight at each: to wake
a waiting process costs as much as a scrape, while too many at once would delay decisions.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.activity import Activity
from picker.pool.datastore import Datastore, EndpointChanges
from picker.scrape.exposition import only
from picker.scrape.http_client import HttpPages, PageFetcher, ScrapeError, tls_context
from picker.scrape.reading import EndpointReading, StalenessLimits
from picker.scrape.sources import Extractor, PageLocation, SourceBinding
from picker.types import Endpoint

log = logging.getLogger(__name__)

TOGETHER = 8  # scrapes that begin at one moment, on average
JITTER = 0.1  # the share of the interval by which a wait varies
MIN_TICK_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 0.25  # the minimum interval while an address does not answer
SLICE_BYTES = 256 * 1024  # of a page; searching it takes half a millisecond
MAX_SHARE = 0.05  # of the event loop's time, for reading the pages of one address


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """The rate of scrapes (at least every `idle_seconds`), and the expiry of old values."""

    tick_seconds: float = MIN_TICK_SECONDS
    idle_seconds: float = 1.0
    # A scrape costs 0.1 ms of the event loop: with 125 endpoints, a third of a core.
    max_scrapes_per_second: float = 2500.0
    patience: StalenessLimits = field(default_factory=StalenessLimits)


@dataclass(frozen=True, slots=True)
class PolledSource:
    source_type: str
    location: PageLocation
    pages: PageFetcher
    extractors: tuple[tuple[str, Extractor], ...]


def polled(bindings: Sequence[SourceBinding]) -> tuple[PolledSource, ...]:
    sources: list[PolledSource] = []
    for binding in bindings:
        location = binding.source.location
        if location is None:
            continue
        try:
            pages = HttpPages(location, tls_context(location))
        except OSError as error:  # ssl.SSLError is one
            text = f"{binding.source_type}: cannot use its certificates: {error}"
            raise ConfigError(text) from error
        readers = tuple(
            (name, one) for name, one in binding.extractors if isinstance(one, Extractor)
        )
        sources.append(PolledSource(binding.source_type, location, pages, readers))
    return tuple(sources)


class Scraper:
    """Owns one task per address; without `activity` the pool always counts as busy."""

    def __init__(
        self,
        datastore: Datastore,
        sources: Sequence[PolledSource],
        metrics: PickerMetrics,
        settings: ScrapeSettings,
        rng: Random,
        activity: Activity | None = None,
    ) -> None:
        self._datastore = datastore
        self._sources = tuple(sources)
        self._metrics = metrics
        self._settings = settings
        self._rng = rng
        self._activity = activity
        self._targets: dict[tuple[int, str], _Target] = {}
        self._at: dict[str, tuple[tuple[int, str], ...]] = {}  # the targets of each endpoint
        self._unplaced: set[tuple[int, str]] = set()
        self._ticks = [self._tick_of(index) for index in range(len(self._sources))]
        self._num_targets = [0] * len(self._sources)
        self._tick_seconds = settings.tick_seconds
        self._news: list[EndpointChanges] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        self._datastore.subscribe(self._note_changes)
        known = self._datastore.snapshot().candidates
        self._note_changes(EndpointChanges(tuple(one.endpoint for one in known), ()))
        try:
            async with asyncio.TaskGroup() as group:
                if self._activity is not None:
                    group.create_task(self._watch(self._activity), name="scrape activity")
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    self._reconcile(group)
        finally:
            self._datastore.unsubscribe(self._note_changes)
            for target in self._targets.values():
                target.source.pages.forget(target.address)
            self._targets.clear()

    def _note_changes(self, changes: EndpointChanges) -> None:
        self._news.append(changes)
        self._changed.set()

    # Targets

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        """Apply the changes of endpoints to the targets; only changed targets are touched."""
        news, self._news = self._news, []
        touched: dict[_Target, None] = {}
        for changes in news:
            for endpoint in (*changes.removed, *changes.updated):
                touched |= dict.fromkeys(self._take_away(endpoint))
            for endpoint in (*changes.added, *changes.updated):
                touched |= dict.fromkeys(self._place(endpoint))
        for target in touched:
            if not target.endpoints:
                self._end(target)
            else:
                target.follow(self._readings(target))
        per_tick = sum(map(operator.truediv, self._num_targets, self._ticks))
        self._tick_seconds = max(
            self._settings.tick_seconds, per_tick / self._settings.max_scrapes_per_second
        )
        self._begin([one for one in touched if one.endpoints and one.task is None], group)

    def _begin(self, targets: Sequence[_Target], group: asyncio.TaskGroup) -> None:
        wait = len(targets) / self._settings.max_scrapes_per_second
        wait = wait if wait > self._settings.tick_seconds else 0.0
        for target in targets:
            name = f"scrape {target.address}"
            target.task = group.create_task(self._scrape(target, wait), name=name)

    def _take_away(self, endpoint: Endpoint) -> list[_Target]:
        targets = [self._targets[one] for one in self._at.pop(endpoint.key, ())]
        for target in targets:
            del target.endpoints[endpoint.key]
        return targets

    def _place(self, endpoint: Endpoint) -> list[_Target]:
        targets: list[_Target] = []
        for index, source in enumerate(self._sources):
            address = source.location.address(endpoint)
            if address is None:
                self._cannot_place(index, endpoint)
                continue
            target = self._targets.get((index, address))
            if target is None:
                target = _Target(source, index, address, self._ticks[index])
                self._targets[index, address] = target
                self._num_targets[index] += 1
            target.endpoints[endpoint.key] = endpoint
            targets.append(target)
        self._at[endpoint.key] = tuple((one.index, one.address) for one in targets)
        return targets

    def _cannot_place(self, index: int, endpoint: Endpoint) -> None:
        source_type = self._sources[index].source_type
        self._metrics.datalayer_poll_errors_total.labels(source_type).inc()
        if (index, endpoint.key) not in self._unplaced:
            self._unplaced.add((index, endpoint.key))
            log.warning("%s: the node of %s is unknown", source_type, endpoint.key)

    def _end(self, target: _Target) -> None:
        del self._targets[target.index, target.address]
        self._num_targets[target.index] -= 1
        target.source.pages.forget(target.address)
        target.end()

    def _tick_of(self, index: int) -> int:
        interval = self._sources[index].location.interval_seconds
        return 1 if interval is None else max(1, round(interval / self._settings.tick_seconds))

    def _readings(self, target: _Target) -> list[EndpointReading]:
        """Return one reading per endpoint and extractor; those of unchanged servers continue."""
        endpoints = target.endpoints.values()
        known = {(one.endpoint.key, one.position): one for one in target.readings}
        ranks = {endpoint.rank_index for endpoint in endpoints}
        split = len(endpoints) > 1 and len(ranks) == len(endpoints)
        readings: list[EndpointReading] = []
        for endpoint in endpoints:
            for position in range(len(target.source.extractors)):
                reading = known.get((endpoint.key, position))
                if reading is None or not reading.endpoint.is_same_server(endpoint):
                    reading = self._reading(target.source, endpoint, position)
                reading.rank = endpoint.rank_index if split else None
                readings.append(reading)
        return readings

    def _reading(self, source: PolledSource, endpoint: Endpoint, position: int) -> EndpointReading:
        extractor = source.extractors[position]
        errors = self._metrics.datalayer_extract_errors_total.labels(
            source.source_type, extractor[0]
        )
        patience = self._settings.patience
        return EndpointReading(
            endpoint, position, *extractor, self._datastore, patience, errors.inc
        )

    # Scrapes

    async def _scrape(self, target: _Target, wait_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        errors = self._metrics.datalayer_poll_errors_total.labels(target.source.source_type)
        if wait_seconds:
            await target.pause(
                self._until_a_moment(self._rng.uniform(0, wait_seconds), self._tick_seconds)
            )
        while not target.over:
            interval = self._interval_seconds(target)
            try:
                page = await target.source.pages.fetch(target.address)
            except ScrapeError as error:
                errors.inc()
                target.fail(str(error), loop.time())
            except Exception as error:
                # A bug must not take the whole pool down.
                errors.inc()
                if not target.failures:
                    log.exception("scraping %s", target.address)
                target.fail(repr(error), loop.time())
            else:
                arrived = loop.time()
                spent = await target.take(page, arrived, interval)
                interval = max(interval, spent / MAX_SHARE)
            # Jitter makes the scrapes of a large pool even, instead of in bursts.
            wait = interval * self._rng.uniform(1 - JITTER, 1 + JITTER)
            await target.pause(self._until_a_moment(wait, interval))

    def _until_a_moment(self, seconds: float, interval_seconds: float) -> float:
        """Return the wait for the common moment that is nearest to `seconds` from now."""
        now = asyncio.get_running_loop().time()
        step = interval_seconds * min(0.5, TOGETHER / max(len(self._targets), 1))
        return max(0.0, round((now + seconds) / step) * step - now)

    def _interval_seconds(self, target: _Target) -> float:
        busy = target.ticks * self._tick_seconds
        if self._activity is None or self._activity.busy:
            target.interval_seconds = busy
        else:
            longest = max(busy, self._settings.idle_seconds)
            target.interval_seconds = min(max(target.interval_seconds, busy) * 2, longest)
        if target.failures > self._settings.patience.failures:
            return max(target.interval_seconds, MAX_BACKOFF_SECONDS)
        return target.interval_seconds

    async def _watch(self, activity: Activity) -> None:
        while True:
            await activity.began()
            for target in self._targets.values():
                tick = self._tick_seconds
                target.hurry(self._until_a_moment(self._rng.uniform(0, tick), tick))


def _slices(page: bytes) -> Iterator[bytes]:
    """Split a page into slices of about `SLICE_BYTES`, at line ends where possible."""
    begin = 0
    while begin < len(page):
        after = begin + SLICE_BYTES
        end = page.find(b"\n", after, after + SLICE_BYTES) + 1 or after + SLICE_BYTES
        yield page[begin:end]
        begin = end


@dataclass(slots=True, eq=False)
class _Target:
    """An address of a source, its endpoints by key, and the readings of its pages."""

    source: PolledSource
    index: int
    address: str
    ticks: int
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    readings: tuple[EndpointReading, ...] = ()
    failures: int = 0
    interval_seconds: float = 0.0
    over: bool = False
    task: asyncio.Task[None] | None = None
    _pause: asyncio.Future[None] | None = field(default=None, repr=False)
    _timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def follow(self, readings: Sequence[EndpointReading]) -> None:
        staying = set(readings)
        for reading in self.readings:
            if reading not in staying:
                reading.end()
        self.readings = tuple(readings)

    def end(self) -> None:
        self.over = True
        self.follow(())
        if self.task is not None:
            self.task.cancel()

    async def take(self, page: bytes, now_seconds: float, interval_seconds: float) -> float:
        """Pass a page to all readings; return how many seconds this took on the event loop."""
        self.failures = 0
        clock, spent = asyncio.get_running_loop().time, 0.0
        names = None if len(page) <= SLICE_BYTES else self._series()
        if names is not None:
            found: list[bytes] = []
            for part in _slices(page):
                begun = clock()
                found.append(only(part, names))
                spent += clock() - begun
                await asyncio.sleep(0)  # so that the loop can decide requests in between
            page = b"".join(found)
        begun = clock()
        for reading in self.readings:
            reading.take(page, now_seconds, interval_seconds)
        return spent + clock() - begun

    def _series(self) -> Sequence[str] | None:
        """Return the names of all series of the readings; None if one reads the whole page."""
        names: dict[str, None] = {}
        for reading in self.readings:
            series = reading.series
            if series is None:
                return None
            names |= dict.fromkeys(series)
        return tuple(names)

    def fail(self, reason: str, now_seconds: float) -> None:
        self.failures += 1
        for reading in self.readings:
            reading.fail(reason, now_seconds)

    async def pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        self._timer = loop.call_later(seconds, self._resume)
        try:
            await self._pause
        finally:
            self._timer.cancel()
            self._pause = None

    def hurry(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._pause is None or self._timer is None:
            return
        if self._timer.when() > loop.time() + seconds:
            self._timer.cancel()
            self._timer = loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)
