"""The slow twin of the prefix index: dicts and masks, about 300 bytes a pair.

`_added` maps a slot and a block to the number of the record that added it and was not settled.
`_holders` maps a block hash to the bit mask of the slots that were sent this block; `_recency`
holds, per slot, the same hashes in the order of their last use. A match is contiguous from block 0.
"""

from collections import OrderedDict
from collections.abc import Sequence


class ReferenceIndex:
    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._slots: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._recency: dict[int, OrderedDict[int, None]] = {}
        self._added: dict[tuple[int, int], int] = {}
        self._records = 0

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def entries(self) -> int:
        return sum(len(recency) for recency in self._recency.values())

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        holders = self._holders
        matched: dict[str, int] = {}
        alive = -1
        for index, block in enumerate(hashes):
            still = alive & holders.get(block, 0)
            if still != alive:
                if index:
                    self._note(alive & ~still, index, matched)
                alive = still
                if not alive:
                    return matched
        if hashes:
            self._note(alive, len(hashes), matched)
        return matched

    def record(self, key: str, hashes: Sequence[int], capacity: int) -> int:
        """Return the number of the record, for `confirm` and `withdraw`."""
        self._records += 1
        slot = self._slot(key)
        bit = 1 << slot
        holders, recency = self._holders, self._recency[slot]
        for block in reversed(hashes[:capacity]):
            if block in recency:
                recency.move_to_end(block)
                self._added.pop((slot, block), None)
            else:
                recency[block] = None
                self._added[slot, block] = self._records
                holders[block] = holders.get(block, 0) | bit
        while len(recency) > capacity:
            block, _ = recency.popitem(last=False)
            self._release(block, bit)
            self._added.pop((slot, block), None)
        return self._records

    def confirm(self, record: int) -> None:
        self._added = {pair: one for pair, one in self._added.items() if one != record}

    def withdraw(self, record: int) -> None:
        for (slot, block), one in tuple(self._added.items()):
            if one == record:
                del self._recency[slot][block]
                self._release(block, 1 << slot)
        self.confirm(record)

    def held(self, key: str) -> tuple[int, ...]:
        slot = self._slots.get(key)
        return () if slot is None else tuple(self._recency[slot])

    def remove(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        del self._keys[slot]
        for block in self._recency.pop(slot):
            self._release(block, 1 << slot)
            self._added.pop((slot, block), None)

    def check_integrity(self) -> None:
        expected: dict[int, int] = {}
        for slot, recency in self._recency.items():
            for block in recency:
                expected[block] = expected.get(block, 0) | 1 << slot
        if expected != self._holders:
            raise AssertionError("holders and recency disagree")
        if {slot: key for key, slot in self._slots.items()} != self._keys:
            raise AssertionError("slots and keys disagree")
        if self._keys.keys() != self._recency.keys():
            raise AssertionError("a slot without recency, or the reverse")

    def _slot(self, key: str) -> int:
        slot = self._slots.get(key)
        if slot is None:
            # The lowest free position, so that masks stay as short as the pool is large.
            slot = next(i for i in range(len(self._keys) + 1) if i not in self._keys)
            self._slots[key], self._keys[slot] = slot, key
            self._recency[slot] = OrderedDict()
        return slot

    def _note(self, mask: int, run: int, matched: dict[str, int]) -> None:
        while mask:
            lowest = mask & -mask
            matched[self._keys[lowest.bit_length() - 1]] = run
            mask ^= lowest

    def _release(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
