"""The block manager: transactions, evictions, hits, copies, events, a trace, and random walks."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.depth import examples
from tests.support.worker.kv_blocks import SIZE, end, find, hashes_of, manager, run, tail_of
from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher, PartialBlock, extra_keys
from worker.engine.cache.block_manager import NO_HIT, BlockManager, PrefixHit
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import IntegrityError, UnknownSequenceError
from worker.types import BlockTable


def test_a_sequence_holds_the_blocks_that_its_tokens_fill() -> None:
    blocks = manager(8)
    assert blocks.admit(1, 10, NO_HIT)
    assert (len(blocks.table(1)), blocks.usage) == (3, 0.375)
    for start, upto, num_held in ((10, 12, 3), (12, 13, 4), (13, 16, 4), (16, 17, 5)):
        assert blocks.allocate(1, start, upto)
        assert len(blocks.table(1)) == num_held
    for _ in range(2):
        blocks.free(1)
        blocks.check_integrity()
        assert (blocks.num_free, blocks.usage, blocks.max_num_used) == (8, 0.0, 5)


def test_a_request_for_too_many_blocks_changes_nothing() -> None:
    blocks = manager(6)
    for seq_id in (1, 2, 3):
        assert blocks.admit(seq_id, 4, NO_HIT)
    blocks.free(2)
    assert blocks.admit(4, 8, NO_HIT)
    assert not blocks.admit(5, 9, NO_HIT)
    assert not blocks.allocate(4, 8, 17)
    assert (len(blocks.table(4)), blocks.num_free) == (2, 2)
    blocks.check_integrity()
    assert blocks.allocate(4, 8, 16)


def test_a_sequence_without_blocks_cannot_grow() -> None:
    blocks = manager(2)
    assert blocks.admit(1, 1, NO_HIT)
    blocks.free(1)
    for seq_id in (1, 99):
        with pytest.raises(UnknownSequenceError, match=str(seq_id)):
            blocks.allocate(seq_id, 1, 2)


@pytest.mark.parametrize(
    ("tokens", "num_hit"),
    [
        (range(12), 8),
        (range(13), 12),
        ([*range(4), 99, 99, 99, 99, *range(8, 12), 0], 4),
        ([99, *range(1, 12)], 0),
    ],
)
def test_block_hits_end_at_a_miss_or_one_token_short(tokens: Iterable[int], num_hit: int) -> None:
    blocks = manager(16, enable_partial_hits=False)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(tokens)) == num_hit


def test_a_hit_protects_contents_from_the_next_eviction() -> None:
    blocks = manager(3)
    old, young = list(range(4)), list(range(100, 104))
    for seq_id, tokens in enumerate((old, young)):
        run(blocks, seq_id, tokens)
        blocks.free(seq_id)
    run(blocks, 2, [*old, 50])
    blocks.free(2)
    assert blocks.admit(3, 8, NO_HIT)
    assert find(blocks, [*old, 51]).num_tokens == 4
    assert find(blocks, [*young, 51]).num_tokens == 0
    assert not blocks.admit(4, 8, NO_HIT)
    blocks.check_integrity()


def test_blocks_are_shared_while_their_sequence_still_runs() -> None:
    blocks = manager(16)
    run(blocks, 1, list(range(9)))
    run(blocks, 2, [*range(8), 50])
    assert list(blocks.table(1)[:2]) == list(blocks.table(2)[:2])
    assert blocks.table(1)[2] != blocks.table(2)[2]
    assert blocks.num_free == 16 - 4
    assert blocks.num_shared_tokens(1) == blocks.num_shared_tokens(2) == 8
    blocks.free(2)
    assert (blocks.num_shared_tokens(1), blocks.num_free) == (0, 16 - 3)


def test_equal_prompts_in_one_step_share_nothing_and_outlive_each_other() -> None:
    blocks = manager(3)
    chain = hashes_of([1, 2, 3, 4])
    for seq_id in (1, 2):
        assert blocks.admit(seq_id, 4, NO_HIT)
    for seq_id in (1, 2):
        blocks.seal(seq_id, chain, 1)
    second = blocks.table(2)[0]
    assert second != blocks.table(1)[0]
    blocks.free(1)
    assert blocks.admit(3, 8, NO_HIT)
    blocks.check_integrity()
    assert blocks.num_evictions == 1
    assert find(blocks, [1, 2, 3, 4, 5]).blocks == (second,)


def test_a_tail_behind_a_collision_is_not_stored_in_another_block() -> None:
    blocks = manager(6)
    first = BlockHash(b"d", b"", (1, 1, 1, 1))
    second = BlockHash(b"d", b"d", (2, 2, 2, 2))
    assert blocks.admit(1, 10, NO_HIT)
    blocks.seal(1, [first, second], 2)
    blocks.free(1, PartialBlock(2, b"d", (3, 3)))
    blocks.check_integrity()
    hit = blocks.match([first], [1, 1, 1, 1, 3, 3, 3])
    assert hit.num_tokens == 4
    assert hit.partial_block is None


def test_reset_forgets_contents_only_when_nothing_runs() -> None:
    blocks = manager(4)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    assert not blocks.reset_prefix_cache()
    assert find(blocks, tokens).num_tokens == 4
    end(blocks, 1, tokens)
    assert blocks.reset_prefix_cache()
    blocks.check_integrity()
    assert find(blocks, tokens) == NO_HIT
    assert blocks.num_free == 4


def test_an_eviction_is_reported_once() -> None:
    blocks = manager(4, record_evictions=True)
    chain = hashes_of([*range(8)])
    assert blocks.admit(1, 8, NO_HIT, tenant="x")
    blocks.seal(1, chain, 2)
    assert blocks.admit(2, 4, NO_HIT, tenant="y")
    blocks.seal(2, chain, 1)
    for seq_id in (1, 2):
        blocks.free(seq_id)
    assert blocks.admit(3, 12, NO_HIT, tenant="z")
    evicted = blocks.take_evicted()
    assert [(one.content, one.tenant) for one in evicted] == [(chain[1], "x")]
    assert blocks.take_evicted() == []
    blocks.free(3)
    assert blocks.admit(4, 16, NO_HIT)
    blocks.free(4)
    assert blocks.reset_prefix_cache()
    assert blocks.take_evicted() == []


def test_caching_can_be_off() -> None:
    blocks = manager(4, enable_prefix_caching=False)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert find(blocks, tokens) == NO_HIT
    assert blocks.cached_blocks() == []


def test_a_corrupt_sequence_takes_its_own_hits_with_it() -> None:
    blocks = manager(8, record_events=True)
    run(blocks, 1, list(range(5)))
    run(blocks, 2, [*range(8), 50])
    blocks.take_events()
    blocks.free(2, tail_of([*range(8), 50]), forget=True)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).num_tokens == 4
    assert blocks.take_events() == [BlockRemoved(hashes_of(list(range(8)))[1].digest)]


def test_events_report_the_evictions_of_a_step_before_its_blocks() -> None:
    blocks = manager(3, record_events=True)
    old, new = hashes_of(list(range(8))), hashes_of(list(range(100, 112)))
    run(blocks, 1, list(range(8)))
    blocks.free(1)
    assert blocks.admit(2, 12, NO_HIT)
    blocks.seal(2, new, 1)
    blocks.seal(2, new, 3)
    expected: list[CacheEvent] = [
        BlocksStored((old[0], old[1]), None),
        BlockRemoved(old[1].digest),
        BlockRemoved(old[0].digest),
        BlocksStored((new[0],), None),
        BlocksStored((new[1], new[2]), new[0].digest),
    ]
    assert blocks.take_events() == expected
    assert blocks.take_events() == []
    blocks.free(2)
    assert blocks.reset_prefix_cache()
    assert blocks.take_events() == [CacheCleared()]


def test_the_dump_lists_parents_before_children_and_copies_twice() -> None:
    blocks = manager(8)
    tokens, chain = list(range(8)), hashes_of(list(range(8)), "s")
    for seq_id in (1, 2):
        assert blocks.admit(seq_id, 10, NO_HIT)
        blocks.seal(seq_id, chain, 2)
    dump = blocks.cached_blocks()
    assert [(b.block_hash, b.parent, b.cache_salt) for b in dump] == [
        (chain[0].digest, None, "s"),
        (chain[0].digest, None, "s"),
        (chain[1].digest, chain[0].digest, None),
        (chain[1].digest, chain[0].digest, None),
    ]
    assert [b.token_ids for b in dump[1:3]] == [tokens[:4], tokens[4:]]


def test_integrity_check_notices_a_broken_invariant() -> None:
    blocks = manager(4)
    run(blocks, 1, list(range(9)))
    blocks._references[blocks.table(1)[0]] += 1
    with pytest.raises(IntegrityError):
        blocks.check_integrity()


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(12, 11), (13, 12)])
def test_partial_hits_re_run_one_token_only(num_tokens: int, num_hit: int) -> None:
    blocks = manager(16)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(range(num_tokens))) == num_hit


def test_a_hit_ends_inside_a_block_of_a_running_sequence() -> None:
    blocks = manager(16)
    run(blocks, 1, [*range(7), 50])
    hit = find(blocks, [*range(7), 60, 61])
    first, second = blocks.table(1)
    assert hit == PrefixHit((first,), 7, second)
    assert blocks.admit(2, 9, hit)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)


def test_the_longest_beginning_wins() -> None:
    """The continuation of a block with the most tokens in common is copied."""
    blocks = manager(16)
    run(blocks, 1, [0, 1, 2, 3, 4, 9, 9, 9])
    run(blocks, 2, [0, 1, 2, 3, 4, 5, 6, 9])
    run(blocks, 3, [0, 1, 2, 3, 4, 5, 9, 9])
    hit = find(blocks, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (hit.num_tokens, hit.partial_block) == (7, blocks.table(2)[1])


def test_an_idle_tail_is_a_hit_until_it_is_taken() -> None:
    blocks = manager(8)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    first, tail = blocks.table(1)
    end(blocks, 1, tokens)
    assert find(blocks, [*tokens, 7, 8]) == PrefixHit((first,), 6, tail)
    assert blocks.admit(2, 8 * SIZE, NO_HIT)
    assert find(blocks, [*tokens, 7, 8]) == NO_HIT
    blocks.check_integrity()


def test_a_tail_of_a_first_block_is_a_hit_once_the_root_is_known() -> None:
    blocks = manager(8)
    run(blocks, 1, list(range(100, 104)))
    assert blocks.admit(2, 3, NO_HIT)
    blocks.free(2, tail_of([1, 2, 3], "salt"))
    blocks.check_integrity()
    assert find(blocks, [1, 2, 3, 4], "salt").num_tokens == 3
    assert find(blocks, [1, 2, 3, 4]).num_tokens == 0
    assert find(blocks, [1, 2, 3, 4], "pepper").num_tokens == 0


def test_a_tail_that_does_not_follow_the_sealed_blocks_is_ignored() -> None:
    blocks = manager(8)
    run(blocks, 1, list(range(4)))
    assert blocks.admit(2, 6, NO_HIT)
    blocks.free(2, tail_of([*range(4), 50, 51]))
    blocks.check_integrity()
    assert find(blocks, [*range(4), 50, 51]).partial_block is None


def test_a_tail_that_another_block_contains_is_not_stored() -> None:
    blocks = manager(16)
    run(blocks, 1, list(range(4)))
    for seq_id, length in enumerate((6, 6, 7, 5), start=2):
        tokens = list(range(length))
        run(blocks, seq_id, tokens)
        end(blocks, seq_id, tokens)
    blocks.free(1)
    assert blocks.admit(9, 14 * SIZE, NO_HIT)
    assert blocks.num_evictions == 0
    assert find(blocks, list(range(9))).num_tokens == 7
    blocks.free(9)
    run(blocks, 10, list(range(8)))
    blocks.free(10)
    assert blocks.admit(11, 14 * SIZE, NO_HIT)
    assert blocks.num_evictions == 0
    blocks.check_integrity()


def test_partial_hits_can_be_off() -> None:
    blocks = manager(8, enable_partial_hits=False)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert find(blocks, [*tokens, 6, 7]).num_tokens == 4


def test_a_copied_block_may_be_taken_in_the_same_step() -> None:
    """A source need not outlive its copy: it may even be the block that is copied to."""
    blocks = manager(2)
    tokens = list(range(7))
    run(blocks, 1, tokens)
    first, tail = blocks.table(1)
    end(blocks, 1, tokens)
    hit = find(blocks, [*range(6), 60])
    assert hit == PrefixHit((first,), 6, tail)
    assert blocks.admit(2, 7, hit)
    assert blocks.table(2) == [first, tail]
    assert blocks.take_copies() == ()
    blocks.check_integrity()


def test_a_copy_of_a_block_yet_to_be_copied_to_reads_the_first_source() -> None:
    """All sources are read before any destination is written, so copies never form a chain."""
    blocks = manager(8)
    run(blocks, 1, [*range(7), 50])
    source = blocks.table(1)[1]
    assert blocks.admit(2, 9, find(blocks, [*range(7), 60, 61]))
    blocks.fork(2, 3, 7)
    assert blocks.allocate(3, 7, 8)
    assert blocks.take_copies() == ((source, blocks.table(2)[1]), (source, blocks.table(3)[1]))
    blocks.check_integrity()


def test_a_destination_freed_in_the_same_step_is_not_copied_to() -> None:
    blocks = manager(4)
    run(blocks, 1, [*range(7), 50])
    tokens = [*range(7), 60, 61]
    assert blocks.admit(2, 7, find(blocks, tokens[:8]))
    destination = blocks.table(2)[1]
    blocks.free(2, tail_of(tokens[:7]))
    assert blocks.take_copies() == ()
    blocks.check_integrity()
    assert blocks.admit(3, 4, NO_HIT)
    assert blocks.table(3) == [destination]
    assert blocks.num_evictions == 0


def test_a_fork_from_inside_a_sealed_block_never_writes_into_it() -> None:
    blocks = manager(8)
    run(blocks, 1, list(range(8)))
    first, second = blocks.table(1)
    blocks.fork(1, 2, 6)
    blocks.free(1)
    assert blocks.allocate(2, 6, 8)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).blocks == (first, second)


def test_a_tail_that_only_one_sequence_holds_is_not_copied() -> None:
    """The first of two holders to write gets the copy; the other one writes in place."""
    blocks = manager(8)
    run(blocks, 1, list(range(6)))
    for child_id in (2, 3):
        blocks.fork(1, child_id, 6)
    blocks.free(1)
    tail = blocks.table(3)[1]
    assert blocks.allocate(2, 6, 9)
    assert blocks.take_copies() == ((tail, blocks.table(2)[1]),)
    assert blocks.allocate(3, 6, 9)
    assert blocks.take_copies() == ()
    assert blocks.table(3)[1] == tail


pytestmark = pytest.mark.timeout(900)  # a minute of walks, on a core that others may use
SCRIPT = Path(__file__).parents[4] / "benchmarks" / "kv_trace.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_trace", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_published_figures_are_reproduced(bench: ModuleType) -> None:
    shared, unshared = (
        bench.run(bench.THEIRS, name, asks)
        for name, asks in zip(("shared", "no sharing"), bench.traces(), strict=True)
    )
    assert (shared.allocations, shared.hit_tokens, shared.steps) == (1643, 299 * 64, 1049)
    assert f"{shared.hit_rate:.3%}" == "69.885%"
    assert f"{shared.utilisation:.3%}" == "12.854%"
    assert f"{shared.fragmentation:.2%}" == "5.69%"
    assert (unshared.allocations, unshared.hit_tokens, unshared.steps) == (2070, 0, 1085)
    assert f"{unshared.utilisation:.3%}" == "16.110%"
    assert f"{unshared.fragmentation:.2%}" == "8.50%"
    assert shared.evictions == unshared.evictions == 0
    assert f"{1 - shared.allocations / unshared.allocations:.1%}" == "20.6%"


def test_our_policy_needs_fewer_blocks_and_hits_as_much_or_more(bench: ModuleType) -> None:
    """No slot for an unread token saves blocks; a hit may end inside a block."""
    theirs, ours = (
        bench.run(policy, "shared", bench.traces()[0]) for policy in (bench.THEIRS, bench.OURS)
    )
    assert ours.allocations < theirs.allocations
    assert ours.hit_tokens >= theirs.hit_tokens
    assert ours.steps == theirs.steps


# Random walks over every operation, against a KV store that really stores. It executes steps as an
# executor does: it reads the sources of all copies, then writes their destinations, then the
# planned tokens, where the tables said when the step was launched. What it stores for a token is
# everything that its KV depends on. A step is in flight while the next is planned, and sequences
# are freed in every state: planned, in flight, with a copy due, forked, idle.

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
        self.copies: dict[int, BlockTable] = {}

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
            table = self.copied(seq_id)
            step.writes += [
                (table[p // SIZE], p % SIZE, walker.kv(p))
                for p in range(walker.launched, walker.planned)
            ]
            walker.launched = step.ends[seq_id] = walker.planned
        self.in_flight = step

    def copied(self, seq_id: int) -> BlockTable:
        """Copy a table, which says what is left of the copy before."""
        table, before = self.blocks.table_copy(seq_id), self.copies.get(seq_id, BlockTable())
        assert table == tuple(self.blocks.table(seq_id))
        if seq_id in self.copies and table is not before:
            assert table.before is before
            assert before.before is None
            assert table[: table.num_same] == before[: table.num_same]
            assert table.num_same <= min(len(table), len(before))
        self.copies[seq_id] = table
        return table

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
        for seq_id, length in step.ends.items():
            if seq_id in self.walkers:
                walker = self.walkers[seq_id]
                walker.computed = length
                if length:
                    self.written = [*self.written[-5:], (walker.tokens[:length], walker.salt)]
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
