"""Estimates which endpoint holds which prompt blocks, by segments of prompts.

A segment is a run of blocks that every prompt so far had as a whole or not at all: a prompt that
parts from an earlier one splits the segment in which they part. A `SegmentTable` finds a segment by
the hash of its first block; its other hashes are one bytes object, and a bit mask has its holders,
the endpoints that were sent it. So a match costs a lookup and a comparison by segment, whatever the
number of endpoints and blocks.

Every holder of a segment has an entry in the list of its endpoint, in `RecencyLists`. The number of
a segment is the entry of one of its holders, the first; the entries of others are found under the
first hash, mixed with a salt of the endpoint. Recording refreshes the segments of a prompt last to
first, as paged engines free blocks, so an endpoint over its capacity loses the tail of a prompt
before its beginning. A holder that lost only the end of a segment is in `_held`.

The blocks that a request adds belong to its `Addition` until that is confirmed, or another record
includes them; `withdraw` removes only those.
"""

from dataclasses import dataclass, field
from itertools import compress

from picker.prefix.block_hash import BYTES_PER_HASH as _BYTES
from picker.prefix.block_hash import BlockHashes
from picker.prefix.recency import RecencyLists
from picker.prefix.segment_table import SegmentTable

_MASK = 2**64 - 1
_MIX = 0x9E37_79B9_7F4A_7C15
_SCRAMBLE = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))  # splitmix64
_SEGMENTS_DROPPED = 8  # of endpoints that left, with each record, which adds one or two
_ZEROS_AND_ONES = bytes(byte & 1 for byte in range(256))  # for the digits "0" and "1"


@dataclass(slots=True)
class _Holder:
    slot: int
    bit: int  # in masks
    salt: int  # mixed into the keys of its entries that are not the first of their segment
    anchor: int  # of its recency list
    size: int = 0  # in blocks


@dataclass(slots=True, eq=False)
class Addition:
    """The entries to which one record added blocks, and how many blocks each had before."""

    key: str
    before: dict[int, int] = field(default_factory=dict)


