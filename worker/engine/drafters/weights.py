"""Whose things weigh most."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from worker.errors import IntegrityError

Name = TypeVar("Name")


class Weights(Generic[Name]):
    """A weight for each name, and the name with the largest; both in O(log n), amortized.

    Every change puts the new weight on a heap. What it makes wrong there is thrown away when it
    comes to the top, or all at once when it is more than what is right.
    """

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[int, int, Name]] = {}  # -weight, when it was changed, name
        self._heap: list[tuple[int, int, Name]] = []
        self._num_changes = 0

    def __len__(self) -> int:
        """Names that weigh anything."""
        return len(self._entries)

    def of(self, name: Name) -> int:
        """The weight of a name; 0 if it has none."""
        entry = self._entries.get(name)
        return 0 if entry is None else -entry[0]

    def add(self, name: Name, change: int) -> None:
        """Change a weight; a name that weighs nothing is forgotten."""
        weight = self.of(name) + change
        if weight < 0:
            raise IntegrityError(f"{name!r} weighs {weight}")
        if weight == 0:
            self._entries.pop(name, None)
            return
        self._num_changes += 1
        entry = (-weight, self._num_changes, name)
        self._entries[name] = entry
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def heaviest(self) -> Name:
        """The name that weighs most; of equals the one whose weight changed least lately. There is
        one.
        """
        while self._entries.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]
