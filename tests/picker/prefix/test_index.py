"""The prefix index agrees with a slow twin whatever happens to it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.prefix.index import PrefixIndex

KEYS = [f"default/w{i}" for i in range(5)]
# Chains as real prompts make them: a hash stands for its whole prefix.
PROMPTS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(
    lambda blocks: tuple(hash((n, *blocks[:n])) & 0xFFFF for n in range(1, len(blocks) + 1))
)


class IndexModel(RuleBasedStateMachine):
    """Compares the index with a list of hashes per endpoint, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, list[int]] = {}

    @rule(key=st.sampled_from(KEYS), prompt=PROMPTS, capacity=st.integers(1, 8))
    def record(self, key: str, prompt: tuple[int, ...], capacity: int) -> None:
        """An endpoint is sent a prompt."""
        self.index.record(key, prompt, capacity)
        held = [block for block in self.model.get(key, []) if block not in prompt]
        self.model[key] = (held + list(dict.fromkeys(reversed(prompt))))[-capacity:]

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        """An endpoint leaves."""
        self.index.remove(key)
        self.model.pop(key, None)

    @rule(prompt=PROMPTS)
    def match(self, prompt: tuple[int, ...]) -> None:
        """A match is the unbroken run from block 0."""
        expected = {}
        for key, held in self.model.items():
            run = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
            if run:
                expected[key] = run
        assert self.index.match(prompt) == expected

    @invariant()
    def sound(self) -> None:
        """Both halves agree, and the sizes are those of the model."""
        self.index.check_integrity()
        assert self.index.entries == sum(map(len, self.model.values()))
        assert len(self.index) == len({block for held in self.model.values() for block in held})


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_hole_ends_a_match() -> None:
    """Blocks behind a missing one are worth nothing to an engine."""
    index = PrefixIndex()
    index.record("a", [1, 2, 3], 10)
    index.record("b", [1], 10)
    index.record("b", [3], 10)
    assert index.match([1, 2, 3]) == {"a": 3, "b": 1}


def test_the_tail_of_a_prompt_is_evicted_before_its_beginning() -> None:
    """A shared beginning outlives private endings."""
    index = PrefixIndex()
    index.record("a", [1, 2, 3], 3)
    index.record("a", [7], 3)
    assert index.match([1, 2, 3]) == {"a": 2}
    index.check_integrity()


def test_the_least_recently_used_prompt_goes_first() -> None:
    """With room for two prompts of one block, the third evicts the first."""
    index = PrefixIndex()
    for prompt in ([1], [2], [3]):
        index.record("a", prompt, 2)
    assert index.match([1]) == {}
    assert index.match([2]) == {"a": 1}
    assert index.match([3]) == {"a": 1}


def test_a_slot_is_used_again_without_the_old_knowledge() -> None:
    """An endpoint that takes a freed slot inherits nothing."""
    index = PrefixIndex()
    index.record("old", [1, 2], 10)
    index.remove("old")
    index.remove("never there")
    index.record("new", [5], 10)
    assert index.match([1, 2]) == {}
    assert index.match([5]) == {"new": 1}
    assert len(index) == 1
