"""Estimates which endpoint holds which prompt blocks, in at most 64 bytes per held block.

A `PairTable` maps each pair of a block hash and an endpoint to a node of a `RecencyLists`, where
each endpoint has a list of its nodes in the order of their last use. The key of a pair is the hash
mixed with a salt of the endpoint; one that is removed and returns gets a new salt.

A record of a block includes the blocks before it. Recording refreshes them last to first, as paged
engines free them, so an endpoint over its capacity loses the tail of a prompt before its beginning,
and holds all blocks before any that it holds: a binary search finds the end of a match. Short
prompts are processed block by block and long ones by arrays, with the same result.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from picker.prefix.block_hash import BlockHashes
from picker.prefix.pair_table import Keys, PairTable
from picker.prefix.recency import RecencyLists

_MASK = 2**64 - 1
_MIX = 0x9E37_79B9_7F4A_7C15  # odd, so multiplication by it is a bijection
_MIX_ARRAY = np.uint64(_MIX)
_ONE = np.uint64(1)  # no key is 0
# Up to this number, single lookups (0.5 µs each) beat array lookups (15 µs and 0.06 µs each).
_MAX_SINGLE_LOOKUPS = 24
_MAX_PIVOTS = 4
_SCRAMBLE = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))  # splitmix64


@dataclass(slots=True)
class _Holder:
    key: str
    salt: int  # mixed into the keys of its pairs
    anchor: int  # of its recency list
    size: int = 0  # in blocks


class PrefixIndex:
    """Owns the estimated placement of prompts, given as chained hashes. Not thread safe."""

    def __init__(self) -> None:
        self._table = PairTable()
        self._recency = RecencyLists()
        self._holders: dict[str, _Holder] = {}
        # The holders as arrays, built lazily: endpoints arrive and leave in groups.
        self._is_listed = True
        self._names: tuple[str, ...] = ()
        self._salts = np.zeros(0, np.uint64)
        self._salt_numbers: tuple[int, ...] = ()
        self._last_salt = 0

    def __len__(self) -> int:
        """The number of (block, endpoint) pairs."""
        return len(self._table)

    def match(self, hashes: BlockHashes) -> dict[str, int]:
        """Return the length of the unbroken run from block 0, by endpoint that holds block 0."""
        if not len(hashes) or not self._holders:
            return {}
        if not self._is_listed:
            self._list_holders()
        held = self._holders_of(hashes.item(0))
        if len(held) > _MAX_SINGLE_LOOKUPS:
            runs = self._runs(hashes, self._salts[held]).tolist()
            return {self._names[i]: run for i, run in zip(held, runs, strict=True)}
        matched: dict[str, int] = {}
        find, length = self._table.find_one, len(hashes)
        run = length
        last = following = hashes.item(run - 1)
        for i in held:
            salt = self._salt_numbers[i]
            # Most endpoints have the run of the previous one; these two lookups confirm it.
            if not find((last ^ salt) * _MIX & _MASK | 1) or (
                run < length and find((following ^ salt) * _MIX & _MASK | 1)
            ):
                run = self._run(hashes, salt, run)
                last, following = hashes.item(run - 1), hashes.item(min(run, length - 1))
            matched[self._names[i]] = run
        return matched

    def record(self, key: str, hashes: BlockHashes, capacity: int) -> None:
        """Note that endpoint `key` will hold these blocks; keep its `capacity` latest blocks."""
        holder = self._holders.get(key)
        if holder is None:
            holder = self._admit(key)
        path = hashes[:capacity]  # later blocks would be evicted first
        if len(path) <= _MAX_SINGLE_LOOKUPS:
            self._record_few(holder, path)
        else:
            self._record_many(holder, path, capacity)
        if holder.size > capacity:
            self._evict(holder, holder.size - capacity)

    def remove(self, key: str) -> None:
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        self._evict(holder, holder.size)
        self._recency.give_back([holder.anchor])
        self._is_listed = False

    def check_integrity(self) -> None:
        self._table.check_integrity()
        for holder in self._holders.values():
            self._recency.check_integrity(holder.anchor)
            if self._recency.length(holder.anchor) != holder.size:
                raise AssertionError("an endpoint's blocks are miscounted")
        if sum(holder.size for holder in self._holders.values()) != len(self._table):
            raise AssertionError("an entry has no endpoint")

    # Matching

    def _holders_of(self, block: int) -> list[int]:
        if len(self._names) > _MAX_SINGLE_LOOKUPS:
            held = self._table.holds(_keys(np.uint64(block), self._salts))
            found: list[int] = held.nonzero()[0].tolist()
            return found
        keys = [(block ^ salt) * _MIX & _MASK | 1 for salt in self._salt_numbers]
        return self._table.positions_held(keys)

    def _run(self, hashes: BlockHashes, salt: int, guess: int) -> int:
        """Return the length of an endpoint's run from block 0; fastest if `guess` is right."""
        low, high, trial = 1, len(hashes), guess
        # An endpoint that holds a block holds all before it, so that halving finds the end.
        while low < high:
            trial = min(max(trial, low + 1), high)
            if self._table.find_one((hashes.item(trial - 1) ^ salt) * _MIX & _MASK | 1):
                low = trial
                trial = trial + 1 if trial == guess else (low + high + 1) // 2
            else:
                high = trial - 1
                trial = (low + high + 1) // 2
        return low

    def _runs(self, hashes: BlockHashes, salts: Keys) -> npt.NDArray[np.int64]:
        """Return the lengths of the runs of endpoints that hold block 0.

        Endpoints share prefixes, so few distinct runs occur: the run of one endpoint is tried on
        the others, up to `_MAX_PIVOTS` times; then binary search finds the remaining runs.
        """
        low = np.ones(len(salts), np.int64)  # a run is at least low and at most high
        high = np.full(len(salts), len(hashes), np.int64)
        rest = np.arange(len(salts)) if len(hashes) > 1 else np.arange(0)
        pivots, run = _MAX_PIVOTS, len(hashes)
        while len(rest):
            if pivots:
                pivots -= 1
                run = self._run(hashes, int(salts[rest[0]]), run)
                trials = [np.full(len(rest), run), np.full(len(rest), run + 1)]
            else:
                trials = [(low[rest] + high[rest] + 1) // 2]
            for trial in trials:
                inside = (trial > low[rest]) & (trial <= high[rest])
                at, tried = rest[inside], trial[inside]
                held = self._table.holds(_keys(hashes[tried - 1], salts[at]))
                low[at] = np.where(held, tried, low[at])
                high[at] = np.where(held, high[at], tried - 1)
            rest = rest[low[rest] < high[rest]]
        return low

    # Recording

    def _record_few(self, holder: _Holder, path: BlockHashes) -> None:
        table, recency, salt = self._table, self._recency, holder.salt
        for block in reversed(path.tolist()):
            key = (block ^ salt) * _MIX & _MASK | 1
            node = table.find_one(key)
            if node:
                recency.refresh(holder.anchor, node)
            else:
                table.insert_one(key, recency.append_new(holder.anchor))
                holder.size += 1

    def _record_many(self, holder: _Holder, path: BlockHashes, capacity: int) -> None:
        keys = _distinct(_keys(path, np.uint64(holder.salt)))
        nodes = self._table.find(keys)
        absent = nodes == 0
        held = nodes[~absent]
        added = len(keys) - len(held)
        if len(held):
            self._recency.unlink(held)
        if added:
            # Evicted blocks make room for new ones, which reuse their nodes.
            surplus = min(holder.size + added - capacity, holder.size - len(held))
            dropped = self._drop_oldest(holder, surplus)
            self._recency.give_back(dropped[added:])
            taken = dropped[:added] + self._recency.take(added - len(dropped))
            fresh = np.array(taken, np.uint32)
            self._table.insert(keys[absent], fresh)
            nodes[absent] = fresh
            holder.size += added
        self._recency.append(holder.anchor, nodes)

    def _evict(self, holder: _Holder, count: int) -> None:
        self._recency.give_back(self._drop_oldest(holder, count))

    def _drop_oldest(self, holder: _Holder, count: int) -> list[int]:
        """Remove the `count` least recently used blocks of an endpoint; return their nodes."""
        if count <= 0:
            return []
        nodes = self._recency.cut_oldest(holder.anchor, count)
        holder.size -= len(nodes)
        if len(nodes) <= _MAX_SINGLE_LOOKUPS:
            for node in nodes:
                self._table.delete_one(node)
        else:
            self._table.delete(np.array(nodes, np.uint32))
        return nodes

    # Endpoints

    def _admit(self, key: str) -> _Holder:
        self._last_salt = self._last_salt + _MIX & _MASK
        salt = self._last_salt
        for shift, factor in _SCRAMBLE:
            salt = (salt ^ salt >> shift) * factor & _MASK
        holder = _Holder(key, salt ^ salt >> 31, self._recency.open())
        self._holders[key] = holder
        self._is_listed = False
        return holder

    def _list_holders(self) -> None:
        holders = self._holders.values()
        self._names = tuple(self._holders)
        self._salt_numbers = tuple(holder.salt for holder in holders)
        self._salts = np.array(self._salt_numbers, np.uint64)
        self._is_listed = True


def _keys(blocks: BlockHashes | np.uint64, salts: Keys | np.uint64) -> Keys:
    """Compute the keys of pairs, of which one part or both are arrays. Keys are odd, so never 0."""
    keys: Keys = np.bitwise_xor(blocks, salts, dtype=np.uint64) * _MIX_ARRAY | _ONE
    return keys


def _distinct(keys: Keys) -> Keys:
    """Remove duplicate keys, which only colliding hashes cause."""
    in_order = np.sort(keys)
    if not (in_order[1:] == in_order[:-1]).any():
        return keys
    return keys[np.sort(np.unique(keys, return_index=True)[1])]
