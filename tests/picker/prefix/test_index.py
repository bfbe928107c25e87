"""The prefix index agrees with a simple reference implementation."""

import tracemalloc
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.prefix.block_hash import BYTES_PER_HASH, BlockHashes, block_hashes, packed, unpacked
from picker.prefix.index import Addition, PrefixIndex
from tests.depth import by_depth, examples
from tests.support.picker.reference_prefix_index import ReferenceIndex

KEYS = [f"default/w{i}" for i in range(5)]
LONG = 40  # repetitions of each block that turn short prompts into long ones


def chain(blocks: list[int], repeat: int = 1) -> BlockHashes:
    return block_hashes(bytes(block for block in blocks for _ in range(4 * repeat)), 0, 1)


def array(*hashes: int) -> BlockHashes:
    return packed(list(hashes))


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


class IndexModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.twin = ReferenceIndex()
        self.open: list[tuple[Addition, int]] = []

    prompts = st.builds(
        chain, st.lists(st.integers(0, 2), min_size=0, max_size=6), st.sampled_from([1, LONG])
    )

    @rule(
        key=st.sampled_from(KEYS),
        prompt=prompts,
        capacity=st.sampled_from([1, 3, 8, 50, 300]),
        stays_open=st.booleans(),
    )
    def record(self, key: str, prompt: BlockHashes, capacity: int, stays_open: bool) -> None:
        addition = Addition(key)
        self.index.record(key, prompt, capacity, addition if stays_open else None)
        record = self.twin.record(key, unpacked(prompt), capacity)
        if stays_open:
            self.open.append((addition, record))
        else:
            self.twin.confirm(record)

    @rule(random=st.randoms(), is_read=st.booleans())
    def settle(self, random: Random, is_read: bool) -> None:
        if self.open:
            addition, record = self.open.pop(random.randrange(len(self.open)))
            (self.index.confirm if is_read else self.index.withdraw)(addition)
            (self.twin.confirm if is_read else self.twin.withdraw)(record)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        self.index.remove(key)
        self.twin.remove(key)

    @rule(prompt=prompts)
    def match(self, prompt: BlockHashes) -> None:
        assert self.index.match(prompt) == self.twin.match(unpacked(prompt))

    @invariant()
    def sound(self) -> None:
        self.index.check_integrity()
        self.twin.check_integrity()
        assert len(self.index) == self.twin.entries


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = examples(60, stateful_step_count=30)


@pytest.mark.parametrize(("endpoints", "blocks", "capacity"), [(3, 60, 5000), (120, 30, 400)])
def test_a_long_random_walk_agrees_with_the_reference(
    endpoints: int, blocks: int, capacity: int
) -> None:
    rng = Random(blocks)
    index, twin = PrefixIndex(), ReferenceIndex()
    known: list[bytes] = [b""]
    open_records: list[tuple[Addition, int]] = []
    for step in range(1500):
        start = rng.choice(known)
        prompt = start[: rng.randrange(len(start) + 1) & ~3] + rng.randbytes(
            4 * rng.randrange(blocks)
        )
        known = [*known[-30:], prompt]
        hashes = block_hashes(prompt, 7, 1)
        assert index.match(hashes) == twin.match(unpacked(hashes))
        key = f"w{rng.randrange(endpoints)}"
        addition = Addition(key)
        index.record(key, hashes, capacity, addition)
        open_records.append((addition, twin.record(key, unpacked(hashes), capacity)))
        if len(open_records) > 8:
            own, record = open_records.pop(rng.randrange(8))
            is_read = rng.random() < 0.7
            (index.confirm if is_read else index.withdraw)(own)
            (twin.confirm if is_read else twin.withdraw)(record)
        if rng.random() < 0.01:
            index.remove(key)
            twin.remove(key)
        if step % 100 == 0:
            index.check_integrity()
            assert len(index) == twin.entries


def test_runs_of_many_lengths_are_found() -> None:
    index, twin = PrefixIndex(), ReferenceIndex()
    rng = Random(4)
    prompt = block_hashes(rng.randbytes(4 * 500), 0, 1)
    for endpoint in range(40):
        length = rng.randrange(501)
        index.record(f"w{endpoint}", prompt[: length * BYTES_PER_HASH], 1000)
        twin.record(f"w{endpoint}", unpacked(prompt)[:length], 1000)
    assert index.match(prompt) == twin.match(unpacked(prompt))
    assert len(set(index.match(prompt).values())) > 20


