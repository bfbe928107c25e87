"""The precise index lists the blocks that engines report, by tier, until they remove them."""

from collections import Counter
from itertools import takewhile
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.prefix.block_keys import BlockKeys
from picker.prefix.kv_event_codec import BlocksRemoved, BlocksStored, CacheCleared
from picker.prefix.precise_index import PreciseIndex, PreciseMatch, _whole
from tests.depth import examples

MAKER = BlockKeys(4)
WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
NOTHING = PreciseMatch(0.0, 0, {})


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


def stored(
    first_hash: int, *ids: int, parent: int | None = None, size: int = 4, **fields: Any
) -> BlocksStored:
    count = len(ids) // size
    hashes = tuple(range(first_hash, first_hash + count))
    return BlocksStored(hashes, parent, tokens(*ids), size, **fields)


class Scene:
    def __init__(self, max_keys: int = 1000) -> None:
        self.index = PreciseIndex(MAKER, WEIGHTS, max_keys)

    def say(self, endpoint: str, *events: Any) -> None:
        for event in events:
            self.index.apply(endpoint, "m", event)
            self.index.check_integrity()

    def find(self, *ids: int, now: float = 0.0, model: str = "m") -> dict[str, PreciseMatch]:
        return self.index.match(MAKER.prompt(model, tokens(*ids)), now)

    def blocks(self, *ids: int, now: float = 0.0) -> dict[str, int]:
        return {name: match.blocks for name, match in self.find(*ids, now=now).items()}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_stored_blocks_match_until_their_removal(scene: Scene) -> None:
    scene.say("a", stored(1, *range(8)))
    scene.say("b", stored(1, *range(4)))
    scene.say("a", stored(3, *range(8, 12), parent=2))
    assert scene.blocks(*range(12)) == {"a": 3, "b": 1}
    assert scene.blocks(*range(4), 9, 9, 9, 9) == {"a": 1, "b": 1}
    assert scene.blocks(9, 9, 9, 9) == {}
    scene.say("a", BlocksRemoved((2,)))
    assert scene.blocks(*range(12)) == {"a": 1, "b": 1}
    scene.say("b", CacheCleared())
    assert scene.blocks(*range(12)) == {"a": 1}


def test_a_block_in_two_tiers_counts_with_the_better_one(scene: Scene) -> None:
    scene.say("a", stored(1, *range(8)), BlocksStored((1,), None, b"", 4, "cpu"))
    scene.say("b", stored(1, *range(8), tier="cpu"))
    scene.say("c", stored(1, *range(4), tier="disk"))
    assert scene.find(*range(8)) == {
        "a": PreciseMatch(2.0, 2, {"gpu": 2, "cpu": 1}),
        "b": PreciseMatch(1.6, 2, {"cpu": 2}),
        "c": PreciseMatch(1.0, 1, {"disk": 1}),
    }
    scene.say("a", BlocksRemoved((1,), "gpu"))
    assert scene.find(*range(8))["a"] == PreciseMatch(1.8, 2, {"gpu": 1, "cpu": 1})


def test_a_block_stored_twice_must_be_removed_twice(scene: Scene) -> None:
    """An engine may cache equal contents twice."""
    scene.say("a", stored(1, *range(4)), stored(1, *range(4)), BlocksRemoved((1,)))
    assert scene.blocks(*range(4)) == {"a": 1}
    scene.say("a", BlocksRemoved((1,)))
    assert scene.blocks(*range(4)) == {}
    assert len(scene.index) == 0


def test_adapters_and_salts_share_nothing(scene: Scene) -> None:
    scene.say("a", stored(1, *range(4), adapter="ad"), stored(2, *range(4), extras=(("salt",),)))
    assert scene.blocks(*range(4)) == {}
    assert set(scene.find(*range(4), model="ad")) == {"a"}
    salted = MAKER.prompt("m", tokens(*range(4)), salt="salt")
    assert set(scene.index.match(salted, 0.0)) == {"a"}


def test_blocks_without_a_known_parent_are_dropped_and_counted(scene: Scene) -> None:
    scene.say("a", stored(5, *range(8), parent=99))
    assert scene.index.dropped_blocks == 2
    assert len(scene.index) == 0


@pytest.mark.parametrize(
    ("shared", "cpu", "disk"), [(3, 0, 0), (4, 4, 0), (7, 4, 0), (8, 8, 8), (11, 8, 8), (12, 12, 8)]
)
def test_only_whole_blocks_of_several_keys_match(
    scene: Scene, shared: int, cpu: int, disk: int
) -> None:
    """Chunks have 16 tokens in host memory and 32 on disk, keys have 4."""
    scene.say("a", stored(1, *range(48), size=16, tier="cpu"))
    scene.say("b", stored(1, *range(64), size=32, tier="disk"))
    matches = scene.find(*range(4 * shared), *range(900, 932))
    assert matches.get("a", NOTHING).blocks == cpu
    assert matches.get("a", NOTHING).score == pytest.approx(0.8 * cpu)
    assert matches.get("b", NOTHING).blocks == disk


