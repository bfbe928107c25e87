"""The KV of sequences: names chains of blocks, looks them up, reserves, seals and frees them."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher, PartialBlock, extra_keys
from worker.engine.cache.block_manager import BlockManager, PrefixHit
from worker.engine.cache.tiers import Tiers
from worker.engine.sequences.sequence import Sequence, SequenceState
from worker.errors import IntegrityError
from worker.kv.asked import WantedKv
from worker.kv.pull import Pull
from worker.types import Adapter, KvLoad, KvSave

# Blocks of the host tier that are loaded at once.
_LOAD_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class HeldKv:
    """KV of consecutive tokens from `start` on: in full `blocks`, then in `views` of the host's
    memory (one a block), then what `reading` will bring. Valid until the next step is scheduled.
    """

    start: int
    blocks: Seq[int]
    views: Seq[memoryview] = ()
    reading: Pull | None = None


class SequenceKv:
    """Translates between sequences and the block manager, which it owns, and the `tiers` below it.
    Only KV written by finished steps (`num_written`) is ever offered to others.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.blocks = BlockManager(config)
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.caching = config.enable_prefix_caching
        self.tiers: Tiers | None = None
        self._loads: list[KvLoad] = []
        self._hasher = BlockHasher(config.block_size, config.hash_algo, config.hash_seed)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def root(self) -> bytes:
        return self._hasher.root

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """Return the usable KV of a waiting sequence: from the prefix cache; after its whole
        blocks, from the host tier; after those, from KV that has arrived from elsewhere.
        """
        hit = self._cached(sequence) if self.caching else PrefixHit()
        first = len(hit.blocks)
        if self.tiers is not None:
            slots = self.tiers.find(sequence.block_hashes[first : self._num_usable(sequence)])
            end = (first + len(slots)) * self.block_size
            if end > hit.num_tokens:
                hit = PrefixHit(hit.blocks, end, None, len(slots) * self.block_size, slots)
        part = None if sequence.kv_pull is None else sequence.kv_pull.part
        if part is None:
            return hit
        start = (first + len(hit.slots)) * self.block_size
        end = min(part.end, len(sequence.token_ids) - 1)
        if part.start > start or end <= hit.num_tokens:
            return hit
        token_bytes = part.data.nbytes // (part.end - part.start)
        arrived = part.data[(start - part.start) * token_bytes : (end - part.start) * token_bytes]
        return PrefixHit(hit.blocks, end, None, end - first * self.block_size, hit.slots, arrived)

    def read(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Begin to read the KV of a waiting sequence that is on disk after the whole blocks of
        `hit`; return False if there is none, or if KV is on its way or has arrived.
        """
        if self.tiers is None or sequence.kv_pull is not None:
            return False
        first = len(hit.blocks) + len(hit.slots)
        chain = sequence.block_hashes[first : self._num_usable(sequence)]
        sequence.kv_pull = self.tiers.read(chain, first, self.block_size)
        return sequence.kv_pull is not None

    def is_on_disk(self, sequence: Sequence, hit: PrefixHit) -> bool:
        first = len(hit.blocks) + len(hit.slots)
        chain = sequence.block_hashes[first : self._num_usable(sequence)]
        return self.tiers is not None and any(map(self.tiers.is_on_disk, chain[:1]))

    def held(self, wanted: WantedKv, adapter: Adapter | None) -> HeldKv:
        """Return the KV that is cached here of the tokens that another engine wants."""
        size, chain = self.block_size, list[BlockHash]()
        num_blocks = (len(wanted.token_ids) - 1) // size if self.caching else 0
        self._hasher.extend(chain, wanted.token_ids, num_blocks, wanted.cache_salt, adapter)
        first = wanted.start // size
        blocks = self.blocks.find(chain[first:])
        if self.tiers is None:
            return HeldKv(first * size, blocks)
        place = first + len(blocks)
        views = self.tiers.peek(chain[place:])
        place += len(views)
        return HeldKv(first * size, blocks, views, self.tiers.read(chain[place:], place, size))

    def _num_usable(self, sequence: Sequence) -> int:
        """Return how many whole blocks of a sequence need not be computed."""
        return (sequence.num_readable - 1) // self.block_size

    def _cached(self, sequence: Sequence) -> PrefixHit:
        num_readable = sequence.num_readable
        self._hash(sequence, self._num_usable(sequence))
        token_ids = sequence.token_ids
        if num_readable < len(token_ids):
            token_ids = token_ids[:num_readable]
        request = sequence.request
        chain = sequence.block_hashes
        return self.blocks.match(chain, token_ids, request.cache_salt, request.adapter)

    def admit(self, sequence: Sequence, num_tokens: int, hit: PrefixHit, reserve: int) -> bool:
        """Give a waiting sequence blocks for `num_tokens` tokens, beginning with `hit`. Return
        False, and change nothing, unless `reserve` blocks stay free.
        """
        tenant = sequence.request.tenant
        if not self.blocks.admit(sequence.seq_id, num_tokens, hit, reserve, tenant):
            return False
        if self.caching:  # the whole chain: others compare themselves with it
            self._hash(sequence, len(sequence.token_ids) // self.block_size)
        sequence.num_computed = hit.num_tokens
        sequence.num_written = hit.num_tokens - hit.num_loaded
        if hit.num_loaded:
            self._load(sequence, hit)
        return True

    def _load(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Have the next step load the KV that is not in the sequence's blocks yet. Others can hit
        it when that step's results are there.
        """
        table = self.blocks.table_copy(sequence.seq_id)[: self.blocks_for(hit.num_tokens)]
        first, size = len(hit.blocks), self.block_size
        token_ids = sequence.token_ids
        if self.tiers is not None and hit.slots:
            views = self.tiers.load(hit.slots)
            for begin in range(0, len(views), _LOAD_BLOCKS):
                some = tuple(views[begin : begin + _LOAD_BLOCKS])
                end = first + len(some)
                tokens = tuple(token_ids[first * size : end * size])
                self._loads.append(KvLoad(table[first:end], some, tokens))
                first = end
        if hit.arrived is not None:
            tokens = tuple(token_ids[first * size : hit.num_tokens])
            self._loads.append(KvLoad(table[first:], (hit.arrived,), tokens))

    def take_saves(self, step: int) -> tuple[KvSave, ...]:
        """Return the saves of step `step`: contents that its blocks held, each once."""
        return () if self.tiers is None else self.tiers.save(self.blocks.take_evicted(), step)

    def reset(self, forget_tiers: bool = True) -> bool:
        """Forget all cached contents, those of tiers if `forget_tiers`. Return False, and change
        nothing, while a sequence has blocks.
        """
        if not self.blocks.reset_prefix_cache():
            return False
        if self.tiers is not None:
            if forget_tiers:
                self.tiers.reset()
            for event in self.tiers.announce():  # the device's last event took them back
                self.blocks.record(event)
        return True

    def take_loads(self) -> tuple[KvLoad, ...]:
        loads, self._loads = tuple(self._loads), []
        return loads

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Make room up to position `end`; return False, and change nothing, if that fails."""
        return self.blocks.allocate(sequence.seq_id, sequence.num_computed, end)

    def reach(self, sequence: Sequence, reserve: int) -> int:
        """Return the position up to which a running sequence may get room ahead of its tokens while
        `reserve` blocks stay free: in blocks that cache nothing, and in any next block.
        """
        num_spare = max(0, self.blocks.num_free - reserve)
        num_new = min(num_spare, max(1, self.blocks.num_empty))
        return (len(self.blocks.table(sequence.seq_id)) + num_new) * self.block_size

    def shrink(self, sequence: Sequence) -> None:
        """Give back a running sequence's blocks that hold nothing computed."""
        self.blocks.shrink(sequence.seq_id, sequence.num_computed)

    def written(self, sequence: Sequence, end: int) -> None:
        """Record that the KV before position `end` is there now: its full blocks can be hit."""
        sequence.num_written = end
        if self.caching:
            num_full = end // self.block_size
            self._hash(sequence, num_full)
            self.blocks.seal(sequence.seq_id, sequence.block_hashes, num_full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence share all KV that is written of another."""
        self.blocks.fork(parent.seq_id, child.seq_id, parent.num_written)
        child.num_computed = child.num_written = parent.num_written

    def release(self, sequence: Sequence, forget: bool = False) -> None:
        """Take a sequence's blocks away; with `forget` nothing in them can be hit any more."""
        tail = None if forget else self._tail(sequence)
        self.blocks.free(sequence.seq_id, tail, forget)

    def check_integrity(self, sequence: Sequence) -> None:
        if not 0 <= sequence.num_written <= sequence.num_computed <= sequence.num_tokens:
            raise IntegrityError(f"sequence {sequence.seq_id} miscounts its tokens")
        if len(sequence.block_hashes) > len(sequence.token_ids) // self.block_size:
            raise IntegrityError(
                f"sequence {sequence.seq_id} has hashes of blocks that are not full"
            )
        if sequence.state is SequenceState.RUNNING:
            table = self.blocks.table(sequence.seq_id)
            if len(table) < self.blocks_for(sequence.num_computed):
                raise IntegrityError(f"sequence {sequence.seq_id} runs beyond its blocks")
        elif sequence.num_computed:
            raise IntegrityError(f"sequence {sequence.seq_id} waits, yet counts as computed")

    def check_total(self, running: Iterable[Sequence]) -> None:
        used = {block for s in running for block in self.blocks.table(s.seq_id)}
        if len(used) + self.blocks.num_free != self.num_blocks:
            raise IntegrityError("blocks are held by no running sequence")

    def _tail(self, sequence: Sequence) -> PartialBlock | None:
        """Return the tokens that are written after the last full block, if there are any."""
        index, rest = divmod(sequence.num_written, self.block_size)
        if not self.caching or not rest:
            return None
        chain = sequence.block_hashes
        return PartialBlock(
            index,
            chain[index - 1].digest if index else self._hasher.root,
            tuple(sequence.token_ids[index * self.block_size : sequence.num_written]),
            extra_keys(index, sequence.request.cache_salt, sequence.request.adapter),
        )

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > len(sequence.block_hashes):
            salt, adapter = sequence.request.cache_salt, sequence.request.adapter
            chain = sequence.block_hashes
            self._hasher.extend(chain, sequence.token_ids, num_blocks, salt, adapter)
