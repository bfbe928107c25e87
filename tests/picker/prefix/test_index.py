"""The prefix index agrees with a slow twin whatever happens to it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.prefix.block_hash import BlockHashes, block_hashes
from picker.prefix.index import PrefixIndex
from tests.depth import examples
from tests.support.picker.reference_prefix_index import ReferenceIndex

KEYS = [f"default/w{i}" for i in range(5)]
LONG = 40  # blocks that short prompts repeat, to have long ones


def chain(blocks: list[int], repeat: int = 1) -> BlockHashes:
    """The chained hashes of a prompt; each block comes `repeat` times."""
    return block_hashes(bytes(block for block in blocks for _ in range(4 * repeat)), 0, 1)


def array(*hashes: int) -> BlockHashes:
    return np.array(hashes, np.uint64)


class IndexModel(RuleBasedStateMachine):
    """Compares the index with its twin. Long prompts take the array paths."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.twin = ReferenceIndex()

    prompts = st.builds(
        chain, st.lists(st.integers(0, 2), min_size=0, max_size=6), st.sampled_from([1, LONG])
    )

    @rule(key=st.sampled_from(KEYS), prompt=prompts, capacity=st.sampled_from([1, 3, 8, 50, 300]))
    def record(self, key: str, prompt: BlockHashes, capacity: int) -> None:
        """An endpoint is sent a prompt; its capacity may have changed."""
        self.index.record(key, prompt, capacity)
        self.twin.record(key, prompt.tolist(), capacity)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        self.index.remove(key)
        self.twin.remove(key)

    @rule(prompt=prompts)
    def match(self, prompt: BlockHashes) -> None:
        assert self.index.match(prompt) == self.twin.match(prompt.tolist())

    @invariant()
    def sound(self) -> None:
        """The parts agree, and so do the sizes."""
        self.index.check_integrity()
        self.twin.check_integrity()
        assert len(self.index) == self.twin.entries


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = examples(60, stateful_step_count=30)


@pytest.mark.parametrize(("endpoints", "blocks", "capacity"), [(3, 60, 5000), (120, 30, 400)])
def test_a_long_walk_agrees_with_the_twin(endpoints: int, blocks: int, capacity: int) -> None:
    """Thousands of prompts with shared beginnings: growth, eviction, endpoints that come and go."""
    rng = Random(blocks)
    index, twin = PrefixIndex(), ReferenceIndex()
    known: list[bytes] = [b""]
    for step in range(1500):
        start = rng.choice(known)
        prompt = start[: rng.randrange(len(start) + 1) & ~3] + rng.randbytes(
            4 * rng.randrange(blocks)
        )
        known = [*known[-30:], prompt]
        hashes = block_hashes(prompt, 7, 1)
        assert index.match(hashes) == twin.match(hashes.tolist())
        key = f"w{rng.randrange(endpoints)}"
        index.record(key, hashes, capacity)
        twin.record(key, hashes.tolist(), capacity)
        if rng.random() < 0.01:
            index.remove(key)
            twin.remove(key)
        if step % 100 == 0:
            index.check_integrity()
            assert len(index) == twin.entries
            for key, holder in index._holders.items():
                assert holder.size == len(twin.held(key))


def test_runs_of_many_endpoints_are_found_by_halving() -> None:
    """More different runs than are tried out, over more pairs than are looked up at once."""
    index, twin = PrefixIndex(), ReferenceIndex()
    rng = Random(4)
    prompt = block_hashes(rng.randbytes(4 * 500), 0, 1)
    for endpoint in range(40):
        length = rng.randrange(len(prompt) + 1)
        index.record(f"w{endpoint}", prompt[:length], 1000)
        twin.record(f"w{endpoint}", prompt[:length].tolist(), 1000)
    assert index.match(prompt) == twin.match(prompt.tolist())
    assert len(set(index.match(prompt).values())) > 20