def test_thousands_of_endpoints_may_arrive_and_leave_at_once(index: PrefixIndex) -> None:
    count = by_depth(2000, 5000)
    for generation in range(3):
        for endpoint in range(count):
            index.record(f"w{endpoint}", array(7, 1000 * generation + endpoint), 2)
        found = index.match(array(7, 1000 * generation + 3))
        assert len(found) == count
        assert [key for key, run in found.items() if run == 2] == ["w3"]
        for endpoint in range(0, count, 2 - generation % 2):
            index.remove(f"w{endpoint}")
        index.check_integrity()
        assert len(index.match(array(7))) == (0 if generation == 1 else count // 2)
    for endpoint in range(count):
        index.remove(f"w{endpoint}")
    assert len(index) == 0
    index.check_integrity()


@pytest.mark.parametrize("length", [3, 100])
def test_the_tail_of_a_prompt_is_evicted_before_its_beginning(
    index: PrefixIndex, length: int
) -> None:
    prompt = chain(list(range(length)))
    index.record("a", prompt, length)
    index.record("a", array(7), length)
    assert index.match(prompt) == {"a": length - 1}


def test_only_the_beginning_of_a_prompt_beyond_the_capacity_is_stored(index: PrefixIndex) -> None:
    """An engine would evict the rest first."""
    prompt = chain(list(range(100)))
    index.record("a", prompt, 30)
    assert index.match(prompt) == {"a": 30}
    assert len(index) == 30


def test_the_least_recently_used_prompt_is_evicted_first(index: PrefixIndex) -> None:
    for block in (1, 2, 3):
        index.record("a", array(block), 2)
    assert index.match(array(1)) == {}
    assert index.match(array(2)) == {"a": 1}
    assert index.match(array(3)) == {"a": 1}


def test_a_smaller_capacity_evicts_at_the_next_prompt(index: PrefixIndex) -> None:
    """An example is a restart with less memory."""
    index.record("a", chain(list(range(200))), 500)
    index.record("a", array(5), 10)
    assert len(index) == 10


def test_an_endpoint_that_returns_inherits_no_blocks(index: PrefixIndex) -> None:
    index.record("old", chain([1, 2]), 10)
    index.remove("old")
    index.remove("never there")
    index.record("new", array(5), 10)
    index.record("old", array(6), 10)
    assert index.match(chain([1, 2])) == {}
    assert index.match(array(5)) == {"new": 1}
    assert len(index) == 2


def test_hashes_that_are_no_chain_leave_the_index_intact() -> None:
    """A peer may send any; colliding hashes look the same."""
    rng = Random(9)
    index = PrefixIndex()
    for step in range(3000):
        blocks = [rng.randrange(12) << rng.choice((0, 40)) for _ in range(rng.randrange(20))]
        addition = Addition(rng.choice(KEYS))
        index.record(addition.key, packed(blocks), 30, addition)
        index.match(packed(blocks))
        (index.confirm if step % 3 else index.withdraw)(addition)
        if step % 50 == 0:
            index.remove(rng.choice(KEYS))
        index.check_integrity()
    assert 0 < len(index) <= 150


def test_a_withdrawn_prompt_leaves_what_others_recorded() -> None:
    index, failed = PrefixIndex(), Addition("a")
    index.record("a", chain([1, 1, 1]), 100)
    index.record("a", chain([1, 1, 1, 2, 2, 3]), 100, failed)
    index.record("a", chain([1, 1, 1, 2, 4]), 100)
    index.withdraw(failed)
    assert index.match(chain([1, 1, 1, 2, 2, 3])) == {"a": 4}
    assert len(index) == 5
    index.check_integrity()


def test_an_empty_prompt_matches_nothing(index: PrefixIndex) -> None:
    index.record("a", array(), 10)
    assert len(index) == 0
    assert index.match(array()) == {}
    assert index.match(array(1)) == {}


@pytest.mark.parametrize(("blocks", "limit"), [(1, 56), (4, 34), (40, 16)])
def test_a_pair_takes_little_memory(blocks: int, limit: int) -> None:
    """Prompts without anything in common are the worst case."""
    rng = Random(1)
    prompts = [
        packed([rng.getrandbits(64) for _ in range(blocks)]) for _ in range(24_000 // blocks)
    ]
    worst = 0.0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex()
        for number, prompt in enumerate(prompts):
            index.record("a" if number % 2 else "b", prompt, 100_000)
            if len(index) > 10_000 and number % 50 == 0:
                used = tracemalloc.get_traced_memory()[0] - before
                worst = max(worst, used / len(index))
    finally:
        tracemalloc.stop()
    assert len(index) == 24_000
    assert 8 < worst <= limit


def test_later_records_free_what_an_endpoint_that_left_held(index: PrefixIndex) -> None:
    rng = Random(2)
    used = []
    tracemalloc.start()
    try:
        for generation in range(6):
            for _ in range(2_000):
                index.record(f"w{generation}", packed([rng.getrandbits(64)]), 2_000)
            assert len(index) == 2_000
            index.remove(f"w{generation}")
            assert len(index) == 0
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    index.check_integrity()
    assert used[-1] < 1.2 * used[1]


def test_an_endpoint_that_returns_holds_nothing_from_before(index: PrefixIndex) -> None:
    for number in range(50):
        index.record("w", array(number, 1_000 + number), 200)
    addition = Addition("w")
    index.record("w", array(100, 101), 200, addition)
    index.remove("w")
    index.record("w", array(7, 8), 200)
    assert index.match(array(7, 1_007)) == {"w": 1}
    assert index.match(array(100, 101)) == {}
    index.withdraw(addition)
    index.check_integrity()
    assert len(index) == 2
