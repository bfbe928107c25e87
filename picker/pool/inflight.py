"""The in-flight counters: the requests that this picker has under way at each endpoint.

Scrapes lag behind; the picker's own count is the lower bound of every load signal.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType


class InflightLoad:
    """Sole owner of the in-flight counters, keyed by endpoint key. Event-loop thread only.

    `counts` (of all replicas) and `own_counts` are live views of the non-zero counters. Legs are
    parts of requests at other endpoints; only `requests` includes them.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.own_total = 0
        self._others: Mapping[str, int] = {}
        self._others_total = 0
        self._legs: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self.counts: Mapping[str, int] = MappingProxyType(self._sums)
        self.own_counts: Mapping[str, int] = MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        return self.own_total + self._others_total

    def requests(self, key: str) -> int:
        """Return the number of requests, of all replicas, and of own legs under way at `key`."""
        return self._sums.get(key, 0) + self._legs.get(key, 0)

    def acquire_legs(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._legs[key] = self._legs.get(key, 0) + 1

    def release_legs(self, keys: Iterable[str]) -> None:
        """End one leg at each endpoint. Raises `LookupError` if none is under way there."""
        for key in keys:
            if key not in self._legs:
                raise LookupError(f"no part of a request is under way at {key}")
            self._legs[key] -= 1
            if not self._legs[key]:
                del self._legs[key]

    def acquire(self, key: str) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sums[key] = self._sums.get(key, 0) + 1
        self.own_total += 1

    def release(self, key: str) -> None:
        """End a request that left for `key`. Raises `LookupError` if none is under way."""
        if key not in self._counts:
            raise LookupError(f"no request is under way at {key}")
        for counts in (self._counts, self._sums):
            if counts[key] == 1:
                del counts[key]
            else:
                counts[key] -= 1
        self.own_total -= 1

    def set_others(self, counts: Mapping[str, int]) -> None:
        """Replace the counts of other replicas; values below one are ignored."""
        self._others = {key: count for key, count in counts.items() if count > 0}
        self._others_total = sum(self._others.values())
        self._sums.clear()
        self._sums.update(self._counts)
        for key, count in self._others.items():
            self._sums[key] = self._sums.get(key, 0) + count

    def check_integrity(self) -> None:
        if any(count < 1 for count in self._counts.values()):
            raise AssertionError(f"a counter is below one: {self._counts}")
        if sum(self._counts.values()) != self.own_total:
            raise AssertionError(f"{self._counts} does not sum up to {self.own_total}")
        keys = self._counts.keys() | self._others.keys()
        whole = {key: self._counts.get(key, 0) + self._others.get(key, 0) for key in keys}
        if whole != self._sums:
            raise AssertionError(f"{self._sums} is not the sum {whole}")