def test_part_of_a_chunk_counts_if_another_tier_has_its_keys(scene: Scene) -> None:
    scene.say("a", stored(1, *range(16), size=16, tier="cpu"), stored(9, *range(8)))
    assert scene.find(*range(12))["a"] == PreciseMatch(2.0, 2, {"gpu": 2})
    assert scene.find(*range(16))["a"] == PreciseMatch(2 + 1.6, 4, {"gpu": 2, "cpu": 4})


@examples(200)
@given(
    st.lists(st.tuples(st.sets(st.sampled_from(["gpu", "cpu", "disk"])), st.integers(1, 9))),
    st.dictionaries(st.sampled_from(["cpu", "disk"]), st.integers(2, 5)),
)
def test_whole_blocks_agree_with_a_scan_of_every_key(
    runs: list[tuple[set[str], int]], spans: dict[str, int]
) -> None:
    held = [tiers for tiers, count in runs for _ in range(count)]
    expected: list[set[str]] = []
    for place, tiers in enumerate(held):
        begins = {tier: place // spans.get(tier, 1) * spans.get(tier, 1) for tier in tiers}
        blocks = {tier: held[begin:][: spans.get(tier, 1)] for tier, begin in begins.items()}
        expected.append(
            {
                tier
                for tier, block in blocks.items()
                if len(block) == spans.get(tier, 1) and all(tier in one for one in block)
            }
        )
    found = [tiers for tiers, count in _whole(runs, spans) for _ in range(count)]
    assert found == list(takewhile(bool, expected))


def test_a_block_of_two_cache_groups_matches_until_both_remove_it(scene: Scene) -> None:
    scene.say("a", stored(1, *range(4), group=0), stored(1, *range(4), group=1))
    scene.say("a", BlocksRemoved((1,), group=0))
    assert scene.blocks(*range(4)) == {"a": 1}
    scene.say("a", BlocksRemoved((1,), group=1))
    assert scene.blocks(*range(4)) == {}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("at_once", [True, False])
def test_engine_blocks_may_have_any_size(size: int, at_once: bool) -> None:
    ids = list(range(24))
    scene = Scene()
    if at_once:
        scene.say("a", stored(1, *ids, size=size))
    else:
        for i in range(24 // size):
            part = ids[i * size : (i + 1) * size]
            scene.say("a", stored(1 + i, *part, size=size, parent=i or None))
    assert scene.blocks(*ids) == {"a": 6}
    scene.say("a", BlocksRemoved((24 // size,)))
    assert scene.blocks(*ids) == {"a": (24 - size) // 4}
    scene.say("a", *(BlocksRemoved((i,)) for i in range(1, 25)))
    assert len(scene.index) == 0


def test_a_chain_within_a_key_ends_when_one_of_its_blocks_is_removed(scene: Scene) -> None:
    scene.say("a", stored(1, 0, 1, 2, size=1), BlocksRemoved((2,)))
    scene.say("a", stored(4, 3, parent=3, size=1))
    assert scene.blocks(*range(4)) == {}
    assert scene.index.dropped_blocks == 1


def test_extras_belong_to_every_key_that_their_block_overlaps(scene: Scene) -> None:
    scene.say("a", stored(1, *range(8), size=2, extras=((), ("x",), ("x",), ())))
    scene.say("b", stored(1, *range(8), size=8, extras=(("y",),)))
    root = MAKER.root("m")
    prompt = tokens(*range(8))
    assert set(scene.index.match(MAKER.chain(root, prompt, [("x",), ("x",)]), 0.0)) == {"a"}
    both = scene.index.match(MAKER.chain(root, prompt, [("y",), ("y",)]), 0.0)
    assert {name: match.blocks for name, match in both.items()} == {"b": 2}


def test_expected_blocks_match_for_a_limited_time(scene: Scene) -> None:
    keys = MAKER.prompt("m", tokens(*range(8)))
    scene.index.expect("a", keys, 10.0, 2.0)
    scene.index.expect("b", keys, 11.0, 2.0)
    scene.index.check_integrity()
    assert scene.find(*range(8), now=11.9) == {
        "a": PreciseMatch(2.0, 2, {"speculative": 2}),
        "b": PreciseMatch(2.0, 2, {"speculative": 2}),
    }
    scene.say("a", stored(1, *range(4)))
    assert scene.blocks(*range(8), now=12.0) == {"a": 1, "b": 2}
    scene.index.clear("b")
    scene.index.check_integrity()
    assert scene.blocks(*range(8), now=12.0) == {"a": 1}
    scene.index.expect("c", keys, 12.0, 2.0)
    assert scene.blocks(*range(8), now=14.0) == {"a": 1}
    scene.index.check_integrity()


def test_the_number_of_keys_is_bounded() -> None:
    scene = Scene(max_keys=2)
    scene.say("a", stored(1, *range(16)))
    assert scene.blocks(*range(16)) == {"a": 2}
    scene.say("a", BlocksRemoved((1, 2, 3, 4)))
    assert len(scene.index) == 0
    scene.say("a", stored(9, *range(50, 54)))
    assert scene.blocks(*range(50, 54)) == {"a": 1}


def test_the_number_of_chains_that_end_within_a_key_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("picker.prefix.precise_index._MAX_LOOSE", 2)
    scene = Scene()
    for block in (1, 2, 3):
        scene.say("a", stored(block, 10 * block, 10 * block + 1, size=2))
    for block in (1, 2, 3):
        scene.say("a", stored(10 + block, 10 * block + 2, 10 * block + 3, parent=block, size=2))
    chains = [range(10 * block, 10 * block + 4) for block in (1, 2, 3)]
    assert [scene.blocks(*chain) for chain in chains] == [{}, {"a": 1}, {"a": 1}]
    scene.say("b", stored(1, 10, 11, size=2), BlocksRemoved((1,)))
    assert not scene.index._engines["b"].loose


def test_a_block_stored_again_with_other_tokens_has_only_the_new_keys(scene: Scene) -> None:
    for first in range(0, 400, 4):
        scene.say("a", stored(1, *range(first, first + 4)))
    assert len(scene.index) == 1
    assert scene.blocks(*range(4)) == {}
    assert scene.blocks(*range(396, 400)) == {"a": 1}
    scene.say("a", *[BlocksRemoved((1,))] * 99)
    assert scene.blocks(*range(396, 400)) == {"a": 1}
    scene.say("a", BlocksRemoved((1,)))
    assert len(scene.index) == 0


def test_the_number_of_tiers_of_an_engine_is_bounded(scene: Scene) -> None:
    """Every lookup of a block tries all of them; further tiers are dropped and counted."""
    scene.say("a", *(stored(1, *range(4), tier=f"t{number}") for number in range(100)))
    assert len(scene.find(*range(4))["a"].tiers) == 64
    assert scene.index.dropped_blocks == 36


def test_a_key_has_the_distinct_extras_of_its_small_blocks(scene: Scene) -> None:
    texts = tuple((f"t{number % 3}", "salt") for number in range(4))
    scene.say("a", stored(1, 0, 1, size=1, extras=texts[:2]))
    scene.say("a", stored(3, 2, 3, parent=2, size=1, extras=texts[2:]))
    keys = MAKER.chain(MAKER.root("m"), tokens(0, 1, 2, 3), [("t0", "salt", "t1", "t2")])
    assert {name: match.blocks for name, match in scene.index.match(keys, 0.0).items()} == {"a": 1}


Prefix = tuple[int, ...]


class PreciseModel(RuleBasedStateMachine):
    endpoints = st.sampled_from(["a", "b", "c"])
    tiers = st.sampled_from(["gpu", "cpu"])
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.held: Counter[tuple[str, str, Prefix]] = Counter()

    @rule(endpoint=endpoints, tier=tiers, prompt=prompts, start=st.integers(0, 3))
    def store(self, endpoint: str, tier: str, prompt: Prefix, start: int) -> None:
        start = min(start, len(prompt) - 1)
        parent = prompt[:start]
        if parent and not any(self.held[endpoint, one, parent] for one in WEIGHTS):
            return
        prefixes = [prompt[:end] for end in range(start + 1, len(prompt) + 1)]
        ids = [token for prefix in prefixes for token in [prefix[-1]] * 4]
        self.scene.say(
            endpoint,
            BlocksStored(
                tuple(map(self._name, prefixes)),
                self._name(parent) if parent else None,
                tokens(*ids),
                4,
                tier,
            ),
        )
        self.held.update((endpoint, tier, prefix) for prefix in prefixes)

    @rule(endpoint=endpoints, tier=tiers, prompt=prompts)
    def remove(self, endpoint: str, tier: str, prompt: Prefix) -> None:
        self.scene.say(endpoint, BlocksRemoved((self._name(prompt),), tier))
        if self.held[endpoint, tier, prompt]:
            self.held[endpoint, tier, prompt] -= 1

    @rule(endpoint=endpoints)
    def clear(self, endpoint: str) -> None:
        self.scene.say(endpoint, CacheCleared())
        for held in list(self.held):
            if held[0] == endpoint:
                del self.held[held]

    @rule(prompt=prompts)
    def match(self, prompt: Prefix) -> None:
        ids = [token for block in prompt for token in [block] * 4]
        found = self.scene.find(*ids)
        for endpoint in ("a", "b", "c"):
            score, tally, blocks = 0.0, Counter[str](), 0
            for end in range(1, len(prompt) + 1):
                here = [tier for tier in WEIGHTS if self.held[endpoint, tier, prompt[:end]]]
                if not here:
                    break
                blocks += 1
                score += max(WEIGHTS[tier] for tier in here)
                tally.update(here)
            match = found.get(endpoint, PreciseMatch(0.0, 0, {}))
            assert (match.blocks, match.tiers) == (blocks, tally)
            assert match.score == pytest.approx(score)

    @invariant()
    def sized(self) -> None:
        assert len(self.scene.index) == len({held[2] for held in +self.held})

    @staticmethod
    def _name(prefix: Prefix) -> int:
        return int("1" + "".join(map(str, prefix)))


TestPreciseModel = PreciseModel.TestCase
TestPreciseModel.settings = examples(60, stateful_step_count=30)
