"""Eviction orders that depend on how often contents were hit: LFU and segmented LRU.

A cached slot has a *level*, one more with each hit; the least recently used of the lowest level
goes first. Many levels give LFU, two segmented LRU. At most `most_protected` slots are above level
0; then the oldest of the lowest such level falls back.
"""

from collections import OrderedDict

NUM_LEVELS = {"lfu": 16, "slru": 2}
_PROTECTED_SHARE = 0.8


class SegmentedQueue:
    """Sole owner of the order of `num_slots` slots, with the operations of `FreeQueue`."""

    def __init__(self, num_slots: int, policy: str) -> None:
        self._levels: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(NUM_LEVELS[policy])
        ]
        self._most_protected = num_slots * _PROTECTED_SHARE if policy == "slru" else num_slots
        self._empty = list(range(num_slots - 1, -1, -1))
        self._level_of = [0] * num_slots
        self._num_protected = 0  # idle and above level 0
        self.last_loser = ""

    def __len__(self) -> int:
        return len(self._empty) + sum(map(len, self._levels))

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def coldest(self) -> int | None:
        return next((slot for level in self._levels for slot in level), None)

    def take(self, tenant: str) -> int:
        if self._empty:
            return self._empty.pop()
        slot = next(slot for level in self._levels for slot in level)
        self.remove(slot)
        self._level_of[slot] = 0
        return slot

    def put_empty(self, slot: int) -> None:
        self._level_of[slot] = 0
        self._empty.append(slot)

    def put_cached(self, slot: int) -> None:
        level = self._level_of[slot]
        self._levels[level][slot] = None
        self._num_protected += level > 0
        if self._num_protected > self._most_protected:
            lowest = next(level for level in self._levels[1:] if level)
            demoted = next(iter(lowest))
            self.remove(demoted)
            self._level_of[demoted] = 0
            self._levels[0][demoted] = None

    def remove(self, slot: int) -> None:
        level = self._level_of[slot]
        del self._levels[level][slot]
        self._num_protected -= level > 0

    def touch(self, slot: int) -> None:
        self.remove(slot)
        self._level_of[slot] = min(self._level_of[slot] + 1, len(self._levels) - 1)
        self.put_cached(slot)

    def empty(self, slot: int) -> None:
        self.remove(slot)
        self.put_empty(slot)
