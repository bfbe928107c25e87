"""Drafts: greedy, by the target's own noise, or drawn from a distribution that is returned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.depth import by_depth, worlds
from tests.support.model.single_draws import sample
from worker.ops.draft import choose_drafts
from worker.types import Draw, SampleSpec, SamplingParams

Logits = Callable[..., torch.Tensor]
ChiSquare = Callable[[list[int], list[float]], float]
METHODS = ("greedy", "gumbel", "probabilistic")


def wish(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)


MANY = [
    wish(temperature=0.0),
    wish(seed=1),
    wish(seed=2, temperature=0.7, top_k=5),
    wish(seed=3, temperature=1.3, top_p=0.8),
    wish(seed=4, min_p=0.1, top_k=40, top_p=0.95),
]
PLACES = [7, 8, 9, 10, 2**40]


def test_greedy_drafts_are_the_likeliest_tokens(draw_logits: Logits) -> None:
    logits = draw_logits(5, 320)
    drafts, confidences, proposals = choose_drafts(logits, MANY, PLACES, "greedy", 0)
    assert drafts == logits.argmax(-1).tolist()
    assert confidences == pytest.approx(logits.softmax(-1).amax(-1).tolist())
    assert proposals is None


@pytest.mark.parametrize("seed", range(worlds(10)))
def test_gumbel_drafts_are_what_the_target_draws_from_equal_logits(
    draw_logits: Logits, seed: int
) -> None:
    logits = draw_logits(5, 320, seed=seed)
    specs = [SampleSpec(params, place + seed) for params, place in zip(MANY, PLACES, strict=True)]
    drawn = [draw.token_id for draw in sample(logits, specs) if isinstance(draw, Draw)]
    choice = choose_drafts(logits, MANY, [spec.position for spec in specs], "gumbel", seed)
    assert choice.token_ids == drawn
    assert choice.proposals is None
    shares = logits.softmax(-1)
    expected = [float(shares[row, token]) for row, token in enumerate(drawn)]
    assert choice.confidences == pytest.approx(expected)


def test_probabilistic_drafts_follow_the_proposals_they_come_with(
    draw_logits: Logits, excess_chi_square: ChiSquare
) -> None:
    logits = draw_logits(5, 12, scale=1.0)
    counts = torch.zeros(5, 12)
    for place in range(by_depth(600, 2500)):
        choice = choose_drafts(logits, MANY, [place] * 5, "probabilistic", place % 3)
        counts[range(5), choice.token_ids] += 1
    assert choice.proposals is not None
    assert choice.proposals.sum(-1).tolist() == pytest.approx([1.0] * 5)
    assert float(choice.proposals[0, logits[0].argmax()]) == 1.0
    for row in range(5):
        drawn, q = counts[row].int().tolist(), choice.proposals[row].tolist()
        assert excess_chi_square(drawn, q) < 5
    assert choice.confidences[1:] == [1.0] * 4


def test_a_position_drafted_again_gets_other_noise(draw_logits: Logits) -> None:
    logits = draw_logits(1, 500, scale=0.1)
    drafts = [
        choose_drafts(logits, [wish()], [9], "probabilistic", offset).token_ids[0]
        for offset in (0, 1, 2, 0)
    ]
    assert len(set(drafts)) == 3
    assert drafts[0] == drafts[3]


@pytest.mark.parametrize("method", METHODS)
def test_a_reduced_vocabulary_drafts_ids_of_the_whole_one(draw_logits: Logits, method: str) -> None:
    ids = torch.randperm(320, generator=torch.Generator().manual_seed(3))[:64].sort().values
    logits = draw_logits(5, 64)
    whole = torch.full((5, 320), -torch.inf)
    whole[:, ids] = logits
    reduced = choose_drafts(logits, MANY, PLACES, method, 1, ids, 320)
    expected = choose_drafts(whole, MANY, PLACES, method, 1)
    assert reduced.token_ids == expected.token_ids
    assert reduced.confidences == pytest.approx(expected.confidences)
    assert (reduced.proposals is None) == (method != "probabilistic")
    if reduced.proposals is not None and expected.proposals is not None:
        assert torch.allclose(reduced.proposals, expected.proposals)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_logits_that_are_not_numbers_give_some_draft(method: str, value: float) -> None:
    """A broken drafter is of no use, but stops no step."""
    logits = torch.full((5, 96), value)
    choice = choose_drafts(logits, MANY, PLACES, method, 0)
    assert all(0 <= token < 96 for token in choice.token_ids)
    assert all(0 < confidence <= 1 for confidence in choice.confidences)


def test_an_unknown_method_is_refused(draw_logits: Logits) -> None:
    with pytest.raises(ValueError, match="beam"):
        choose_drafts(draw_logits(1, 8), [wish()], [0], "beam", 0)
