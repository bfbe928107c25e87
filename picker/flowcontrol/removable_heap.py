"""A heap from which any item can be removed; its memory is bounded by what it holds."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

_SLACK = 32  # removed places that stay, however few requests are left


class RemovableHeap(Generic[K, T]):
    """Holds things in the order of their keys, then of their sequence numbers."""

    __slots__ = ("_held", "_places")

    def __init__(self) -> None:
        self._places: list[tuple[K, int]] = []
        self._held: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(self._held.values())

    def push(self, key: K, sequence: int, thing: T) -> None:
        """Add `thing`; no other thing ever added may have the same `sequence`."""
        heappush(self._places, (key, sequence))
        self._held[sequence] = thing

    def first(self) -> tuple[K, T] | None:
        places, held = self._places, self._held
        while places:
            key, sequence = places[0]
            if sequence in held:
                return key, held[sequence]
            heappop(places)
        return None

    def pop(self) -> T | None:
        first = self.first()
        if first is None:
            return None
        _, sequence = heappop(self._places)
        return self._held.pop(sequence)

    def remove(self, sequence: int) -> bool:
        held = self._held
        if held.pop(sequence, None) is None:
            return False
        if len(self._places) > 2 * len(held) + _SLACK:
            self._places = [place for place in self._places if place[1] in held]
            heapify(self._places)
        return True

    def clear(self) -> None:
        self._places.clear()
        self._held.clear()
