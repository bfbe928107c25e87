"""Sampling: exact support, right frequencies, and draws that are a pure function of their seed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.ops import reference
from worker.ops.sample import gumbel_noise, keep_top, sample
from worker.types import SampleSpec, SamplingParams

GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0)


def spec(position: int, seed: int = 7, **changes: Any) -> SampleSpec:
    """A draw at temperature 1 with the given changes."""
    return SampleSpec(SamplingParams(max_tokens=1, seed=seed, **changes), position)


def draw_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Normal logits."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(logits: torch.Tensor, draws: int, **changes: float) -> list[int]:
    """How often each token is drawn from logits [V] over as many positions."""
    counts = [0] * len(logits)
    for position in range(draws):
        counts[sample(logits[None], [spec(position, **changes)])[0]] += 1
    return counts


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    """Pearson's statistic over the tokens that can occur."""
    total = sum(counts)
    pairs = [(c, p * total) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    return sum((count - expected) ** 2 / expected for count, expected in pairs)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    """Temperature 0 is argmax; a tie goes to the lowest id."""
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -torch.inf]])
    assert sample(logits, [GREEDY, GREEDY]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    """Draws pass a chi-square test against the softmax (9 degrees of freedom, p = 0.001)."""
    logits = draw_logits(10, scale=1.0)
    counts = frequencies(logits, 4000, temperature=temperature)
    assert chi_square(counts, (logits / temperature).softmax(-1).tolist()) < 27.9


def test_frequencies_follow_the_softmax_of_what_top_k_and_top_p_keep() -> None:
    """Kept tokens keep their proportions; the others are never drawn."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    counts = frequencies(logits, 4000, top_k=4, top_p=0.7)
    assert counts[2:] == [0, 0, 0]  # of 0.95 left by top-k, 0.7 is reached by the second token
    assert chi_square(counts[:2], [4 / 7, 3 / 7]) < 10.8


def test_frequencies_over_seeds_follow_the_softmax_too() -> None:
    """Different seeds at one position are independent draws."""
    logits = draw_logits(6, scale=1.0)
    counts = [0] * 6
    for seed in range(3000):
        counts[sample(logits[None], [spec(11, seed=seed)])[0]] += 1
    assert chi_square(counts, logits.softmax(-1).tolist()) < 20.5


@given(
    st.integers(0, 2**16),
    st.integers(0, 40),
    st.floats(0.01, 1.0),
    st.sampled_from([3, 40, 700]),
    st.sampled_from([0.01, 1.0, 10.0]),
)
@settings(max_examples=150, deadline=None)
def test_the_support_is_exactly_the_twins(
    seed: int, top_k: int, top_p: float, vocab_size: int, scale: float
) -> None:
    """Top-k and top-p keep what a full sort and a loop keep, for flat and peaked rows."""
    logits = draw_logits(vocab_size, seed=seed, scale=scale)
    top_k = min(top_k, vocab_size)
    result = keep_top(logits, top_k, top_p)
    expected = reference.keep_top(logits, top_k, top_p)
    differing = (result.isinf() != expected.isinf()).nonzero().flatten().tolist()
    # A cumulative probability that equals top_p but for rounding may fall on either side.
    assert len(differing) <= 1
    if differing:
        assert boundary_distance(logits, top_k, top_p) < 1e-5
    kept = ~result.isinf()
    assert torch.equal(result[kept], logits[kept])


def boundary_distance(logits: torch.Tensor, top_k: int, top_p: float) -> float:
    """How near a cumulative probability comes to top_p."""
    ordered = logits.double().sort(descending=True).values[: top_k or None]
    return float((ordered.softmax(-1).cumsum(-1) - top_p).abs().min())


def test_ties_at_the_cut_are_all_kept() -> None:
    """No token is dropped for standing later in the vocabulary than its equal."""
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert keep_top(logits, 2, 1.0).isinf().tolist() == [True, False, False, False, True]
    assert keep_top(logits, 0, 0.3).isinf().tolist() == [True, False, False, False, True]


def test_the_largest_token_always_stays() -> None:
    """A top_p smaller than any probability is greedy."""
    logits = draw_logits(50)
    assert sample(logits[None], [spec(3, top_p=1e-6)]) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [1e-2, 1.0])
def test_forbidden_tokens_are_never_drawn(temperature: float) -> None:
    """-inf logits stay impossible, whatever the noise, even when one token is left."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 123] = -40.0
    assert {sample(logits, [spec(p, temperature=temperature)])[0] for p in range(50)} == {123}


def test_a_draw_depends_on_its_row_alone() -> None:
    """The same logits, seed and position give the same token in any batch and at any row."""
    logits = draw_logits(8, 5000, scale=1.0)
    specs = [spec(10 + i, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(8)]
    together = sample(logits, specs)
    assert [sample(logits[i : i + 1], [specs[i]])[0] for i in range(8)] == together
    assert sample(logits.flip(0), specs[::-1]) == together[::-1]


def test_greedy_and_random_rows_share_a_batch() -> None:
    """A greedy row beside a random one is still greedy."""
    logits = draw_logits(2, 100)
    tokens = sample(logits, [GREEDY, spec(0, top_k=5)])
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] in logits[1].topk(5).indices.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1])
def test_noise_is_a_pure_function_of_seed_and_position(seed: int) -> None:
    """Equal arguments give equal noise; another position or a longer row gives its own or more."""
    noise = gumbel_noise(seed, 5, 1001)
    assert torch.equal(noise, gumbel_noise(seed, 5, 1001))
    assert not torch.equal(noise, gumbel_noise(seed, 6, 1001))
    assert torch.equal(noise, gumbel_noise(seed, 5, 2001)[:1001])
    assert bool(noise.isfinite().all())


def test_noise_has_the_moments_of_a_gumbel() -> None:
    """Mean is Euler's constant and variance is pi²/6."""
    noise = torch.cat([gumbel_noise(3, position, 20_000) for position in range(10)]).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.012)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature: float) -> None:
    """Not greedily although they are the largest, and not by chance."""
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    for position in range(200):
        params = SamplingParams(max_tokens=1, temperature=temperature, seed=7)
        banned = SampleSpec(params, position, banned_ids=(0, 1))
        assert sample(logits.clone(), [banned])[0] in (2, 3)
