"""The last two minutes of the pool and of every endpoint, for charts: rings of samples, one a
second.

An endpoint that was not sampled is forgotten.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from picker.flowcontrol.views import QueuesView

SAMPLES = 120
INTERVAL_SECONDS = 1.0
MOST_SAMPLES = 30_000  # of all endpoints together, in one view: 20 ms of work and a megabyte
_DECIMALS = 4
_UNKNOWN = math.nan


class EndpointSample(msgspec.Struct, frozen=True):
    """An endpoint at one moment; None where nothing is known.

    `prefix_hit_share`, `requests_per_second` and `failures_per_second` are those of
    `traffic.Recent`, `ttft_p95_seconds` and `tokens_per_second` of `traffic.Served`.
    """

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    prefix_hit_share: float | None = None
    inflight: float | None = None
    requests_per_second: float | None = None
    ttft_p95_seconds: float | None = None
    tokens_per_second: float | None = None
    failures_per_second: float | None = None


class EndpointSeries(msgspec.Struct, frozen=True):
    """Samples of one endpoint, the newest last. All fields are equally long."""

    running: tuple[float | None, ...] = ()
    waiting: tuple[float | None, ...] = ()
    kv_cache_usage: tuple[float | None, ...] = ()
    prefix_hit_share: tuple[float | None, ...] = ()
    inflight: tuple[float | None, ...] = ()
    requests_per_second: tuple[float | None, ...] = ()
    ttft_p95_seconds: tuple[float | None, ...] = ()
    tokens_per_second: tuple[float | None, ...] = ()
    failures_per_second: tuple[float | None, ...] = ()


class PoolSample(msgspec.Struct, frozen=True):
    """The pool at one moment; None where nothing is known.

    Rates are those of `traffic.PoolRecent`, times to the first token and tokens those of
    `traffic.Served`; `waiting` at endpoints, `queued` in the picker, and how long those that left
    it had waited there, None where none had.
    """

    requests_per_second: float | None = None
    refusals_per_second: float | None = None
    failures_per_second: float | None = None
    ttft_p50_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    tokens_per_second: float | None = None
    running: float | None = None
    waiting: float | None = None
    queued: float | None = None
    queue_wait_p95_seconds: float | None = None


class PoolSeries(msgspec.Struct, frozen=True):
    """Samples of the pool, the newest last. All fields are equally long."""

    requests_per_second: tuple[float | None, ...] = ()
    refusals_per_second: tuple[float | None, ...] = ()
    failures_per_second: tuple[float | None, ...] = ()
    ttft_p50_seconds: tuple[float | None, ...] = ()
    ttft_p95_seconds: tuple[float | None, ...] = ()
    tokens_per_second: tuple[float | None, ...] = ()
    running: tuple[float | None, ...] = ()
    waiting: tuple[float | None, ...] = ()
    queued: tuple[float | None, ...] = ()
    queue_wait_p95_seconds: tuple[float | None, ...] = ()


_FIELDS = EndpointSeries.__struct_fields__
_POOL_FIELDS = PoolSeries.__struct_fields__
_NEVER_SAMPLED = EndpointSample()


class HistoryView(msgspec.Struct, frozen=True):
    """Samples of the endpoints, by key, and of the pool; each series ends with sample number
    `last`, of which `queues` is, too.

    Samples are numbered from 1 since the picker started; `last` 0: there is none yet.
    """

    last: int = 0
    interval_seconds: float = INTERVAL_SECONDS
    endpoints: Mapping[str, EndpointSeries] = {}
    pool: PoolSeries = PoolSeries()
    queues: QueuesView = QueuesView()


# Samples of one endpoint, a row for each field, NaN where nothing is known.
Rows: TypeAlias = "tuple[array[float], ...]"


class _Ring:
    """Owns samples: a row of numbers for each field."""

    __slots__ = ("_fields", "_length", "_next", "_rows", "_size", "number")

    def __init__(self, size: int, fields: tuple[str, ...]) -> None:
        self._size, self._fields = size, fields
        self._rows = tuple(array("d", [_UNKNOWN]) * size for _ in fields)
        self._next = 0
        self._length = 0
        self.number = 0

    def add(self, sample: EndpointSample | PoolSample, number: int) -> None:
        """`number` is that of the sample."""
        self.number = number
        for name, row in zip(self._fields, self._rows, strict=True):
            value = getattr(sample, name)
            row[self._next] = _UNKNOWN if value is None else round(value, _DECIMALS)
        self._next = (self._next + 1) % self._size
        self._length = min(self._length + 1, self._size)

    def last(self, count: int, upto: int) -> Rows:
        """`count` samples, fewer where there are fewer, the last of which is number `upto`."""
        later = max(0, self.number - upto)
        count = max(0, min(count, self._length - later))
        end = (self._next - later) % self._size
        begin = end - count
        if begin >= 0:
            return tuple([row[begin:end] for row in self._rows])
        return tuple([row[begin:] + row[:end] for row in self._rows])


class History:
    """Owns the rings of the pool and of all endpoints that were sampled last."""

    def __init__(self, size: int = SAMPLES) -> None:
        """`size` samples are kept of each."""
        self._size = size
        self._rings: dict[str, _Ring] = {}
        self._pool = _Ring(size, _POOL_FIELDS)
        self.latest_pool = PoolSample()
        self._latest: Mapping[str, EndpointSample] = {}
        self._last = 0

    def record(self, samples: Mapping[str, EndpointSample], pool: PoolSample | None = None) -> None:
        """Add one sample of the pool and of every endpoint there is, by key; the others are
        forgotten.
        """
        self.latest_pool = pool or PoolSample()
        self._last += 1
        self._pool.add(self.latest_pool, self._last)
        for key in self._rings.keys() - samples.keys():
            del self._rings[key]
        for key, sample in samples.items():
            ring = self._rings.get(key)
            if ring is None:
                ring = self._rings[key] = _Ring(self._size, _FIELDS)
            ring.add(sample, self._last)
        self._latest = dict(samples)

    def cut(self, count: int) -> tuple[int, list[str], Iterator[EndpointSeries]]:
        """The number of the last sample, the endpoints, and up to it the last `count` samples of
        each, fewer of one that is younger; and fewer of all where `MOST_SAMPLES` do not suffice.

        Each endpoint's are taken when they are asked for; samples may be added meanwhile.
        """
        rings, last = list(self._rings.items()), self._last
        count = min(count, MOST_SAMPLES // max(1, len(rings)))
        taken = (EndpointSeries(*map(_known, ring.last(count, last))) for _, ring in rings)
        return last, [key for key, _ in rings], taken

    def pool(self, count: int) -> PoolSeries:
        """The last `count` samples of the pool, fewer where there are not so many."""
        return PoolSeries(*map(_known, self._pool.last(count, self._last)))

    def latest(self, key: str) -> EndpointSample:
        """The last sample of an endpoint; one that knows nothing when there is none."""
        return self._latest.get(key, _NEVER_SAMPLED)


def _known(row: array[float]) -> tuple[float | None, ...]:
    if not math.isnan(sum(row)):  # much faster than to look at each
        return tuple(row)
    return tuple(None if math.isnan(value) else value for value in row)
