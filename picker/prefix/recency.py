"""Orders entries by last use, in many doubly linked lists that share two arrays.

An entry is a small number; `newer` and `older` give its neighbours. Every list is a ring with an
entry of its own, its anchor, between the newest and the oldest. Entry 0 is unused. Free entries are
chained through `newer`.
"""

from array import array


class RecencyLists:
    """Owns the links, and which entries are free."""

    def __init__(self) -> None:
        self._newer = array("I", [0])
        self._older = array("I", [0])
        self._free = 0  # the first of the chain of free entries

    def open(self) -> int:
        """Allocate the anchor of an empty list."""
        anchor = self.insert_new(0)
        self.unlink(anchor)
        self._newer[anchor] = self._older[anchor] = anchor
        return anchor

    def insert_new(self, newer: int) -> int:
        """Allocate an entry right behind `newer`; behind its anchor, it is the newest of a list."""
        entry, older = self._free, self._older[newer]
        if entry:
            self._free = self._newer[entry]
            self._newer[entry], self._older[entry] = newer, older
        else:
            entry = len(self._newer)
            self._newer.append(newer)
            self._older.append(older)
        self._newer[older] = self._older[newer] = entry
        return entry

    def give_back(self, entry: int) -> None:
        """Free an entry that is in no list."""
        self._newer[entry] = self._free
        self._free = entry

    def oldest(self, anchor: int) -> int:
        """Return the oldest entry of a list; the anchor if it is empty."""
        return self._newer[anchor]

    def refresh(self, anchor: int, entries: list[int]) -> None:
        """Make entries of a list its newest, the first one the newest of all."""
        newer, older = self._newer, self._older
        for entry in reversed(entries):
            after, before = newer[entry], older[entry]
            newer[before], older[after] = after, before
            last = older[anchor]
            newer[entry], older[entry] = anchor, last
            newer[last] = older[anchor] = entry

    def unlink(self, entry: int) -> None:
        """Take an entry out of its list."""
        newer, older = self._newer[entry], self._older[entry]
        self._newer[older], self._older[newer] = newer, older

    def replace(self, entry: int, other: int) -> None:
        """Put `other`, an entry in no list, in the place of `entry`."""
        newer, older = self._newer[entry], self._older[entry]
        self._newer[other], self._older[other] = newer, older
        self._newer[older] = self._older[newer] = other

    def in_order(self, anchor: int) -> list[int]:
        """List the entries, oldest first. Raises `AssertionError` if the links disagree."""
        entries: list[int] = []
        entry = self._newer[anchor]
        while entry != anchor:
            if self._older[self._newer[entry]] != entry or len(entries) > len(self._newer):
                raise AssertionError("the links of a list disagree")
            entries.append(entry)
            entry = self._newer[entry]
        return entries
