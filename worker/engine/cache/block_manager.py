"""Paged KV blocks: the tables that hold them, and the contents that can be used again.

A sequence owns a *table*, the ordered ids of its blocks; a block may be in several tables and
counts them (`references`). Exactly the blocks in no table are *idle*, in the free queue. A full
block whose KV is written can be *sealed*: it gets the name of its contents, can be hit at once, and
is never written again. While idle, it can be hit until it is taken, so the free queue is the
eviction order.

A hit never covers the last token: one must be run to have something to sample from. It ends inside
a block where the cache knows a block with the same beginning, which is copied into the first new
one. `fork` shares the partly filled block at the end too; `allocate` replaces it by a copy before
either side writes into it. The executor reads the sources of all copies before it writes anything
of the step, so a source may be taken and written in the very step of the copy.

Every operation either does all it says or returns False and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, PartialBlock, extra_keys, key_of
from worker.engine.cache.cache_events import CacheEvent, announcement
from worker.engine.cache.free_queue import FreeQueue
from worker.engine.cache.prefix_cache import PrefixCache
from worker.engine.messages import CachedBlock
from worker.errors import IntegrityError, UnknownSequenceError
from worker.types import Adapter, BlockTable, KvBytes


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached KV of a sequence: `blocks` to share, and the beginning of `partial_block` to copy,
    with `num_tokens` tokens in all. Or `blocks` and, after them, `num_loaded` tokens whose KV comes
    from the `slots` of the host tier, then from what has `arrived`.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    partial_block: int | None = None
    num_loaded: int = 0
    slots: tuple[int, ...] = ()
    arrived: KvBytes | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Contents evicted from a block of `tenant`; `block` has them until the next step writes."""

    block: int
    content: BlockHash
    tenant: str


NO_HIT = PrefixHit()


@dataclass(slots=True)
class _Holding:
    """A sequence's blocks, of which `num_sealed` are sealed. `copy` is the last copy of the table,
    with the same `num_same` leading blocks (None: all).
    """

    table: list[int]
    num_sealed: int
    tenant: str
    copy: BlockTable = field(default_factory=BlockTable)
    num_same: int | None = 0

    def change(self, first: int) -> None:
        """Note that the blocks from `first` on are about to change."""
        self.num_same = first if self.num_same is None else min(self.num_same, first)


