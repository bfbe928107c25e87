"""Random walks over every operation of the block manager, against a KV store that really stores.

The store executes steps as an executor does: it reads the sources of all copies, then writes their
destinations, then the planned tokens, where the tables said when the step was launched. What it
stores for a token is everything that its KV depends on: the salt and the tokens up to it. A step is
in flight while the next is planned, and sequences are freed in every state: planned, in flight,
with a copy due, forked, idle.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.depth import examples
from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher, PartialBlock, extra_keys
from worker.engine.cache.block_manager import BlockManager
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared

pytestmark = pytest.mark.timeout(900)  # a minute of walks, on a core that others may use

SIZE = 4
NUM_BLOCKS = 20
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)

Kv = tuple[str | None, tuple[int, ...]]  # salt, tokens up to and with this one


@dataclass
class Walker:
    tokens: list[int]
    salt: str | None
    computed: int
    launched: int
    planned: int
    chain: list[BlockHash] = field(default_factory=list)

    def kv(self, position: int) -> Kv:
        return self.salt, tuple(self.tokens[: position + 1])


@dataclass
class Step:
    copies: tuple[tuple[int, int], ...]
    writes: list[tuple[int, int, Kv]]
    ends: dict[int, int]


class BlockWalk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(CacheConfig(NUM_BLOCKS, SIZE, record_events=True))
        self.hasher = BlockHasher(SIZE)
        self.store: dict[int, list[Kv | None]] = {b: [None] * SIZE for b in range(NUM_BLOCKS)}
        self.walkers: dict[int, Walker] = {}
        self.in_flight: Step | None = None
        self.mirror: Counter[bytes] = Counter()
        self.written: list[tuple[list[int], str | None]] = []  # lately, with their salts
        self.next_id = 0

    def extend(self, walker: Walker, num_blocks: int) -> None:
        self.hasher.extend(walker.chain, walker.tokens, num_blocks, walker.salt)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.walkers)))

    # ---- planning ---------------------------------------------------------------------------

    @rule(
        new=TOKENS,
        salt=st.sampled_from([None, None, "s"]),
        tenant=st.sampled_from(["", "a", "b"]),
        reserve=st.sampled_from([0, 0, 2]),
    )
    def admit(self, new: list[int], salt: str | None, tenant: str, reserve: int) -> None:
        self.come(new, salt, tenant, reserve)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), new=TOKENS, tenant=st.sampled_from(["", "b"]), twins=st.integers(0, 2))
    def admit_like(self, data: st.DataObject, new: list[int], tenant: str, twins: int) -> None:
        tokens, salt = data.draw(st.sampled_from(self.written))
        known = tokens[: data.draw(st.integers(1, len(tokens)))]
        seq_id = self.come((known + new)[:20], salt, tenant, 0)
        if seq_id is not None:
            for _ in range(twins):
                self.split(seq_id, 0)
                self.plan_one(self.next_id - 1, new[:2])

    def come(self, tokens: list[int], salt: str | None, tenant: str, reserve: int) -> int | None:
        walker = Walker(tokens, salt, 0, 0, 0)
        self.extend(walker, (len(tokens) - 1) // SIZE)
        hit = self.blocks.match(walker.chain, tokens, salt)
        assert len(hit.blocks) * SIZE <= hit.num_tokens < len(tokens)
        assert (hit.partial_block is None) == (hit.num_tokens == len(hit.blocks) * SIZE)
        before = self.blocks.num_free
        if not self.blocks.admit(self.next_id, len(tokens), hit, reserve, tenant):
            assert self.blocks.num_free == before
            return None
        assert self.blocks.num_free >= reserve
        walker.computed = walker.launched = walker.planned = hit.num_tokens
        self.walkers[self.next_id] = walker
        self.next_id += 1
        return self.next_id - 1

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def plan(self, data: st.DataObject, more: list[int]) -> None:
        self.plan_one(self.pick(data), more)

    @rule(more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def run_all(self, more: list[int]) -> None:
        """Sequences with room run a chunk of their known tokens, or draw one."""
        if self.in_flight is not None:
            self.land(True)
        for seq_id in list(self.walkers):
            self.plan_one(seq_id, more)
        self.launch()
        self.land(True)

    def plan_one(self, seq_id: int, more: list[int]) -> None:
        walker = self.walkers[seq_id]
        start = walker.planned
        known = start < len(walker.tokens)
        end = min(start + len(more), len(walker.tokens)) if known else start + len(more)
        before = (self.blocks.num_free, list(self.blocks.table(seq_id)))
        if self.blocks.allocate(seq_id, start, end):
            assert len(self.blocks.table(seq_id)) * SIZE >= end
            if not known:
                walker.tokens = walker.tokens + more
            walker.planned = end
        else:
            assert (self.blocks.num_free, list(self.blocks.table(seq_id))) == before

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def make_room(self, data: st.DataObject, num_tokens: int) -> None:
        seq_id = self.pick(data)
        start = self.walkers[seq_id].planned
        self.blocks.allocate(seq_id, start, start + num_tokens)

    @precondition(lambda self: self.walkers)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Give back unused blocks: none of another sequence, none that is written."""
        seq_id = self.pick(data)
        needed = -(-self.walkers[seq_id].planned // SIZE)
        before = list(self.blocks.table(seq_id))
        self.blocks.shrink(seq_id, self.walkers[seq_id].planned)
        assert list(self.blocks.table(seq_id)) == before[:needed]

    # ---- running ----------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def launch(self) -> None:
        step = Step(self.blocks.take_copies(), [], {})
        for seq_id, walker in self.walkers.items():
            table = self.blocks.table(seq_id)
            step.writes += [
                (table[p // SIZE], p % SIZE, walker.kv(p))
                for p in range(walker.launched, walker.planned)
            ]
            walker.launched = step.ends[seq_id] = walker.planned
        self.in_flight = step

    @precondition(lambda self: self.in_flight is not None)
    @rule(sealing=st.sampled_from([True, True, True, False]))
    def land(self, sealing: bool) -> None:
        step, self.in_flight = self.in_flight, None
        read = [(destination, list(self.store[source])) for source, destination in step.copies]
        assert len({destination for destination, _ in read}) == len(read)
        for destination, content in read:
            self.store[destination] = content
        for block, slot, value in step.writes:
            self.store[block][slot] = value
        for seq_id, end in step.ends.items():
            if seq_id in self.walkers:
                walker = self.walkers[seq_id]
                walker.computed = end
                if end:
                    self.written = [*self.written[-5:], (walker.tokens[:end], walker.salt)]
                if sealing:
                    self.seal(seq_id)

    def seal(self, seq_id: int) -> None:
        walker = self.walkers[seq_id]
        self.extend(walker, walker.computed // SIZE)
        self.blocks.seal(seq_id, walker.chain, walker.computed // SIZE)

    # ---- forking and ending -----------------------------------------------------------------

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), back=st.sampled_from([0, 0, 1, 3]))
    def fork(self, data: st.DataObject, back: int) -> None:
        self.split(self.pick(data), back)

    def split(self, parent: int, back: int) -> None:
        walker = self.walkers[parent]
        num_tokens = max(0, walker.computed - back)
        self.blocks.fork(parent, self.next_id, num_tokens)
        self.walkers[self.next_id] = Walker(
            walker.tokens[:num_tokens], walker.salt, num_tokens, num_tokens, num_tokens
        )
        self.next_id += 1

    @precondition(lambda self: self.walkers)
    @rule(data=st.data(), how=st.sampled_from(["tail", "tail", "plain", "forget"]))
    def free(self, data: st.DataObject, how: str) -> None:
        self.end(self.pick(data), how)

    @precondition(lambda self: len(self.walkers) > 4)
    @rule()
    def free_oldest(self) -> None:
        """Without this the pool would be full for ever."""
        self.end(min(self.walkers), "tail")

    def end(self, seq_id: int, how: str) -> None:
        walker = self.walkers.pop(seq_id)
        tail = None
        num_full = walker.computed // SIZE
        if how == "tail" and walker.computed % SIZE:
            self.extend(walker, num_full)
            parent = walker.chain[num_full - 1].digest if num_full else self.hasher.root
            tokens = tuple(walker.tokens[num_full * SIZE : walker.computed])
            tail = PartialBlock(num_full, parent, tokens, extra_keys(num_full, walker.salt))
        self.blocks.free(seq_id, tail, forget=how == "forget")

    @rule()
    def reset(self) -> None:
        nothing_held = self.blocks.num_free == NUM_BLOCKS
        assert self.blocks.reset_prefix_cache() == nothing_held

    # ---- what must hold ---------------------------------------------------------------------

    @invariant()
    def bookkeeping_is_right(self) -> None:
        self.blocks.check_integrity()
        held = {block for seq_id in self.walkers for block in self.blocks.table(seq_id)}
        assert self.blocks.num_free == NUM_BLOCKS - len(held)

    @invariant()
    def contents_are_right(self) -> None:
        due = set(self.blocks._copies)
        if self.in_flight is not None:
            due |= {destination for _, destination in self.in_flight.copies}
        for seq_id, walker in self.walkers.items():
            table = self.blocks.table(seq_id)
            for position in range(walker.computed):
                block = table[position // SIZE]
                if block not in due:
                    assert self.store[block][position % SIZE] == walker.kv(position)

    @invariant()
    def mirror_is_right(self) -> None:
        """A mirror that replays the events knows exactly the cached blocks."""
        for event in self.blocks.take_events():
            if isinstance(event, BlocksStored):
                assert event.parent is None or self.mirror[event.parent] > 0
                self.mirror.update(block.digest for block in event.blocks)
            elif isinstance(event, BlockRemoved):
                self.mirror[event.digest] -= 1
            else:
                assert isinstance(event, CacheCleared)
                self.mirror.clear()
        assert +self.mirror == Counter(b.block_hash for b in self.blocks.cached_blocks())

    def teardown(self) -> None:
        for seq_id in list(self.walkers):
            self.blocks.free(seq_id)
        self.walkers.clear()
        self.bookkeeping_is_right()
        assert self.blocks.take_copies() == ()
        assert self.blocks.reset_prefix_cache()
        self.blocks.check_integrity()


class CollidingWalk(BlockWalk):
    """The same with a hash function that has only three digests."""

    def extend(self, walker: Walker, num_blocks: int) -> None:
        for index in range(len(walker.chain), num_blocks):
            parent = walker.chain[-1].digest if walker.chain else self.hasher.root
            tokens = tuple(walker.tokens[index * SIZE : (index + 1) * SIZE])
            digest = bytes([(sum(parent) + sum(tokens)) % 3])
            extra = extra_keys(index, walker.salt)
            walker.chain.append(BlockHash(digest, parent, tokens, extra))


BlockWalk.TestCase.settings = examples(
    260, stateful_step_count=60, suppress_health_check=[*HealthCheck]
)
CollidingWalk.TestCase.settings = examples(
    40, stateful_step_count=50, suppress_health_check=[*HealthCheck]
)
test_ten_thousand_random_steps_keep_every_invariant = BlockWalk.TestCase
test_random_steps_with_colliding_hashes_keep_every_invariant = CollidingWalk.TestCase
