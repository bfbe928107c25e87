"""The KV of sequences: block chains named, looked up, reserved, sealed and given back."""

from __future__ import annotations

from collections.abc import Iterable

from worker.config import CacheConfig
from worker.engine.block_hash import BlockHasher, PartialBlock, extra_keys
from worker.engine.block_manager import BlockManager, PrefixHit
from worker.engine.sequence import Sequence, SequenceState
from worker.errors import IntegrityError
from worker.types import KvLoad, KvPart


class SequenceKv:
    """Translates between sequences and the block manager, which it owns.

    Only what ended steps have written (`num_written`) is ever offered to others: sealed as full
    blocks, or, when a sequence lets go of its blocks, as a partial one.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.blocks = BlockManager(config)
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.caching = config.enable_prefix_caching
        self._loads: list[KvLoad] = []
        self._hasher = BlockHasher(config.block_size, config.hash_algo, config.hash_seed)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """What the prefix cache has of a waiting sequence, as far as it may be used."""
        if not self.caching:
            return PrefixHit()
        num_readable = sequence.num_readable
        self._hash(sequence, (num_readable - 1) // self.block_size)
        token_ids = sequence.token_ids
        if num_readable < len(token_ids):
            token_ids = token_ids[:num_readable]
        request = sequence.request
        chain = sequence.block_hashes
        return self.blocks.match(chain, token_ids, request.cache_salt, request.adapter)

    def admit(self, sequence: Sequence, num_tokens: int, hit: PrefixHit, reserve: int) -> bool:
        """Give a waiting sequence blocks for `num_tokens` tokens, beginning with `hit`.

        False, and nothing changed, unless `reserve` blocks stay free.
        """
        tenant = sequence.request.tenant
        if not self.blocks.admit(sequence.seq_id, num_tokens, hit, reserve, tenant):
            return False
        if self.caching:  # the whole chain: others compare themselves with it
            self._hash(sequence, len(sequence.token_ids) // self.block_size)
        sequence.num_computed = hit.num_tokens
        sequence.num_written = hit.num_tokens - hit.num_loaded
        return True

    def load(self, sequence: Sequence, hit: PrefixHit, part: KvPart) -> None:
        """Have the next step write what has arrived into the blocks that a sequence was admitted
        with. It can be hit by others when that step's results are there.
        """
        first, end = len(hit.blocks), hit.num_tokens
        table = self.blocks.table_copy(sequence.seq_id)
        token_bytes = part.data.nbytes // (part.end - part.start)
        begin = first * self.block_size - part.start
        data = part.data[begin * token_bytes : (end - part.start) * token_bytes]
        self._loads.append(KvLoad(table[first : self.blocks_for(end)], data))

    def take_loads(self) -> tuple[KvLoad, ...]:
        """What the next step has to load, once."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Make room up to position `end`; False, and nothing changed, when there is too little."""
        return self.blocks.allocate(sequence.seq_id, sequence.num_computed, end)

    def reach(self, sequence: Sequence, reserve: int) -> int:
        """How far a running sequence may get room ahead of its tokens while `reserve` blocks stay
        free, in tokens: in blocks that cache nothing, and in the one that it comes to next whatever
        that one caches.
        """
        num_spare = max(0, self.blocks.num_free - reserve)
        num_new = min(num_spare, max(1, self.blocks.num_empty))
        return (len(self.blocks.table(sequence.seq_id)) + num_new) * self.block_size

    def shrink(self, sequence: Sequence) -> None:
        """Give back a running sequence's blocks that hold nothing computed."""
        self.blocks.shrink(sequence.seq_id, sequence.num_computed)

    def written(self, sequence: Sequence, end: int) -> None:
        """The KV before position `end` is there now: its full blocks can be hit."""
        sequence.num_written = end
        if self.caching:
            num_full = end // self.block_size
            self._hash(sequence, num_full)
            self.blocks.seal(sequence.seq_id, sequence.block_hashes, num_full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence share everything that is written of another."""
        self.blocks.fork(parent.seq_id, child.seq_id, parent.num_written)
        child.num_computed = child.num_written = parent.num_written

    def release(self, sequence: Sequence, forget: bool = False) -> None:
        """Take a sequence's blocks away; with `forget` nothing in them can be hit any more."""
        tail = None if forget else self._tail(sequence)
        self.blocks.free(sequence.seq_id, tail, forget)

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise IntegrityError unless a live sequence's counts, chain and blocks agree."""
        if not 0 <= sequence.num_written <= sequence.num_computed <= sequence.num_tokens:
            raise IntegrityError(f"sequence {sequence.seq_id} miscounts its tokens")
        if len(sequence.block_hashes) > len(sequence.token_ids) // self.block_size:
            raise IntegrityError(f"sequence {sequence.seq_id} named blocks that are not full")
        if sequence.state is SequenceState.RUNNING:
            table = self.blocks.table(sequence.seq_id)
            if len(table) < self.blocks_for(sequence.num_computed):
                raise IntegrityError(f"sequence {sequence.seq_id} runs beyond its blocks")
        elif sequence.num_computed:
            raise IntegrityError(f"sequence {sequence.seq_id} waits, yet counts as computed")

    def check_total(self, running: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless exactly the blocks of `running` are in use."""
        used = {block for s in running for block in self.blocks.table(s.seq_id)}
        if len(used) + self.blocks.num_free != self.num_blocks:
            raise IntegrityError("blocks are held by none that runs")

    def _tail(self, sequence: Sequence) -> PartialBlock | None:
        """Names what is written after the last full block."""
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
