"""Log probabilities and ranks: those of a float64 softmax, in a fixed order, row by row."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.model import reference_ops as reference
from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.types import TokenLogprobs


def ask(
    logits: torch.Tensor, token_id: int, num_top: int = 0, fixed: tuple[int, ...] = ()
) -> TokenLogprobs:
    return token_logprobs(logits[None], [LogprobQuery(0, token_id, num_top, fixed)])[0]


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=40), st.data(), st.integers(-1, 45))
@examples(200)
def test_answers_are_the_twins(values: list[int], data: st.DataObject, num_top: int) -> None:
    logits = torch.tensor(values) / 2
    token_id = data.draw(st.integers(0, len(values) - 1))
    fixed = tuple(data.draw(st.lists(st.integers(0, len(values) - 1), max_size=3)))
    result = ask(logits, token_id, num_top, fixed)
    expected = reference.token_logprobs(logits, token_id, num_top, fixed)
    assert (result.token_ids, result.rank) == (expected.token_ids, expected.rank)
    assert result.logprobs == pytest.approx(expected.logprobs, abs=2e-6)


@pytest.mark.parametrize("num_top", [0, 1, 20, -1])
def test_a_row_of_real_size_is_the_twins(
    draw_logits: Callable[..., torch.Tensor], num_top: int
) -> None:
    logits = draw_logits(49152)
    result = ask(logits, 77, num_top, (3, 2))
    expected = reference.token_logprobs(logits, 77, num_top, (3, 2))
    assert (result.token_ids, result.rank) == (expected.token_ids, expected.rank)
    assert result.logprobs == pytest.approx(expected.logprobs, abs=5e-6)


def test_equal_logits_come_by_id_and_share_the_rank_of_the_last() -> None:
    result = ask(torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0]), 2, 2)
    assert result.token_ids == (2, 1, 2)
    assert result.rank == 3


def test_an_impossible_token_has_no_probability() -> None:
    result = ask(torch.tensor([0.0, -torch.inf, 0.0]), 1, 1)
    assert result.logprobs[0] == -torch.inf
    assert result.logprobs[1] == pytest.approx(-0.693147)
    assert result.rank == 3


def test_several_may_ask_for_one_row(draw_logits: Callable[..., torch.Tensor]) -> None:
    logits = draw_logits(1, 50)
    first, second = token_logprobs(logits, [LogprobQuery(0, 4), LogprobQuery(0, 9)])
    assert (first.token_ids, second.token_ids) == ((4,), (9,))
    assert first.rank != second.rank