class PrefixIndex:
    """Owns the estimated placement of prompts, given as chained hashes. Not thread safe."""

    def __init__(self) -> None:
        self._table = SegmentTable()
        self._recency = RecencyLists()
        # By entry: the holders of the segment, and its hashes after the first. An entry that is not
        # the first of its segment has neither.
        self._masks = [0]
        self._rests = [b""]
        self._held: dict[int, dict[int, int]] = {}  # segment → slot → blocks, if not all
        self._added: dict[int, Addition] = {}  # by entry
        self._holders: dict[str, _Holder] = {}
        self._slots: list[_Holder] = []
        self._names: list[str] = []  # by slot
        self._free_slots: list[int] = []
        self._present = 0  # the mask of all endpoints that have not left
        self._departed: list[_Holder] = []
        self._size = 0
        self._last_salt = 0

    def __len__(self) -> int:
        """The number of (block, endpoint) pairs."""
        return self._size - sum(holder.size for holder in self._departed)

    def match(self, hashes: BlockHashes) -> dict[str, int]:
        """Return the length of the unbroken run from block 0, by endpoint that holds block 0."""
        end, at, alive = len(hashes), 0, self._present
        matched: dict[str, int] = {}
        while at < end:
            segment = self._table.find(int.from_bytes(hashes[at : at + _BYTES], "little"))
            still = alive & self._masks[segment]
            if still != alive:
                if at:
                    self._note(alive ^ still, at // _BYTES, matched)
                alive = still
                if not alive:
                    return matched
            rest = self._rests[segment]
            is_whole = hashes.startswith(rest, at + _BYTES)
            blocks = len(rest) // _BYTES + 1 if is_whole else _common(hashes, at, rest)
            if segment in self._held:
                for slot, held in self._held[segment].items():
                    if held < blocks and alive >> slot & 1:
                        alive ^= 1 << slot
                        matched[self._names[slot]] = at // _BYTES + held
            at += blocks * _BYTES
            if not is_whole:
                break
        if at:
            self._note(alive, at // _BYTES, matched)
        return matched

    def record(
        self, key: str, hashes: BlockHashes, capacity: int, addition: Addition | None = None
    ) -> None:
        """Note that endpoint `key` will hold these blocks; keep its `capacity` latest blocks.

        Blocks that it did not hold go to `addition`, which must be confirmed or withdrawn later.
        """
        holder = self._holders.get(key)
        if holder is None:
            holder = self._admit(key)
        data = hashes[: capacity * _BYTES]  # later blocks would be evicted first
        end, at = len(data), 0
        entries: list[int] = []
        while at < end:
            block = int.from_bytes(data[at : at + _BYTES], "little")
            segment = self._table.find(block)
            if not segment:
                segment = self._new_entry(block, holder.anchor)
                self._masks[segment], self._rests[segment] = holder.bit, data[at + _BYTES :]
                holder.size += (end - at) // _BYTES
                self._size += (end - at) // _BYTES
                if addition is not None:
                    self._own(segment, addition, 0)
                entries.append(segment)
                break
            if not data.startswith(self._rests[segment], at + _BYTES):
                self._split(segment, _common(data, at, self._rests[segment]))
            blocks = len(self._rests[segment]) // _BYTES + 1
            entries.append(self._hold(holder, segment, blocks, addition))
            at += blocks * _BYTES
        self._recency.refresh(holder.anchor, entries)
        if holder.size > capacity:
            self._evict(holder, holder.size - capacity)
        if self._departed:
            self._drop_departed()

    def confirm(self, addition: Addition) -> None:
        """Make the blocks that a record added permanent."""
        for entry in addition.before:
            del self._added[entry]
        addition.before.clear()

    def withdraw(self, addition: Addition) -> None:
        """Remove the blocks that a record added and no later record included."""
        for entry, before in tuple(addition.before.items()):
            holder = self._holders[addition.key]
            segment = self._segment(entry, holder)
            surplus = self._blocks(segment, holder) - before
            if surplus > 0:
                self._shorten(holder, segment, surplus)
        self.confirm(addition)

    def remove(self, key: str) -> None:
        """Forget an endpoint; later records drop its blocks, a few at a time."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        for entry, addition in tuple(self._added.items()):
            if addition.key == key:
                self._disown(entry)
        self._present ^= holder.bit
        self._departed.append(holder)

    def check_integrity(self) -> None:
        self._table.check_integrity()
        listed: set[int] = set()
        holders = (*self._holders.values(), *self._departed)
        for holder in holders:
            own = self._recency.in_order(holder.anchor)
            segments = [self._segment(entry, holder) for entry in own]
            if not all(self._masks[segment] & holder.bit for segment in segments):
                raise AssertionError("an endpoint does not hold a segment in its list")
            if [self._entry(segment, holder) for segment in segments] != own:
                raise AssertionError("an entry is not found")
            if sum(self._blocks(segment, holder) for segment in segments) != holder.size:
                raise AssertionError("an endpoint's blocks are miscounted")
            listed.update(own)
        if sum(holder.size for holder in holders) != self._size:
            raise AssertionError("the blocks are miscounted")
        if not len(listed) == len(self._table) == sum(mask.bit_count() for mask in self._masks):
            raise AssertionError("an entry has no endpoint")
        for segment, held in self._held.items():
            most = len(self._rests[segment]) // _BYTES + 1
            if not held or any(not 0 < blocks < most for blocks in held.values()):
                raise AssertionError("a part of a segment is all of it or nothing")
        for entry, addition in self._added.items():
            if entry not in listed or entry not in addition.before:
                raise AssertionError("an addition has an entry that is gone")

    def _note(self, mask: int, run: int, matched: dict[str, int]) -> None:
        if mask & mask - 1:
            digits = f"{mask:b}"[::-1].encode().translate(_ZEROS_AND_ONES)
            matched.update(dict.fromkeys(compress(self._names, digits), run))
        elif mask:
            matched[self._names[mask.bit_length() - 1]] = run

    # Segments

    def _hold(self, holder: _Holder, segment: int, blocks: int, addition: Addition | None) -> int:
        """Make an endpoint hold a whole segment; return its entry."""
        mask = self._masks[segment]
        if mask & holder.bit:
            entry = segment if mask == holder.bit else self._entry(segment, holder)
            if self._added:
                self._disown(entry)
            if segment not in self._held:
                return entry
            before = self._blocks(segment, holder)
            if before == blocks:
                return entry
            self._forget_part(segment, holder.slot)
        else:
            before = 0
            entry = self._new_entry(self._table.keys[segment] ^ holder.salt, holder.anchor)
            self._masks[segment] = mask | holder.bit
        holder.size += blocks - before
        self._size += blocks - before
        if addition is not None:
            self._own(entry, addition, before)
        return entry

    def _split(self, segment: int, blocks: int) -> None:
        """Leave the first `blocks` of a segment; the others become one of their own."""
        rest, parts = self._rests[segment], self._held.pop(segment, {})
        whole, cut = len(rest) // _BYTES + 1, blocks * _BYTES
        block = int.from_bytes(rest[cut - _BYTES : cut], "little")
        self._rests[segment] = rest[: cut - _BYTES]
        # Only hashes that are no chain occur at two places; then the second is dropped.
        is_lost = self._table.find(block) != 0
        tail = tail_mask = 0
        for holder in self._holders_of(segment):
            held = parts.get(holder.slot, whole)
            if held < blocks:
                self._held.setdefault(segment, {})[holder.slot] = held
            if held <= blocks:
                continue
            if is_lost:
                holder.size -= held - blocks
                self._size -= held - blocks
                continue
            entry = self._entry(segment, holder)
            other = self._new_entry(block ^ holder.salt if tail else block, entry)
            tail, tail_mask = tail or other, tail_mask | holder.bit
            if held < whole:
                self._held.setdefault(tail, {})[holder.slot] = held - blocks
            addition = self._added.get(entry)
            if addition is not None:
                before = addition.before[entry]
                self._own(other, addition, max(0, before - blocks))
                if before >= blocks:
                    self._disown(entry)
        if tail:
            self._masks[tail], self._rests[tail] = tail_mask, rest[cut:]
            self._trim(tail)

    def _drop_departed(self) -> None:
        holder = self._departed[-1]
        for _ in range(_SEGMENTS_DROPPED):
            entry = self._recency.oldest(holder.anchor)
            if entry == holder.anchor:
                self._departed.pop()
                self._recency.give_back(holder.anchor)
                self._free_slots.append(holder.slot)
                return
            segment = self._segment(entry, holder)
            self._shorten(holder, segment, self._blocks(segment, holder))

    def _evict(self, holder: _Holder, surplus: int) -> None:
        while surplus:
            segment = self._segment(self._recency.oldest(holder.anchor), holder)
            dropped = min(surplus, self._blocks(segment, holder))
            self._shorten(holder, segment, dropped)
            surplus -= dropped

    def _shorten(self, holder: _Holder, segment: int, dropped: int) -> None:
        """Take the last `dropped` blocks of a segment from one of its holders."""
        left = self._blocks(segment, holder) - dropped
        holder.size -= dropped
        self._size -= dropped
        if left:
            self._held.setdefault(segment, {})[holder.slot] = left
        else:
            self._leave(holder, segment)
        self._trim(segment)

    def _leave(self, holder: _Holder, segment: int) -> None:
        entry, mask = self._entry(segment, holder), self._masks[segment] ^ holder.bit
        self._recency.unlink(entry)
        self._disown(entry)
        self._forget_part(segment, holder.slot)
        if mask and entry == segment:  # another holder's entry becomes the first
            heir = self._slots[mask.bit_length() - 1]
            entry = self._entry(segment, heir)
            self._recency.replace(entry, segment)
            addition = self._added.pop(entry, None)
            if addition is not None:
                self._own(segment, addition, addition.before.pop(entry))
        self._masks[segment] = mask
        if not mask:
            self._rests[segment] = b""
        self._table.delete(entry)
        self._recency.give_back(entry)

    def _trim(self, segment: int) -> None:
        """Drop the end of a segment if its only holder has lost it."""
        parts, mask = self._held.get(segment), self._masks[segment]
        if parts and not mask & mask - 1:
            [held] = parts.values()
            self._rests[segment] = self._rests[segment][: (held - 1) * _BYTES]
            del self._held[segment]

    def _blocks(self, segment: int, holder: _Holder) -> int:
        """Return how many blocks of a segment a holder of it has."""
        whole = len(self._rests[segment]) // _BYTES + 1
        parts = self._held.get(segment)
        return whole if parts is None else parts.get(holder.slot, whole)

    def _forget_part(self, segment: int, slot: int) -> None:
        parts = self._held.get(segment)
        if parts is not None:
            parts.pop(slot, None)
            if not parts:
                del self._held[segment]

    def _holders_of(self, segment: int) -> list[_Holder]:
        digits = f"{self._masks[segment]:b}"[::-1].encode().translate(_ZEROS_AND_ONES)
        return list(compress(self._slots, digits))

    # Entries

    def _new_entry(self, key: int, newer: int) -> int:
        """Allocate an entry for `key`, right behind the entry or anchor `newer`."""
        entry = self._recency.insert_new(newer)
        if entry >= len(self._masks):
            self._fit(entry)
        self._table.insert(key, entry)
        return entry

    def _fit(self, entry: int) -> None:
        while entry >= len(self._masks):
            self._masks.append(0)
            self._rests.append(b"")

    def _entry(self, segment: int, holder: _Holder) -> int:
        """Return the entry of a holder of a segment."""
        if self._masks[segment] == holder.bit:
            return segment
        return self._table.find(self._table.keys[segment] ^ holder.salt) or segment

    def _segment(self, entry: int, holder: _Holder) -> int:
        """Return the segment of a holder's entry."""
        if self._masks[entry]:
            return entry
        return self._table.find(self._table.keys[entry] ^ holder.salt)

    def _own(self, entry: int, addition: Addition, before: int) -> None:
        self._added[entry] = addition
        addition.before[entry] = before

    def _disown(self, entry: int) -> None:
        addition = self._added.pop(entry, None)
        if addition is not None:
            del addition.before[entry]

    # Endpoints

    def _admit(self, key: str) -> _Holder:
        self._last_salt = self._last_salt + _MIX & _MASK
        salt = self._last_salt
        for shift, factor in _SCRAMBLE:
            salt = (salt ^ salt >> shift) * factor & _MASK
        # The lowest free slot, so that masks stay as short as the pool is large.
        slot = min(self._free_slots, default=len(self._slots))
        anchor = self._recency.open()
        self._fit(anchor)
        holder = _Holder(slot, 1 << slot, salt ^ salt >> 31, anchor)
        if self._free_slots:
            self._free_slots.remove(slot)
            self._slots[slot], self._names[slot] = holder, key
        else:
            self._slots.append(holder)
            self._names.append(key)
        self._holders[key] = holder
        self._present |= holder.bit
        return holder


def _common(data: bytes, at: int, rest: bytes) -> int:
    """Return in how many blocks a segment, of `rest` after its first, agrees with `data` at `at`.

    A hash stands for all blocks before its own, so that halving finds the end.
    """
    low, high = 1, min(len(rest), len(data) - at - _BYTES) // _BYTES + 1
    while low < high:
        middle = (low + high + 1) // 2
        start = (middle - 2) * _BYTES
        if data.startswith(rest[start : start + _BYTES], at + start + _BYTES):
            low = middle
        else:
            high = middle - 1
    return low
