"""Tokens as characters: every id of every vocabulary comes back as itself."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.drafters.texts import SequenceTexts, spell, tokens_of

SURROGATES = [0xD83D, 0xDE00, 0xDFFF, 0xD800]


@examples(100)
@given(st.lists(st.integers(0, sys.maxunicode - 1), max_size=80))
def test_spelled_tokens_read_back_the_same(token_ids: list[int]) -> None:
    text = spell(token_ids)
    assert len(text) == len(token_ids)
    assert tokens_of(text) == tuple(token_ids)


@pytest.mark.parametrize("times", [1, 40])
def test_ids_among_the_surrogates_are_tokens_like_others(times: int) -> None:
    assert tokens_of(spell(SURROGATES * times)) == tuple(SURROGATES * times)


@pytest.mark.parametrize("token_id", [-1, sys.maxunicode, sys.maxunicode + 1, 1 << 40])
@pytest.mark.parametrize("times", [1, 100])
def test_an_id_that_no_vocabulary_has_is_refused(token_id: int, times: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        spell([token_id] * times)


def test_texts_grow_with_their_sequences_and_can_be_forgotten() -> None:
    texts = SequenceTexts()
    token_ids = [5, 6]
    assert texts.read(1, token_ids) == spell([5, 6])
    assert texts.read(2, [9]) == spell([9])
    token_ids += [7, 8, 9]
    assert texts.read(1, token_ids) == spell([5, 6, 7, 8, 9])
    assert texts.read(1, token_ids) == spell([5, 6, 7, 8, 9])
    with pytest.raises(ValueError, match="sequence 1 got 4 tokens shorter"):
        texts.read(1, [5])
    assert len(texts) == 2
    texts.forget(1)
    texts.forget(1)
    assert len(texts) == 1
    assert texts.read(1, [5]) == spell([5])
