"""Flows in the order of keys that change often.

A heap in which entries become stale instead of being searched for: an entry is valid while its
flow still has the key that it was pushed with. Stale entries never outnumber the others by much.
"""

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=tuple[Any, ...])

_FEW = 16


class FlowHeap(Generic[K]):
    """Flows ordered by key, then by flow. Every operation takes amortised O(log n)."""

    def __init__(self) -> None:
        self._keys: dict[str, K] = {}
        self._heap: list[tuple[K, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, flow: str) -> bool:
        return flow in self._keys

    def key(self, flow: str) -> K | None:
        return self._keys.get(flow)

    def put(self, flow: str, key: K) -> None:
        if self._keys.get(flow) == key:
            return
        self._keys[flow] = key
        heappush(self._heap, (key, flow))
        if len(self._heap) > 2 * len(self._keys) + _FEW:
            self._heap = [(current, name) for name, current in self._keys.items()]
            heapify(self._heap)

    def remove(self, flow: str) -> None:
        self._keys.pop(flow, None)

    def first(self) -> str | None:
        """Return the flow with the least key; None if the heap is empty."""
        heap, keys = self._heap, self._keys
        while heap:
            key, flow = heap[0]
            if keys.get(flow) == key:
                return flow
            heappop(heap)
        return None
