"""Maps 64-bit keys to small numbers, in a hash table that looks up many keys at once.

Keys are uniform and never 0. A bucket is eight lanes, one cache line; the home of a key is `(key >>
32) * buckets >> 32`, so the buckets are in the order of keys. If its home is full, a key is spilled
into a dict and its home is marked. This is rare, because a table is at most half full. No entry is
moved to make room, so a deletion sets a lane to 0.

The table grows by half, in place: homes in the larger table are at or right of the present ones, so
buckets are moved from the last to the first, a few with each insertion. Homes from `_frontier` on
are those of the larger table. Memory per entry: 24 to 36 bytes, 4 to 5 for its position, 2 for
spilling.
"""

import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]

LANES = 8
BUCKET_BYTES = 8 * LANES
FIRST_BUCKETS = 64
MAX_ENTRIES_PER_BUCKET = 4  # on average
MIN_BUCKETS_MOVED = 128  # per step of growth
_EMPTY = bytes(8)
_SPILLED = 0xFFFF_FFFF
_HALF = np.uint64(32)
_ORDER: Literal["little", "big"] = sys.byteorder


class PairTable:
    """Owns the entries. Values are distinct and dense from 1, because they index an array."""

    def __init__(self) -> None:
        self._entries = 0
        self._spill: dict[int, int] = {}
        self._spilled_keys: dict[int, int] = {}
        self._where = np.zeros(0, np.uint32)
        self._where_view = self._where.data
        self._num_buckets = self._num_larger = self._frontier = self._owed = 0
        self._start_small()

    def __len__(self) -> int:
        return self._entries

    def find(self, keys: Keys) -> Values:
        """Return the value of each key; 0 for absent keys."""
        home = self._homes(keys)
        equal = self._rows[home] == keys[:, None]
        hit = equal.view(np.uint64)[:, 0] != 0
        found = np.zeros(len(keys), np.uint32)
        at = hit.nonzero()[0]
        if len(at):
            found[at] = self._values[home[at] * LANES + equal[at].argmax(axis=1)]
        if self._spill:
            for i in self._perhaps_spilled(hit, home):
                found[i] = self._spill.get(int(keys[i]), 0)
        return found

    def holds(self, keys: Keys) -> npt.NDArray[np.bool_]:
        home = self._homes(keys)
        equal = self._rows[home] == keys[:, None]
        hit: npt.NDArray[np.bool_] = equal.view(np.uint64)[:, 0] != 0
        if self._spill:
            for i in self._perhaps_spilled(hit, home):
                hit[i] = int(keys[i]) in self._spill
        return hit

    def find_one(self, key: int) -> int:
        high = key >> 32  # inlined `_home`, to save a call
        home = high * self._num_buckets >> 32
        if home >= self._frontier:
            home = high * self._num_larger >> 32
        start = home * BUCKET_BYTES
        at = self._bytes.find(key.to_bytes(8, _ORDER), start, start + BUCKET_BYTES)
        if at < 0:
            return self._spill.get(key, 0)
        if at & 7:  # bytes of two neighbours match the key
            return int(self.find(np.array([key], np.uint64))[0])
        return self._value_view[at >> 3]

    def positions_held(self, keys: Sequence[int]) -> list[int]:
        """Return the positions of the present keys, without calling `find_one` for each."""
        held: list[int] = []
        num_buckets, frontier, find = self._num_buckets, self._frontier, self._bytes.find
        for position, key in enumerate(keys):
            high = key >> 32
            home = high * num_buckets >> 32
            if home >= frontier:
                home = high * self._num_larger >> 32
            start = home * BUCKET_BYTES
            at = find(key.to_bytes(8, _ORDER), start, start + BUCKET_BYTES)
            if key in self._spill if at < 0 else not at & 7 or self.find_one(key):
                held.append(position)
        return held

    def insert(self, keys: Keys, values: Values) -> None:
        """Add entries, at least one; the keys are distinct and absent."""
        self._entries += len(keys)
        self._make_room(int(values.max()), len(keys))
        self._place(keys, values)

    def insert_one(self, key: int, value: int) -> None:
        """Add one entry, whose key is absent."""
        self._entries += 1
        if (
            self._frontier < self._num_buckets
            or value >= len(self._where)
            or self._entries > MAX_ENTRIES_PER_BUCKET * self._num_larger
        ):
            self._make_room(value, 1)
        high = key >> 32  # inlined `_home`
        home = high * self._num_buckets >> 32
        if home >= self._frontier:
            home = high * self._num_larger >> 32
        start = home * BUCKET_BYTES
        at = self._bytes.find(_EMPTY, start, start + BUCKET_BYTES)
        if at & 7:  # none, or the zero bytes of neighbours
            row = self._key_view[home * LANES : (home + 1) * LANES].tolist()
            at = start + 8 * row.index(0) if 0 in row else -1
        if at < 0:
            self._spill_one(key, value, home)
            return
        at >>= 3
        self._key_view[at] = key
        self._value_view[at] = value
        self._where_view[value] = at

    def delete(self, values: Values) -> None:
        """Remove the entries of these values, which are present."""
        self._entries -= len(values)
        at = self._where[values]
        if self._spill:
            spilled = at == _SPILLED
            for value in values[spilled].tolist():
                del self._spill[self._spilled_keys.pop(value)]
            at = at[~spilled]
        self._keys[at] = 0
        self._shrink_if_empty()

    def delete_one(self, value: int) -> None:
        self._entries -= 1
        at = self._where_view[value]
        if at == _SPILLED:
            del self._spill[self._spilled_keys.pop(value)]
        else:
            self._key_view[at] = 0
        self._shrink_if_empty()

    def check_integrity(self) -> None:
        at = self._keys.nonzero()[0]
        if len(at) + len(self._spill) != self._entries:
            raise AssertionError("entries are miscounted")
        if (self._homes(self._keys[at]) != at // LANES).any():
            raise AssertionError("an entry is in the wrong bucket")
        if (self._where[self._values[at]] != at).any():
            raise AssertionError("an entry is not where its value says")
        if {value: key for key, value in self._spill.items()} != self._spilled_keys:
            raise AssertionError("the spilled keys disagree")
        if not all(self._marked[self._home(key)] for key in self._spill):
            raise AssertionError("a bucket that spilled is not marked")

    # Homes

    def _homes(self, keys: Keys) -> Positions:
        high = keys >> _HALF
        home = ((high * self._buckets) >> _HALF).view(np.int64)
        if self._frontier < self._buckets:
            larger = ((high * self._larger) >> _HALF).view(np.int64)
            home = np.where(home >= self._frontier, larger, home)
        return home

    def _home(self, key: int) -> int:
        high = key >> 32
        home = high * self._num_buckets >> 32
        return home if home < self._frontier else high * self._num_larger >> 32

    def _perhaps_spilled(self, hit: npt.NDArray[np.bool_], home: Positions) -> list[int]:
        """Return the positions of keys that were not found at home but have a marked home."""
        marked = self._marked[home]
        marked[hit] = 0
        found: list[int] = marked.nonzero()[0].tolist()
        return found

    # Filling

    def _place(self, keys: Keys, values: Values) -> None:
        order = keys.argsort()
        keys, values = keys[order], values[order]
        home = self._homes(keys)
        free = self._rows[home] == 0
        same = home[1:] == home[:-1]
        if same.any():
            # The n-th key of a bucket takes its n-th free lane.
            index = np.arange(len(keys))
            index[1:][same] = 0
            rank = np.arange(len(keys)) - np.maximum.accumulate(index)
            counted = free.cumsum(axis=1)
            fits = counted[:, -1] > rank
            lane = (counted == (rank + 1)[:, None]).argmax(axis=1)
        else:
            fits = free.view(np.uint64)[:, 0] != 0
            lane = free.argmax(axis=1)
        at = home * LANES + lane
        if not fits.all():
            for i in (~fits).nonzero()[0].tolist():
                self._spill_one(int(keys[i]), int(values[i]), int(home[i]))
            at, keys, values = at[fits], keys[fits], values[fits]
        self._keys[at] = keys
        self._values[at] = values
        self._where[values] = at

    def _spill_one(self, key: int, value: int, home: int) -> None:
        self._spill[key] = value
        self._spilled_keys[value] = key
        self._marked[home] = 1
        self._where_view[value] = _SPILLED

    # Growth

    def _make_room(self, highest_value: int, added: int) -> None:
        if highest_value >= len(self._where):
            # A resized array moves, and a view would still point to the old memory.
            self._where_view.release()
            grow(self._where, highest_value + 1)
            self._where_view = self._where.data
        if self._frontier < self._num_buckets:
            self._owed += added
            if self._owed >= MIN_BUCKETS_MOVED:
                self._move(self._owed)
                self._owed = 0
        while self._entries > MAX_ENTRIES_PER_BUCKET * self._num_larger:
            if self._frontier < self._num_buckets:
                self._move(self._frontier)
            self._begin_growth()

    def _begin_growth(self) -> None:
        self._num_larger = self._num_buckets + self._num_buckets // 2
        self._larger = np.uint64(self._num_larger)
        self._release_views()
        # In place: no other reference to these arrays or their memory exists.
        self._bytes.extend(bytes((self._num_larger - self._num_buckets) * BUCKET_BYTES))
        self._values.resize(self._num_larger * LANES, refcheck=False)
        self._marked.resize(self._num_larger, refcheck=False)
        self._make_views()
        self._owed = 0
        self._move(1)

    def _move(self, count: int) -> None:
        first = max(0, self._frontier - count)
        part = self._keys[first * LANES : self._frontier * LANES]
        at = part.nonzero()[0]
        keys, values = part[at], self._values[first * LANES + at]
        part[:] = 0
        self._move_marks(first)
        self._frontier = first
        if len(keys):
            self._place(keys, values)
        if not first:
            self._end_growth()

    def _move_marks(self, first: int) -> None:
        """Mark every home that keys of a marked bucket may get; `_end_growth` corrects this."""
        marked = first + self._marked[first : self._frontier].nonzero()[0]
        self._marked[first : self._frontier] = 0
        start = marked * self._num_larger // self._num_buckets
        for offset in range(3):
            self._marked[np.minimum(start + offset, self._num_larger - 1)] = 1

    def _end_growth(self) -> None:
        self._set_size(self._num_larger)
        if self._spill:
            keys = np.array(list(self._spill), np.uint64)
            values = np.array(list(self._spill.values()), np.uint32)
            self._spill, self._spilled_keys = {}, {}
            self._marked[:] = 0
            self._place(keys, values)

    def _shrink_if_empty(self) -> None:
        if not self._entries and self._num_buckets > FIRST_BUCKETS:
            self._release_views()
            self._start_small()

    def _start_small(self) -> None:
        self._set_size(FIRST_BUCKETS)
        self._bytes = bytearray(FIRST_BUCKETS * BUCKET_BYTES)
        self._values = np.zeros(FIRST_BUCKETS * LANES, np.uint32)
        self._marked = np.zeros(FIRST_BUCKETS, np.uint8)
        self._make_views()

    def _set_size(self, num_buckets: int) -> None:
        self._num_buckets = self._num_larger = self._frontier = num_buckets
        self._buckets = self._larger = np.uint64(num_buckets)
        self._owed = 0

    def _make_views(self) -> None:
        self._keys = np.frombuffer(self._bytes, np.uint64)
        self._rows = self._keys.reshape(-1, LANES)
        self._key_view = self._keys.data
        self._value_view = self._values.data

    def _release_views(self) -> None:
        # A `bytearray` that an array or a view refers to cannot grow.
        del self._keys, self._rows
        self._key_view.release()
        self._value_view.release()


def grow(array: npt.NDArray[np.uint32], size: int) -> None:
    """Resize `array` in place to `size` elements and an eighth more; no view of it may exist."""
    array.resize(size + size // 8, refcheck=False)
