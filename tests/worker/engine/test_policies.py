"""Each choice of the scheduler by itself: who gives way, who goes first, how much, when it ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine import policies
from worker.engine.cache.block_hash import BlockHash, BlockHasher
from worker.engine.policies import VICTIM_POLICIES, VictimCandidate, choose_victim
from worker.types import FinishReason, RepetitionDetection, SamplingParams

CANDIDATE = VictimCandidate(
    seq_id=0, priority=0, num_prompt=8, num_outputs=8, num_computed=16, num_shared=0, num_blocks=2
)


def running(*changes: dict[str, int]) -> list[VictimCandidate]:
    return [replace(CANDIDATE, seq_id=i, **change) for i, change in enumerate(changes)]


def victim(name: str, candidates: list[VictimCandidate], requester: int = 0) -> int:
    chosen = choose_victim(VICTIM_POLICIES[name], candidates[requester], candidates)
    return chosen.seq_id


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("recompute-cost", [{}, {"num_computed": 9}, {"num_computed": 12, "num_shared": 8}, {}], 2),
        ("recompute-cost", [{}, {"num_outputs": 2}, {"num_outputs": 1}, {"num_outputs": 2}], 2),
        ("recompute-cost", [{}, {}, {}], 2),
        ("recompute-cost", [{}, {"num_computed": 99}, {"num_preemptions": 1}], 1),
        ("last", [{}, {"num_computed": 1}, {}], 2),
        ("fewest-outputs", [{}, {"num_outputs": 3}, {"num_outputs": 2}, {"num_outputs": 2}], 3),
        ("fewest-outputs-longest-input", [{}, {"num_prompt": 9}, {"num_prompt": 12}, {}], 2),
        ("fewest-outputs-longest-input", [{}, {"num_prompt": 99}, {"num_outputs": 1}], 2),
        ("largest", [{}, {"num_blocks": 3}, {"num_blocks": 2}], 1),
    ],
)
def test_a_policy_chooses_a_victim(name: str, changes: list[dict[str, int]], expected: int) -> None:
    assert victim(name, running(*changes)) == expected


@pytest.mark.parametrize("name", sorted(VICTIM_POLICIES))
def test_the_first_in_rank_goes_on_whatever_it_looks_like(name: str) -> None:
    """The oldest is the likeliest victim of every policy, and is passed over."""
    first = {"num_computed": 1, "num_outputs": 0, "num_prompt": 99, "num_blocks": 99}
    assert victim(name, running(first, {}), requester=1) == 1


@pytest.mark.parametrize("name", sorted(VICTIM_POLICIES))
def test_only_the_lowest_class_gives_way(name: str) -> None:
    cheap = {"num_computed": 1, "num_outputs": 0, "num_prompt": 99, "num_blocks": 99}
    candidates = running({}, {"priority": 1, **cheap}, {"priority": 2}, {"priority": 2})
    assert victim(name, candidates, requester=2) in (2, 3)
    assert victim(name, candidates, requester=0) in (2, 3)


def test_a_guaranteed_sequence_is_passed_over_by_its_equals() -> None:
    guaranteed = [replace(c, guaranteed=c.seq_id > 0) for c in running({}, {}, {})]
    assert victim("last", guaranteed, requester=0) == 0
    assert victim("last", [*guaranteed[:2], replace(guaranteed[2], guaranteed=False)]) == 2


def test_a_guaranteed_sequence_takes_from_the_first() -> None:
    """The first in rank may be one of the others that it counts on."""
    candidates = running({}, {})
    candidates[1] = replace(candidates[1], guaranteed=True)
    assert victim("last", candidates, requester=1) == 0


def test_a_better_class_takes_from_the_guaranteed() -> None:
    """Guarantees hold within a class only."""
    candidates = running({}, {"priority": 3})
    candidates[1] = replace(candidates[1], guaranteed=True)
    assert victim("last", candidates, requester=0) == 1


def test_guarantees_never_add_up_to_more_than_the_pool() -> None:
    """The first is always given; another one only if both could need all they ever may."""
    assert policies.may_guarantee(200, [], 100)
    assert policies.may_guarantee(40, [30, 30], 100)
    assert not policies.may_guarantee(41, [30, 30], 100)


@given(
    candidates=st.lists(
        st.builds(
            VictimCandidate,
            seq_id=st.just(0),
            priority=st.integers(0, 2),
            num_prompt=st.integers(1, 9),
            num_outputs=st.integers(0, 9),
            num_computed=st.integers(0, 18),
            num_shared=st.integers(0, 9),
            num_blocks=st.integers(1, 5),
            num_preemptions=st.integers(0, 4),
            guaranteed=st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    name=st.sampled_from(sorted(VICTIM_POLICIES)),
    data=st.data(),
)
def test_a_victim_is_always_of_the_lowest_class_or_the_requester(
    candidates: list[VictimCandidate], name: str, data: st.DataObject
) -> None:
    ordered = sorted(candidates, key=lambda c: c.priority)
    ordered = [replace(c, seq_id=i) for i, c in enumerate(ordered)]
    asker = data.draw(st.sampled_from(ordered))
    chosen = choose_victim(VICTIM_POLICIES[name], asker, ordered)
    assert chosen in ordered
    lowest = ordered[-1].priority
    assert chosen is asker or chosen.priority == lowest
    if chosen.guaranteed and chosen is not asker:
        assert asker.priority < lowest


def test_coming_back_asks_for_twice_the_room_each_time() -> None:
    """Each sequence gets room for 32, 64, 128 tokens, but no more than it can use."""
    reserves = [policies.readmission_reserve(n, [1000, 40, 0], 16) for n in (1, 2, 3)]
    assert reserves == [2 + 2, 4 + 3, 8 + 3]


def test_longest_prefix_goes_first_within_a_priority_until_one_was_overtaken_too_often() -> None:
    line = [
        ((1, 0), 99, 0),
        ((0, 1), 0, 0),
        ((0, 2), 64, 0),
        ((0, 3), 64, 0),
        ((0, 4), 16, policies.MAX_OVERTAKES),
    ]
    ordered = [rank[1] for rank, *_ in sorted(line, key=lambda w: policies.lpm_key(*w))]
    assert ordered == [4, 2, 3, 1, 0]


def test_whom_one_may_pass() -> None:
    assert policies.may_pass([], 0, 0)
    assert policies.may_pass([(0, 0), (0, 7)], 0, 8)
    assert not policies.may_pass([(0, 0), (0, 8)], 0, 8)
    assert not policies.may_pass([(0, 0)], 1, 8)


def test_the_long_prefill_threshold_is_for_company() -> None:
    limits = [policies.chunk_limit(100, t, n) for t, n in ((0, 5), (30, 1), (30, 2), (300, 2))]
    assert limits == [100, 100, 30, 100]


@given(shared=st.integers(0, 9), one=st.integers(0, 5), other=st.integers(0, 5))
def test_chains_have_in_common_what_their_tokens_have(shared: int, one: int, other: int) -> None:
    hasher = BlockHasher(2)
    chains: list[list[BlockHash]] = [[], []]
    for chain, tail, token in zip(chains, (one, other), (7, 8), strict=True):
        hasher.extend(chain, [1] * (2 * shared) + [token] * (2 * tail), shared + tail)
    assert policies.common_blocks(*chains) == shared


def test_a_sequence_is_deferred_for_a_long_common_prefix() -> None:
    assert policies.should_defer(0, 32, 32)
    assert not policies.should_defer(1, 32, 32)
    assert not policies.should_defer(0, 99, None)
    assert not policies.should_defer(0, 0, 0)


@pytest.mark.parametrize(
    ("params", "outputs", "expected"),
    [
        ({}, [5, 0], (FinishReason.STOP, 0)),
        ({"ignore_eos": True}, [5, 0], (None, None)),
        ({"stop_token_ids": (5,)}, [5], (FinishReason.STOP, 5)),
        ({"ignore_eos": True, "stop_token_ids": (0,)}, [0], (FinishReason.STOP, 0)),
        ({"min_tokens": 3, "stop_token_ids": (5,)}, [0, 5], (None, None)),
        ({"max_tokens": 2}, [1, 1], (FinishReason.LENGTH, None)),
        ({"max_tokens": 2}, [1, 0], (FinishReason.STOP, 0)),
        ({"max_tokens": 2, "stop_token_ids": (1,)}, [2, 1], (FinishReason.STOP, 1)),
    ],
)
def test_an_answer_ends_for_each_reason(
    params: dict[str, object], outputs: list[int], expected: tuple[FinishReason | None, int | None]
) -> None:
    """The order is end token, stop tokens, length; before `min_tokens` only length counts."""
    given_params = SamplingParams(**{"max_tokens": 9, **params})  # type: ignore[arg-type]
    tokens = [3, 3, *outputs]
    limit = 2 + given_params.max_tokens
    assert policies.check_stop(given_params, frozenset({0}), tokens, 2, limit) == expected


@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    least=st.integers(0, 3),
    most=st.integers(0, 4),
    count=st.integers(2, 4),
    num_prompt=st.integers(0, 3),
)
def test_repetition_is_what_the_definition_says(
    tokens: list[int], least: int, most: int, count: int, num_prompt: int
) -> None:
    num_prompt = min(num_prompt, len(tokens) - 1)
    outputs = tokens[num_prompt:]
    expected = any(
        len(outputs) >= size * count and outputs[-size * count :] == outputs[-size:] * count
        for size in range(max(1, least), most + 1)
    )
    detection = RepetitionDetection(most, least, count)
    assert policies.is_repeating(tokens, len(outputs), detection) == expected