class BlockManager:
    """Sole owner of block tables and reference counts, of the free queue and the prefix cache."""

    def __init__(self, config: CacheConfig) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._caching = config.enable_prefix_caching
        self._partial_hits = config.enable_prefix_caching and config.enable_partial_hits
        self._references = [0] * config.num_blocks
        self._free = FreeQueue(config.num_blocks, config.enable_fair_eviction)
        self._cache = PrefixCache(config.num_blocks, self._partial_hits, config.record_events)
        self._holdings: dict[int, _Holding] = {}
        self._copies: dict[int, int] = {}  # destination → source
        self._evicted: list[Evicted] | None = [] if config.record_evictions else None
        self.num_evictions = 0
        self.max_num_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_empty(self) -> int:
        return self._free.num_empty

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self._num_blocks

    @property
    def num_hash_collisions(self) -> int:
        return self._cache.num_collisions

    def table(self, seq_id: int) -> Sequence[int]:
        """Return the block ids of a sequence, in order: a live view that later operations change.

        Like every method that takes a `seq_id`, raises UnknownSequenceError if it has no blocks.
        """
        return self._holding(seq_id).table

    def table_copy(self, seq_id: int) -> BlockTable:
        """Return a copy of the table, the same object until the table changes."""
        holding = self._holding(seq_id)
        if holding.num_same is not None:
            before, holding.copy = holding.copy, BlockTable(holding.table)
            before.before = None  # or each copy would hold all earlier ones
            holding.copy.before, holding.copy.num_same = before, holding.num_same
            holding.num_same = None
        return holding.copy

    def num_shared_tokens(self, seq_id: int) -> int:
        """Return how many tokens are in the leading sealed blocks that others hold too: those
        blocks survive the release of this sequence.
        """
        holding = self._holding(seq_id)
        for index in range(holding.num_sealed):
            if self._references[holding.table[index]] == 1:
                return index * self._block_size
        return holding.num_sealed * self._block_size

    def find(self, chain: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached beginning of `chain`, valid in this step."""
        return self._cache.find_chain(chain)

    def match(
        self,
        chain: Sequence[BlockHash],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> PrefixHit:
        """Return the longest cached prefix of `token_ids`, the last token excepted.

        `chain` covers the full blocks of `token_ids[:-1]`. Pass the hit on to `admit` at once: the
        next operation may evict it.
        """
        if not self._caching:
            return NO_HIT
        size, max_hit = self._block_size, len(token_ids) - 1
        blocks = self._cache.find_chain(chain[: max_hit // size])
        num_full = len(blocks)
        start = num_full * size
        if self._partial_hits and start < max_hit:
            found = self._cache.find_beginning(
                chain[num_full - 1] if num_full else None,
                token_ids[start : min(start + size, max_hit)],
                extra_keys(num_full, cache_salt, adapter),
            )
            if found is not None:
                return PrefixHit(tuple(blocks), start + found[1], found[0])
        return PrefixHit(tuple(blocks), start)

    def admit(
        self, seq_id: int, num_tokens: int, hit: PrefixHit, reserve: int = 0, tenant: str = ""
    ) -> bool:
        """Give a new sequence a table for `num_tokens` tokens that starts with `match`'s `hit`.

        Return False, and change nothing, unless at least `reserve` blocks stay free. The new blocks
        count for `tenant`.
        """
        num_new = -(-num_tokens // self._block_size) - len(hit.blocks)
        idle_hits = [block for block in hit.blocks if self._references[block] == 0]
        if num_new + len(idle_hits) + reserve > len(self._free):
            return False
        # First, or a new block could evict a hit.
        for block in idle_hits:
            self._free.remove(block)
        for block in hit.blocks:
            self._references[block] += 1
        source = hit.partial_block
        if source is not None and self._references[source] == 0:
            self._free.touch(source)
        new = [self._take(tenant) for _ in range(num_new)]
        if source is not None:
            self._copy(source, new[0])
        self._holdings[seq_id] = _Holding([*hit.blocks, *new], len(hit.blocks), tenant)
        self._note_use()
        return True

    def allocate(self, seq_id: int, start: int, end: int) -> bool:
        """Make positions `start` … `end`−1 of a sequence writable; `start` is the first unwritten.
        Return False, and change nothing, when too few blocks are free.
        """
        holding = self._holding(seq_id)
        table, size = holding.table, self._block_size
        num_new = -(-end // size) - len(table)
        tail = start // size
        # The block at `start` is the partial tail of a fork if others hold it. If it is sealed, the
        # other side of that fork filled it, whether or not that one is still there.
        shared_tail = tail < len(table) and (
            self._references[table[tail]] > 1 or self._cache.holds(table[tail])
        )
        if num_new <= 0 and not shared_tail:
            return True
        if max(num_new, 0) + shared_tail > len(self._free):
            return False
        holding.change(tail if shared_tail else len(table))
        if shared_tail:
            source, table[tail] = table[tail], self._take(holding.tenant)
            self._copy(source, table[tail])
            self._references[source] -= 1
            if self._references[source] == 0:
                self._free.put_cached(source)
        for _ in range(num_new):
            table.append(self._take(holding.tenant))
        self._note_use()
        return True

    def shrink(self, seq_id: int, end: int) -> None:
        """Give back a sequence's blocks beyond `end` tokens, which it has not used."""
        holding = self._holding(seq_id)
        num_left = max(-(-end // self._block_size), holding.num_sealed)
        if len(holding.table) > num_left:
            holding.change(num_left)
        while len(holding.table) > num_left:
            block = holding.table.pop()
            self._references[block] -= 1
            if self._references[block] == 0:
                # A copy into a block that no table holds is not due.
                self._copies.pop(block, None)
                self._free.put_empty(block)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the block copies (source, destination) due before the next write, each once."""
        if not self._copies:
            return ()
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies = {}
        return copies

    def take_evicted(self) -> list[Evicted]:
        """Return the contents evicted since the last call that are in no other block, in order.
        Like copies, they must be read before the next write.
        """
        if not self._evicted:
            return []
        evicted, self._evicted = self._evicted, []
        return evicted

    def seal(self, seq_id: int, chain: Sequence[BlockHash], num_blocks: int) -> None:
        """Let others hit the leading `num_blocks` blocks of a sequence: their KV is written.

        `chain` is at least that long. A block whose digest stands for other contents stays
        unsealed, and so do those after it.
        """
        holding = self._holding(seq_id)
        if num_blocks <= holding.num_sealed or not self._caching:
            return
        blocks = holding.table[:num_blocks]
        holding.num_sealed, superseded = self._cache.store(blocks, chain, holding.num_sealed)
        for block in superseded:
            self._free.empty(block)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        parent = self._holding(parent_id)
        num_blocks = -(-num_tokens // self._block_size)
        table = parent.table[:num_blocks]
        for block in table:
            self._references[block] += 1
        num_sealed = min(parent.num_sealed, num_tokens // self._block_size)
        self._holdings[child_id] = _Holding(table, num_sealed, parent.tenant)

    def free(self, seq_id: int, tail: PartialBlock | None = None, forget: bool = False) -> None:
        """Take a sequence's table away; an unknown id is ignored.

        The written tokens of `tail` can still be hit and copied, unless the blocks before it are
        not sealed. With `forget` the KV that only this sequence holds is corrupt and can no longer
        be hit.
        """
        holding = self._holdings.pop(seq_id, None)
        if holding is None:
            return
        table, num_sealed = holding.table, holding.num_sealed
        # Where a collision ended the sealing, the next block is not the one that `tail` names.
        is_named = tail is not None and tail.index == num_sealed < len(table)
        tail_block = table[num_sealed] if is_named else None
        # In reverse: a beginning is of use without its end, so the end is evicted first.
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            copied = self._copies.pop(block, None) is None  # else it was never written
            if forget and self._cache.drop(block):
                self._free.put_empty(block)
            elif self._cache.holds(block):
                self._free.put_cached(block)
            elif tail is not None and block == tail_block and copied and not forget:
                self._keep_tail(block, tail, table[num_sealed - 1] if num_sealed else None)
            else:
                self._free.put_empty(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. Return False, and do nothing, while a sequence has blocks."""
        if len(self._free) < self._num_blocks:
            return False
        for block in self._cache.clear():
            self._free.empty(block)
        self.take_evicted()
        return True

    def record(self, event: CacheEvent) -> None:
        self._cache.record(event)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cache since the last call, evictions before what is stored."""
        return self._cache.take_events()

    def cached_blocks(self) -> list[CachedBlock]:
        """Return all cached full blocks, parents first, equal contents as often as they exist."""
        return [
            CachedBlock(
                content.digest,
                None if first else content.parent,
                list(content.token_ids),
                key_of(content.extra, "cache_salt"),
                key_of(content.extra, "lora"),
            )
            for content, first in self._cache.full_blocks()
        ]

    def announcement(self) -> list[CacheEvent]:
        return announcement(self._cache.full_blocks())

    def check_integrity(self) -> None:
        references = [0] * self._num_blocks
        for seq_id, holding in self._holdings.items():
            if holding.copy[: holding.num_same] != tuple(holding.table[: holding.num_same]):
                raise IntegrityError(f"the copy of sequence {seq_id}'s table is out of date")
            if len(set(holding.table)) != len(holding.table):
                raise IntegrityError(f"sequence {seq_id} holds a block twice: {holding.table}")
            for block in holding.table:
                references[block] += 1
        if references != self._references:
            raise IntegrityError("reference counts do not match the tables")
        held = {block for block, count in enumerate(references) if count}
        idle = list(self._free)
        if len(idle) != len(self._free) or sorted([*idle, *held]) != list(range(self._num_blocks)):
            raise IntegrityError("the free queue is not the set of unreferenced blocks")
        cached, partial = self._cache.check_integrity()
        self._free.check_integrity(cached, held)
        if partial & held:
            raise IntegrityError("a block that is held passes for a partial one")
        for holding in self._holdings.values():
            self._cache.check_chain(holding.table[: holding.num_sealed])
        self._check_copies(held, cached)

    def _check_copies(self, held: set[int], cached: set[int]) -> None:
        for destination in self._copies:
            if destination not in held or destination in cached:
                raise IntegrityError(f"block {destination} is due a copy but idle or sealed")
            tables = [h for h in self._holdings.values() if destination in h.table]
            if any(h.table.index(destination) < h.num_sealed for h in tables):
                raise IntegrityError(f"block {destination} counts as sealed before it is copied to")

    def _holding(self, seq_id: int) -> _Holding:
        try:
            return self._holdings[seq_id]
        except KeyError:
            raise UnknownSequenceError(f"sequence {seq_id} holds no blocks") from None

    def _take(self, tenant: str) -> int:
        block = self._free.take(tenant)
        content = None if self._evicted is None else self._cache.last_copy(block)
        if content is not None and self._evicted is not None:
            self._evicted.append(Evicted(block, content, self._free.last_loser))
        self.num_evictions += self._cache.drop(block)
        self._references[block] = 1
        return block

    def _copy(self, source: int, destination: int) -> None:
        """Queue a copy. `source` may be idle, or taken since, even as `destination`."""
        # A block that awaits a copy holds nothing yet: copy from its source, never in a chain.
        source = self._copies.get(source, source)
        if source != destination:
            self._copies[destination] = source

    def _keep_tail(self, block: int, tail: PartialBlock, after: int | None) -> None:
        is_stored, superseded = self._cache.store_partial(block, tail, after)
        if is_stored:
            self._free.put_cached(block)
        else:
            self._free.put_empty(block)
        for other in superseded:
            self._free.empty(other)

    def _note_use(self) -> None:
        self.max_num_used = max(self.max_num_used, self._num_blocks - len(self._free))