def test_thousands_of_endpoints_come_and_go_at_once() -> None:
    """Each is known by its own blocks, also where another has left its nodes; none leaves any."""
    index = PrefixIndex()
    for generation in range(3):
        for endpoint in range(5000):
            index.record(f"w{endpoint}", array(7, 1000 * generation + endpoint), 2)
        found = index.match(array(7, 1000 * generation + 3))
        assert len(found) == 5000
        assert [key for key, run in found.items() if run == 2] == ["w3"]
        for endpoint in range(0, 5000, 2 - generation % 2):
            index.remove(f"w{endpoint}")
        index.check_integrity()
        assert len(index.match(array(7))) == (0 if generation == 1 else 2500)
    for endpoint in range(5000):
        index.remove(f"w{endpoint}")
    assert len(index) == 0
    index.check_integrity()


@pytest.mark.parametrize("length", [3, 100])
def test_the_tail_of_a_prompt_is_evicted_before_its_beginning(length: int) -> None:
    """A shared beginning outlives private endings."""
    index = PrefixIndex()
    prompt = chain(list(range(length)))
    index.record("a", prompt, length)
    index.record("a", array(7), length)
    assert index.match(prompt) == {"a": length - 1}


def test_of_a_prompt_beyond_the_capacity_the_beginning_is_kept() -> None:
    """What an engine would have to drop first is not remembered."""
    index = PrefixIndex()
    prompt = chain(list(range(100)))
    index.record("a", prompt, 30)
    assert index.match(prompt) == {"a": 30}
    assert len(index) == 30


def test_the_least_recently_used_prompt_goes_first() -> None:
    """With room for two prompts of one block, the third evicts the first."""
    index = PrefixIndex()
    for block in (1, 2, 3):
        index.record("a", array(block), 2)
    assert index.match(array(1)) == {}
    assert index.match(array(2)) == {"a": 1}
    assert index.match(array(3)) == {"a": 1}


def test_a_smaller_capacity_evicts_at_the_next_prompt() -> None:
    """An engine came back with less memory."""
    index = PrefixIndex()
    index.record("a", chain(list(range(200))), 500)
    index.record("a", array(5), 10)
    assert len(index) == 10


def test_an_endpoint_that_comes_back_inherits_nothing() -> None:
    """Neither its own knowledge nor that of another."""
    index = PrefixIndex()
    index.record("old", chain([1, 2]), 10)
    index.remove("old")
    index.remove("never there")
    index.record("new", array(5), 10)
    index.record("old", array(6), 10)
    assert index.match(chain([1, 2])) == {}
    assert index.match(array(5)) == {"new": 1}
    assert len(index) == 2


@pytest.mark.parametrize("length", [4, 60])
def test_hashes_that_collide_within_a_prompt_do_no_harm(length: int) -> None:
    """Equal hashes at two places are one block."""
    index = PrefixIndex()
    prompt = np.concatenate((chain(list(range(length))),) * 2)
    index.record("a", prompt, 1000)
    index.record("a", prompt, 1000)
    index.check_integrity()
    assert len(index) == length


def test_prompts_that_are_no_chains_do_no_harm() -> None:
    """Blocks in an order they never had before: the lists stay whole."""
    rng = Random(9)
    index = PrefixIndex()
    blocks = block_hashes(rng.randbytes(4 * 200), 0, 1)
    for _ in range(60):
        index.record("a", blocks[rng.sample(range(200), 50)], 120)
        index.check_integrity()
    assert len(index) == 120


def test_an_empty_prompt_is_nothing() -> None:
    index = PrefixIndex()
    index.record("a", array(), 10)
    assert len(index) == 0
    assert index.match(array()) == {}
    assert index.match(array(1)) == {}


def test_a_pair_takes_at_most_64_bytes() -> None:
    """Right after growth, when memory is emptiest; prompts of one block are no exception."""
    import tracemalloc

    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 2**63, 40, np.uint64) for _ in range(1500)]
    worst = 0.0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex()
        for number, prompt in enumerate(prompts):
            index.record("a" if number % 2 else "b", prompt, 100_000)
            if len(index) > 10_000:
                used = tracemalloc.get_traced_memory()[0] - before
                worst = max(worst, used / len(index))
    finally:
        tracemalloc.stop()
    assert len(index) == 60_000
    assert 24 < worst <= 64
