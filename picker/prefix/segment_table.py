"""Maps 64-bit keys to small numbers, in a hash table of 13 to 17 bytes an entry besides the key.

A bucket has sixteen lanes; the home of a key is `(key >> 32) * buckets >> 32`, so the buckets are
in the order of keys. A lane holds the low half of its key, as a tag that `bytearray.find` looks
for, and its value; the first `_counts` lanes of a bucket are in use. The few entries whose home is
full are in lists in a dict.

The table grows by a third, in place: homes in the larger table are at or right of the present ones,
so buckets are moved from the last to the first, one with each insertion. Homes from `_frontier` on
are those of the larger table.
"""

from array import array

LANES = 16
FIRST_BUCKETS = 16
MAX_ENTRIES_PER_BUCKET = 12  # on average
_TAG_BYTES = 4
_BUCKET_BYTES = LANES * _TAG_BYTES
_LOW = 0xFFFF_FFFF


class SegmentTable:
    """Owns the entries. Values are dense from 1, because `keys` has the key of each."""

    def __init__(self) -> None:
        self.keys = array("Q", [0])
        self._buckets = self._larger = self._frontier = 0
        self._tags, self._counts = bytearray(), bytearray()
        self._values = array("I")
        self._overflow: dict[int, list[int]] = {}  # by home
        self._entries = 0
        self._start_small()

    def __len__(self) -> int:
        return self._entries

    def find(self, key: int) -> int:
        """Return the value of `key`; 0 if it is absent."""
        high = key >> 32  # inlined `_home`, to save a call
        home = high * self._buckets >> 32
        if home >= self._frontier:
            home = high * self._larger >> 32
        start = home * _BUCKET_BYTES
        count = self._counts[home]
        end = start + count * _TAG_BYTES
        tag = (key & _LOW).to_bytes(_TAG_BYTES, "little")
        at = self._tags.find(tag, start, end)
        while at >= 0:
            if not at & 3:  # else bytes of two neighbours match the tag
                value = self._values[at >> 2]
                if self.keys[value] == key:
                    return value
            at = self._tags.find(tag, at + 1, end)
        if count == LANES and self._overflow:
            for value in self._overflow.get(home, ()):
                if self.keys[value] == key:
                    return value
        return 0

    def insert(self, key: int, value: int) -> None:
        """Add an entry; its key is absent, its value positive and unused."""
        while value >= len(self.keys):
            self.keys.append(0)
        self.keys[value] = key
        self._entries += 1
        self._place(key, value)
        if self._frontier < self._buckets:
            self._move_bucket()
        elif self._entries > MAX_ENTRIES_PER_BUCKET * self._buckets:
            self._begin_growth()

    def delete(self, value: int) -> None:
        """Remove the entry of a value, which is present."""
        self._entries -= 1
        if not self._entries:
            self._start_small()
            return
        home = self._home(self.keys[value])
        waiting = self._overflow.get(home)
        if waiting is not None and value in waiting:
            waiting.remove(value)
        else:
            first, last = home * LANES, home * LANES + self._counts[home] - 1
            at = self._values.index(value, first, last + 1)
            self._values[at] = self._values[last]
            self._tags[at * _TAG_BYTES : (at + 1) * _TAG_BYTES] = self._tags[
                last * _TAG_BYTES : (last + 1) * _TAG_BYTES
            ]
            self._counts[home] -= 1
            if waiting:
                other = waiting.pop()
                self._place(self.keys[other], other)
        if waiting is not None and not waiting:
            del self._overflow[home]

    def check_integrity(self) -> None:
        counted = 0
        for home, count in enumerate(self._counts):
            waiting = self._overflow.get(home, [])
            if waiting and count < LANES:
                raise AssertionError("a bucket with room has entries elsewhere")
            for at in range(home * LANES, home * LANES + count):
                tag = self._tags[at * _TAG_BYTES : (at + 1) * _TAG_BYTES]
                if int.from_bytes(tag, "little") != self.keys[self._values[at]] & _LOW:
                    raise AssertionError("a tag is not that of its key")
            lanes = self._values[home * LANES : home * LANES + count].tolist()
            if any(self._home(self.keys[value]) != home for value in lanes + waiting):
                raise AssertionError("an entry is in the wrong bucket")
            counted += count + len(waiting)
        if counted != self._entries:
            raise AssertionError("entries are miscounted")

    def _home(self, key: int) -> int:
        high = key >> 32
        home = high * self._buckets >> 32
        return home if home < self._frontier else high * self._larger >> 32

    def _place(self, key: int, value: int) -> None:
        high = key >> 32  # inlined `_home`
        home = high * self._buckets >> 32
        if home >= self._frontier:
            home = high * self._larger >> 32
        count = self._counts[home]
        if count == LANES:
            self._overflow.setdefault(home, []).append(value)
            return
        self._counts[home] = count + 1
        at = home * LANES + count
        self._values[at] = value
        at *= _TAG_BYTES
        self._tags[at : at + _TAG_BYTES] = (key & _LOW).to_bytes(_TAG_BYTES, "little")

    def _begin_growth(self) -> None:
        added = self._buckets // 3
        self._larger = self._buckets + added
        self._tags.extend(bytes(added * _BUCKET_BYTES))
        self._values.frombytes(bytes(added * LANES * self._values.itemsize))
        self._counts.extend(bytes(added))
        self._move_bucket()

    def _move_bucket(self) -> None:
        home = self._frontier - 1
        first, count = home * LANES, self._counts[home]
        moved = self._values[first : first + count].tolist()
        if self._overflow:
            moved += self._overflow.pop(home, ())
        self._counts[home] = 0
        self._frontier = home
        for value in moved:
            self._place(self.keys[value], value)
        if not home:
            self._buckets = self._frontier = self._larger

    def _start_small(self) -> None:
        self._buckets = self._larger = self._frontier = FIRST_BUCKETS
        self._tags = bytearray(FIRST_BUCKETS * _BUCKET_BYTES)
        self._values = array("I", bytes(4 * FIRST_BUCKETS * LANES))
        self._counts = bytearray(FIRST_BUCKETS)
        self._overflow = {}
