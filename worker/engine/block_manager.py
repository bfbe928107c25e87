"""Paged KV blocks: who holds which, and which contents can be used again.

Theory of operation
-------------------
The KV cache is `num_blocks` blocks of `block_size` tokens. A sequence owns a *table*, the ordered
ids of its blocks; a block may stand in several tables and counts them (`references`). A block that
stands in none is in the *free queue*, and only there:

    in the free queue  ⇔  references == 0

A full block whose KV is written can be *sealed*: it gets its `BlockHash` and appears in the prefix
cache at once, while its sequence still runs. A sealed block is never written again. It keeps its
hash when the last table lets go of it, so the free queue doubles as the cache's eviction order:
`_take` pops from the head and forgets whatever the popped block was caching.

- Freed blocks enter in reverse table order, sealed ones at the tail of the queue, un-sealed ones at
  its head. So garbage is re-used first, then the oldest contents, and of one sequence the tail
  before the head (a prefix is of use without its continuation, not the other way round).
- A hit takes the block out of the middle of the queue. An `OrderedDict` does that, and both ends,
  in constant time.
- Equal contents may exist twice (two sequences that ran side by side). Tables are append-only, so
  nobody swaps one for the other; the cache knows both and serves the first that is left.
- A lookup matches at most `num_tokens` − 1 tokens, floored to whole blocks: at least one token must
  be run to have something to sample from.
- `fork` shares the blocks of a sequence with another. The one partly filled block at the end is
  shared too, until either side is about to write into it: `allocate` then replaces it by a copy
  (copy-on-write) and says so in `take_copies`.

Every operation either does all it says or returns False and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from worker.config import CacheConfig
from worker.engine.block_hash import BlockHash
from worker.errors import WorkerError


class IntegrityError(WorkerError):
    """The block bookkeeping contradicts itself: a bug, and KV can no longer be trusted."""


class BlockManager:
    """Sole owner of block tables, reference counts, the free queue and the prefix cache."""

    def __init__(self, config: CacheConfig) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._caching = config.enable_prefix_caching
        self._references = [0] * config.num_blocks
        self._hashes: list[BlockHash | None] = [None] * config.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(config.num_blocks))
        self._cached: dict[bytes, tuple[int, ...]] = {}  # digest → blocks with that content
        self._tables: dict[int, list[int]] = {}
        self._num_sealed: dict[int, int] = {}  # leading blocks of a table that need no sealing
        self._copies: list[tuple[int, int]] = []
        self.num_hash_collisions = 0
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks in no table; what they cache is still there until they are taken."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that stand in a table, 0 to 1. Idle cached blocks are free."""
        return 1.0 - len(self._free) / self._num_blocks

    def table(self, seq_id: int) -> Sequence[int]:
        """The block ids of a sequence, in order. A live view: later operations change it."""
        return self._tables[seq_id]

    def match(self, hashes: Sequence[BlockHash], num_tokens: int) -> list[int]:
        """The cached blocks of the longest known prefix of a sequence of `num_tokens` tokens.

        `hashes` covers the sequence's full blocks. Pure: the blocks may be gone after the next
        operation, so pass them on to `admit` at once.
        """
        blocks: list[int] = []
        if not self._caching:
            return blocks
        for block_hash in hashes[: (num_tokens - 1) // self._block_size]:
            found = self._cached.get(block_hash.digest)
            if found is None:
                break
            held = self._hashes[found[0]]
            if held is not block_hash and (held is None or held.content != block_hash.content):
                self.num_hash_collisions += 1
                break
            blocks.append(found[0])
        return blocks

    def admit(self, seq_id: int, num_tokens: int, hits: Sequence[int], reserve: int = 0) -> bool:
        """Give a new sequence a table for `num_tokens` tokens that starts with the blocks `hits`.

        False, and nothing changed, unless at least `reserve` blocks stay free. `seq_id` has no
        table yet; `hits` comes from `match`.
        """
        num_new = -(-num_tokens // self._block_size) - len(hits)
        idle_hits = [block for block in hits if self._references[block] == 0]
        if num_new + len(idle_hits) + reserve > len(self._free):
            return False
        for block in idle_hits:
            del self._free[block]
        for block in hits:
            self._references[block] += 1
        self._tables[seq_id] = [*hits, *(self._take() for _ in range(num_new))]
        self._num_sealed[seq_id] = len(hits)
        return True

    def allocate(self, seq_id: int, start: int, end: int) -> bool:
        """Make positions `start` … `end`−1 of a sequence writable; `start` is the first unwritten.

        False, and nothing changed, when too few blocks are free.
        """
        table = self._tables[seq_id]
        size = self._block_size
        num_new = -(-end // size) - len(table)
        tail = start // size
        # Sealed blocks lie before `start`; a shared block at `start` is the partial tail of a fork.
        shared_tail = tail < len(table) and self._references[table[tail]] > 1
        if num_new <= 0 and not shared_tail:
            return True
        if max(num_new, 0) + shared_tail > len(self._free):
            return False
        if shared_tail:
            source, table[tail] = table[tail], self._take()
            self._references[source] -= 1
            self._copies.append((source, table[tail]))
        for _ in range(num_new):
            table.append(self._take())
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The block copies (source, destination) due before the next write, once."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    def seal(self, seq_id: int, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Let others hit the leading `num_blocks` blocks of a sequence: their KV is written.

        `hashes` is the sequence's chain, at least that long; blocks sealed before are passed over.
        """
        num_sealed = self._num_sealed[seq_id]
        if num_blocks <= num_sealed or not self._caching:
            return
        table = self._tables[seq_id]
        for index in range(num_sealed, num_blocks):
            block, block_hash = table[index], hashes[index]
            if self._hashes[block] is None:  # else: sealed by the other side of a fork
                self._hashes[block] = block_hash
                digest = block_hash.digest
                self._cached[digest] = (*self._cached.get(digest, ()), block)
        self._num_sealed[seq_id] = num_blocks

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give `child_id` a table that shares the parent's first `num_tokens` written tokens."""
        num_blocks = -(-num_tokens // self._block_size)
        table = self._tables[parent_id][:num_blocks]
        for block in table:
            self._references[block] += 1
        self._tables[child_id] = table
        self._num_sealed[child_id] = min(self._num_sealed[parent_id], num_blocks)

    def free(self, seq_id: int) -> None:
        """Take a sequence's table away. An unknown id has none and is passed over."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        del self._num_sealed[seq_id]
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached content. False, and nothing changed, while a sequence has blocks."""
        if len(self._free) < self._num_blocks:
            return False
        self._hashes = [None] * self._num_blocks
        self._cached.clear()
        return True

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every invariant above holds. For tests; O(blocks)."""
        references = [0] * self._num_blocks
        for seq_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise IntegrityError(f"sequence {seq_id} holds a block twice: {table}")
            for block in table:
                references[block] += 1
        if references != self._references:
            raise IntegrityError("reference counts do not match the tables")
        if set(self._free) != {b for b, count in enumerate(references) if count == 0}:
            raise IntegrityError("the free queue is not the set of unreferenced blocks")
        if self._tables.keys() != self._num_sealed.keys():
            raise IntegrityError("sealed counts and tables name different sequences")
        self._check_cache()

    def _check_cache(self) -> None:
        listed = [block for blocks in self._cached.values() for block in blocks]
        hashed = [block for block, held in enumerate(self._hashes) if held is not None]
        if sorted(listed) != hashed:
            raise IntegrityError("the prefix cache does not list exactly the sealed blocks")
        for digest, blocks in self._cached.items():
            for block in blocks:
                held = self._hashes[block]
                if held is None or held.digest != digest:
                    raise IntegrityError(f"block {block} is listed under a hash not its own")
        for seq_id, table in self._tables.items():
            sealed = table[: self._num_sealed[seq_id]]
            if self._caching and any(self._hashes[block] is None for block in sealed):
                raise IntegrityError(f"sequence {seq_id} counts an un-sealed block as sealed")

    def _take(self) -> int:
        """Pop the head of the free queue, forget what it caches, count one reference."""
        block, _ = self._free.popitem(last=False)
        held = self._hashes[block]
        if held is not None:
            self._hashes[block] = None
            self.num_evictions += 1
            left = tuple(other for other in self._cached[held.digest] if other != block)
            if left:
                self._cached[held.digest] = left
            else:
                del self._cached[held.digest]
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._free[block] = None
        if self._hashes[block] is None:
            self._free.move_to_end(block, last=False)
            if self._copies:  # a copy into a block that nobody holds any more is not due
                self._copies = [copy for copy in self._copies if copy[1] != block]
