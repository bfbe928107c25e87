"""The last two minutes of the pool and of its present endpoints: rings of samples, one a second."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from picker.flowcontrol.views import QueuesView

SAMPLES = 120  # two minutes
INTERVAL_SECONDS = 1.0
MAX_SAMPLES = 30_000  # of all endpoints together, in one view: 20 ms of work and a megabyte
_DECIMALS = 4  # all that 32 bits can hold of a share
_UNKNOWN = math.nan
_NONE: Any = None  # the default of a sample; a series has all fields
V = TypeVar("V")


class EndpointValues(msgspec.Struct, Generic[V], frozen=True):
    """Values of an endpoint, as in `traffic.Recent` and `traffic.Served`."""

    running: V = _NONE
    waiting: V = _NONE
    kv_cache_usage: V = _NONE
    prefix_hit_share: V = _NONE
    inflight: V = _NONE
    requests_per_second: V = _NONE
    ttft_p95_seconds: V = _NONE
    tokens_per_second: V = _NONE
    failures_per_second: V = _NONE


class PoolValues(msgspec.Struct, Generic[V], frozen=True):
    """Values of the pool. Requests are `waiting` at endpoints, but `queued` in the picker."""

    requests_per_second: V = _NONE
    refusals_per_second: V = _NONE
    failures_per_second: V = _NONE
    ttft_p50_seconds: V = _NONE
    ttft_p95_seconds: V = _NONE
    tokens_per_second: V = _NONE
    running: V = _NONE
    waiting: V = _NONE
    queued: V = _NONE
    queue_wait_p95_seconds: V = _NONE


# One moment; unknown values are None.
Value: TypeAlias = float | None
EndpointSample: TypeAlias = EndpointValues[Value]
PoolSample: TypeAlias = PoolValues[Value]
# Samples, the newest last. All fields are equally long.
EndpointSeries: TypeAlias = EndpointValues[tuple[Value, ...]]
PoolSeries: TypeAlias = PoolValues[tuple[Value, ...]]

_FIELDS = EndpointValues.__struct_fields__
_POOL_FIELDS = PoolValues.__struct_fields__
_NEVER_SAMPLED = EndpointSample()
NO_SERIES = EndpointSeries(*[()] * len(_FIELDS))
_NO_POOL_SERIES = PoolSeries(*[()] * len(_POOL_FIELDS))


class HistoryView(msgspec.Struct, frozen=True):
    """Samples of the pool, and of endpoints by key; the newest has the number `last` (0: none)."""

    last: int = 0
    interval_seconds: float = INTERVAL_SECONDS
    endpoints: Mapping[str, EndpointSeries] = {}
    pool: PoolSeries = _NO_POOL_SERIES
    queues: QueuesView = QueuesView()


# Samples of one endpoint, a row for each field, NaN for unknown values.
Rows: TypeAlias = "tuple[array[float], ...]"


class _Ring:
    __slots__ = ("_fields", "_length", "_next", "_rows", "_size", "number")

    def __init__(self, size: int, fields: tuple[str, ...]) -> None:
        self._size, self._fields = size, fields
        self._rows = tuple(array("d", [_UNKNOWN]) * size for _ in fields)
        self._next = 0
        self._length = 0
        self.number = 0

    def add(self, sample: EndpointSample | PoolSample, number: int) -> None:
        self.number = number
        for name, row in zip(self._fields, self._rows, strict=True):
            # Arrays of numbers: a history of thousands of endpoints is no work for the garbage
            # collector.
            value = getattr(sample, name)
            row[self._next] = _UNKNOWN if value is None else round(value, _DECIMALS)
        self._next = (self._next + 1) % self._size
        self._length = min(self._length + 1, self._size)

    def last(self, count: int, upto: int) -> Rows:
        later = max(0, self.number - upto)
        count = max(0, min(count, self._length - later))
        end = (self._next - later) % self._size
        begin = end - count
        if begin >= 0:
            return tuple([row[begin:end] for row in self._rows])
        return tuple([row[begin:] + row[:end] for row in self._rows])


class History:
    """Owns the rings of the pool and of all endpoints in the last sample."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._size = size
        self._rings: dict[str, _Ring] = {}
        self._pool = _Ring(size, _POOL_FIELDS)
        self.latest_pool = PoolSample()
        self._latest: Mapping[str, EndpointSample] = {}
        self._last = 0

    def record(self, samples: Mapping[str, EndpointSample], pool: PoolSample | None = None) -> None:
        """Add one sample of the pool and of every endpoint; drop all other endpoints."""
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
        """Return the number of the last sample, the endpoints, and an iterator over copies of the
        last `count` samples of each: fewer if it is young or there are thousands.
        """
        # Copies of rings are made in turns, so remember which sample was the last.
        rings, last = list(self._rings.items()), self._last
        count = min(count, MAX_SAMPLES // max(1, len(rings)))
        taken = (EndpointValues(*map(_known, ring.last(count, last))) for _, ring in rings)
        return last, [key for key, _ in rings], taken

    def pool(self, count: int) -> PoolSeries:
        return PoolValues(*map(_known, self._pool.last(count, self._last)))

    def latest(self, key: str) -> EndpointSample:
        """Return the last sample of an endpoint; if there is none, all its values are unknown."""
        return self._latest.get(key, _NEVER_SAMPLED)


def _known(row: array[float]) -> tuple[Value, ...]:
    if not math.isnan(sum(row)):  # much faster than a check of each
        return tuple(row)
    return tuple(None if math.isnan(value) else value for value in row)
