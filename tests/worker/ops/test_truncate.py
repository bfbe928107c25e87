"""min-p, top-k and top-p keep exactly the tokens that their definitions keep."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.model import reference_ops as reference
from worker.ops.truncate import surviving, truncate, truncates
from worker.types import SamplingParams


def params(min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=1, min_p=min_p, top_k=top_k, top_p=top_p)


def survivors(scores: torch.Tensor, limits: SamplingParams) -> list[int]:
    return sorted(surviving(scores, limits).tolist())


def nearest_tie(scores: torch.Tensor, limits: SamplingParams) -> float:
    """Return the least distance of a cumulative share to top_p, or of a share to min_p of the
    largest.
    """
    shares = scores.double().softmax(-1).sort(descending=True).values
    distances = [float((shares / shares[0] - limits.min_p).abs().min())]
    for _ in range(2):  # with and without min-p and top-k before top-p
        distances.append(float((shares.cumsum(-1) / shares.sum() - limits.top_p).abs().min()))
        shares = shares[shares >= limits.min_p * shares[0]][: limits.top_k or None]
    return min(distances)


@given(
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.0, 1e-4, 0.02, 0.3, 1.0]),
    st.integers(0, 40),
    st.floats(0.01, 1.0),
    st.sampled_from([3, 40, 700]),
    st.sampled_from([0.01, 1.0, 10.0]),
)
@examples(200)
def test_the_survivors_are_exactly_the_twins(
    seed: int, min_p: float, top_k: int, top_p: float, vocab_size: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(vocab_size, generator=generator) * scale
    limits = params(min_p, top_k, top_p)
    if survivors(scores, limits) != reference.truncate(scores, limits):
        # Only where rounding decides may the two differ.
        assert nearest_tie(scores, limits) < 1e-6


@pytest.mark.parametrize("vocab_size", [257, 5000, 49152])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_flat_rows_of_real_size_are_cut_right(
    draw_logits: Callable[..., torch.Tensor], vocab_size: int, scale: float
) -> None:
    """Nuclei are far larger than the first few hundred tokens that are looked at."""
    scores = draw_logits(vocab_size, scale=scale)
    for limits in (params(top_p=0.9), params(top_k=300, top_p=0.8), params(min_p=1e-3, top_p=0.9)):
        difference = set(survivors(scores, limits)) ^ set(reference.truncate(scores, limits))
        assert len(difference) <= 1  # float32 may round one token over the edge


def test_ties_at_the_cut_all_survive() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert survivors(scores, params(top_k=2)) == [1, 2, 3]
    assert survivors(scores, params(top_p=0.3)) == [1, 2, 3]
    assert survivors(torch.zeros(1000), params(top_k=1)) == list(range(1000))


def test_truncated_scores_keep_their_values() -> None:
    scores = torch.tensor([1.0, 4.0, 3.0])
    assert truncate(scores, params(top_k=2)).tolist() == [-torch.inf, 4.0, 3.0]
    assert scores.tolist() == [1.0, 4.0, 3.0]
    assert truncates(params(top_k=2))
    assert not truncates(params())
