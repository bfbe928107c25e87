"""Prompt lookup: the longest match, of these the earliest, and what followed it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.ngram import NgramDrafter, NgramMatch, find_match
from worker.engine.drafters.texts import spell
from worker.types import Drafts

TOKENS = st.lists(st.integers(0, 2), max_size=40)
SPANS = st.tuples(st.integers(1, 8), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1]))


def find_by_trying(token_ids: list[int], shortest: int, longest: int) -> NgramMatch | None:
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - length):
            if token_ids[start : start + length] == token_ids[-length:]:
                return NgramMatch(start, length)
    return None


def ask(drafter: NgramDrafter, token_ids: list[int], num_tokens: int = 3) -> Drafts | None:
    context = DraftContext(0, token_ids, len(token_ids))
    try:
        return drafter.propose(context, num_tokens)
    finally:
        drafter.end(context, learns=True)


@examples(250)
@given(TOKENS, SPANS)
def test_string_search_and_trying_agree(token_ids: list[int], span: tuple[int, int]) -> None:
    expected = find_by_trying(token_ids, *span)
    assert find_match(spell(token_ids), *span) == expected


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=6)), max_size=30),
    SPANS,
    st.integers(1, 9),
)
def test_growing_interleaved_sequences_get_what_fresh_ones_get(
    growth: list[tuple[int, list[int]]], span: tuple[int, int], num_tokens: int
) -> None:
    drafter = NgramDrafter(*span)
    sequences: list[list[int]] = [[], [], []]
    contexts = [DraftContext(i, tokens, 0) for i, tokens in enumerate(sequences)]
    for which, new in growth:
        token_ids = sequences[which]
        token_ids += new
        drafts = drafter.propose(contexts[which], num_tokens)
        assert drafts == ask(NgramDrafter(*span), token_ids, num_tokens)
        match = find_by_trying(token_ids, *span)
        if match is None:
            assert drafts is None
            continue
        assert drafts.position == len(token_ids)
        assert list(drafts.token_ids) == token_ids[match.end : match.end + num_tokens]
        assert len(drafts.confidences) == len(drafts.token_ids) > 0
        assert all(0 < c <= 1 for c in drafts.confidences)
    for context in contexts:
        drafter.end(context, learns=True)
    assert len(drafter.texts) == 0


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3, 4], [1, 2, 3, 1, 2]])
def test_nothing_is_drafted_without_a_match(token_ids: list[int]) -> None:
    assert ask(NgramDrafter(3, 5), token_ids) is None


def test_a_longer_match_is_surer() -> None:
    short = ask(NgramDrafter(2, 2), [8, 1, 2, 3, 4, 5, 9, 1, 2])
    long = ask(NgramDrafter(2, 2), [8, 1, 2, 3, 4, 5, 8, 1, 2])
    assert short.token_ids == long.token_ids == (3, 4, 5)
    assert short.confidences == pytest.approx((2 / 3, 3 / 4, 4 / 5))
    assert long.confidences == pytest.approx((3 / 4, 4 / 5, 5 / 6))


def test_places_that_went_on_otherwise_make_it_less_sure() -> None:
    drafts = ask(NgramDrafter(2, 2), [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], 2)
    assert drafts.token_ids == (3, 1)
    assert drafts.confidences == pytest.approx((2 / 3 / 3, 3 / 4))


def test_a_match_far_back_counts_itself() -> None:
    far = ask(NgramDrafter(2, 2), [1, 2, 3, *range(10, 9000), 1, 2], 1)
    near = ask(NgramDrafter(2, 2), [1, 2, 3, 1, 2], 1)
    assert far.token_ids == near.token_ids
    assert far.confidences == near.confidences


@pytest.mark.parametrize("span", [(0, 3), (4, 3)])
def test_a_lookup_of_no_tokens_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no lookup of"):
        NgramDrafter(*span)
