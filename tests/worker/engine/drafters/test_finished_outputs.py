"""Finished outputs: as many as may be, oldest out first, nothing of those gone left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.drafters.finished_outputs import (
    MAX_OUTPUT_TOKENS,
    FinishedOutputs,
    OutputText,
)
from worker.engine.drafters.texts import spell
from worker.errors import IntegrityError

HERE, THERE = ("here", ""), ("there", "salt")


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([HERE, THERE, ("here", "salt")]),
            st.lists(st.integers(0, 3), max_size=14),
        ),
        max_size=40,
    ),
    st.integers(0, 6),
    st.integers(0, 40),
)
def test_the_latest_outputs_are_kept_and_nothing_else(
    added: list[tuple[tuple[str, str], list[int]]], max_outputs: int, max_tokens: int
) -> None:
    """After every output both bounds hold, over all groups, and what can be found is what only the
    outputs kept would give.
    """
    finished = FinishedOutputs(max_outputs, max_tokens)
    model: list[tuple[tuple[str, str], str]] = []
    for group, token_ids in added:
        finished.add(group, token_ids)
        finished.check_integrity()
        if token_ids and max_outputs and max_tokens:
            model.append((group, spell(token_ids[-max_tokens:])))
        while len(model) > max_outputs or sum(len(o) for _, o in model) > max_tokens:
            del model[0]
        assert finished.num_outputs == len(model)
        assert finished.num_tokens == sum(len(o) for _, o in model)
        for group_ in (HERE, THERE, ("here", "salt")):
            text = finished.of(group_)
            assert (text.outputs if text else []) == [o for g, o in model if g == group_]
            # Text that is gone is cut off before there is more of it than of what is left.
            if text:
                assert text.num_tokens_kept <= 2 * sum(len(o) + 1 for o in text.outputs)


def test_an_output_that_is_gone_is_found_no_more() -> None:
    """Its n-grams were seen in it alone, or in later ones too."""
    finished = FinishedOutputs(2, 100)
    finished.add(HERE, [1, 2, 3, 4])
    finished.add(HERE, [9, 2, 3, 5])
    text = finished.of(HERE)
    assert text is not None
    assert [text.text[p] for p in text.places(spell([3]))] == [spell([5]), spell([4])]
    finished.add(HERE, [7])
    assert [text.text[p] for p in text.places(spell([3]))] == [spell([5])]
    assert text.places(spell([1])) == []
    assert text.places(spell([1, 2, 3])) == []
    finished.add(THERE, [8])
    finished.add(THERE, [8])
    assert finished.of(HERE) is None


def test_only_the_end_of_a_long_output_is_kept() -> None:
    """Learning it takes no longer than that of any other."""
    finished = FinishedOutputs(10, 10 * MAX_OUTPUT_TOKENS)
    finished.add(HERE, list(range(MAX_OUTPUT_TOKENS + 5)))
    text = finished.of(HERE)
    assert text is not None
    assert finished.num_tokens == MAX_OUTPUT_TOKENS
    assert text.places(spell([4])) == []
    assert text.places(spell([5])) == [1]


def test_integrity_is_lost_when_something_gone_can_be_found() -> None:
    """The check sees a name that outlived its output, and a chain that skips a place."""
    text = OutputText()
    text.append(spell([1, 2, 1, 3]))
    text.check_integrity()
    text._latest[1][spell([6])] = 1
    with pytest.raises(IntegrityError, match="other outputs"):
        text.check_integrity()
    del text._latest[1][spell([6])]
    text._before[1][2] = 0
    with pytest.raises(IntegrityError, match="are not those in the outputs"):
        text.check_integrity()
