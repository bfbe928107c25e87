"""How many requests this picker has under way at each endpoint.

Scrapes lag behind; the picker's own count is the lower bound of every load signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class InflightLoad:
    """Sole owner of the in-flight counters, keyed by endpoint key.

    Every `acquire` is matched by exactly one `release`, also when the endpoint has left the pool
    meanwhile. An endpoint without requests has no entry. Event-loop thread only.
    """

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._total = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """A live, read-only view of the non-zero counters."""
        return MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        """Requests under way at all endpoints together."""
        return self._total

    def requests(self, key: str) -> int:
        """Requests under way at endpoint `key`."""
        return self._counts.get(key, 0)

    def acquire(self, key: str) -> None:
        """A request leaves for `key`."""
        self._counts[key] = self._counts.get(key, 0) + 1
        self._total += 1

    def release(self, key: str) -> None:
        """A request that left for `key` is over. Raises `LookupError` when none is under way."""
        count = self._counts.get(key)
        if count is None:
            raise LookupError(f"no request is under way at {key}")
        if count == 1:
            del self._counts[key]
        else:
            self._counts[key] = count - 1
        self._total -= 1

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the counters contradict each other."""
        if any(count < 1 for count in self._counts.values()):
            raise AssertionError(f"a counter below one is kept: {self._counts}")
        if sum(self._counts.values()) != self._total:
            raise AssertionError(f"{self._counts} does not sum up to {self._total}")
