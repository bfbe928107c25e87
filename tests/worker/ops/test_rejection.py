"""Speculative acceptance leaves the target's distribution as it is: by enumeration and by count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.ops import reference
from worker.ops.rejection import Verdict, is_accepted, residual, verify
from worker.ops.sample import sample, scores
from worker.types import Draw, SampleSpec, SamplingParams

ChiSquare = Callable[[list[int], list[float]], float]
Matrix = list[list[float]]

# A toy Markov model of three tokens: row t is what follows t. One transition is impossible.
TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.25, 0.7], [0.6, 0.4, 0.0]])
# A draft of it that is wrong everywhere, in one place where the target is certain not to go.
DRAFT = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.1, 0.6, 0.3]])


def distribution(generator: torch.Generator, size: int, zeros: int = 0) -> torch.Tensor:
    """A random distribution, float64, with some impossible tokens."""
    weights = torch.rand(size, generator=generator, dtype=torch.float64)
    weights[torch.randperm(size, generator=generator)[:zeros]] = 0
    return weights / weights.sum()


def draw_from(probabilities: torch.Tensor, seed: int, position: int) -> int:
    """A drafter's token, by a generator of its own."""
    weights = probabilities.tolist()
    return Random(f"{seed} {position}").choices(range(len(weights)), weights)[0]


@given(st.integers(0, 2**20), st.integers(2, 30), st.integers(0, 10), st.integers(0, 10))
@settings(max_examples=200, deadline=None)
def test_a_position_is_distributed_as_the_target_says(
    seed: int, size: int, target_zeros: int, draft_zeros: int
) -> None:
    """Exactly: accepted drafts and recovered ones together have the target's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    target = distribution(generator, size, min(target_zeros, size - 1))
    draft = distribution(generator, size, min(draft_zeros, size - 1))
    rest = residual(target, draft)
    pairs = list(zip(target.tolist(), draft.tolist(), strict=True))
    accepted = [q * acceptance(p, q) for p, q in pairs]
    rejected = 1 - math.fsum(accepted)
    emitted = [
        a + rejected * r for a, r in zip(accepted, (rest / rest.sum()).tolist(), strict=True)
    ]
    assert emitted == pytest.approx(target.tolist(), abs=1e-9)
    assert reference.emitted(target, draft) == pytest.approx(target.tolist(), abs=1e-9)


def acceptance(p: float, q: float) -> float:
    """The share of uniform draws that accept, found by bisection of the decision itself."""
    low, high = 0.0, 1.0
    if not is_accepted(p, q, low):
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_accepted(p, q, middle) else (low, middle)
    return high


@given(st.integers(0, 2**20), st.integers(2, 30))
@settings(max_examples=50, deadline=None)
def test_a_certain_draft_is_a_distribution_too(seed: int, size: int) -> None:
    """A drafter without probabilities is one that puts everything on its draft."""
    generator = torch.Generator().manual_seed(seed)
    target, token = distribution(generator, size), seed % size
    certain = torch.zeros(size, dtype=torch.float64)
    certain[token] = 1
    assert torch.equal(residual(target, token), residual(target, certain))


@pytest.mark.parametrize(
    ("p", "q", "draw", "accepted"),
    [
        (0.5, 0.5, 1 - 2**-53, True),
        (0.2, 0.4, 0.49, True),
        (0.2, 0.4, 0.51, False),
        (0.0, 0.4, 0.0, False),
        (0.9, 0.0, 0.0, False),  # never drawn from q: not to be trusted
        (0.9, 0.1, 1 - 2**-53, True),
    ],
)
def test_a_draft_is_accepted_by_the_ratio(p: float, q: float, draw: float, accepted: bool) -> None:
    """min(1, p/q), nothing where the target or the drafter says never."""
    assert is_accepted(p, q, draw) is accepted


def test_equal_distributions_leave_the_target_as_residual() -> None:
    """Rounding may reject where p equals q; then any draw from p is right."""
    target = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(target, target), target)
    assert residual(target, 1).tolist() == [0.25, 0.0]


def rows(start: int, drafts: Sequence[int], table: torch.Tensor) -> torch.Tensor:
    """What `table` says at each position from the one after `start`, given the drafts."""
    return torch.stack([table[token] for token in (start, *drafts)])


def speculate(start: int, num_tokens: int, num_drafts: int, seed: int) -> list[int]:
    """Tokens after `start`, `num_drafts` drafted at a time."""
    tokens = [start]
    while len(tokens) <= num_tokens:
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            position = len(tokens) + len(drafts)
            drafts.append(draw_from(DRAFT[[*tokens, *drafts][-1]], seed, position))
        targets = rows(tokens[-1], drafts, TARGET).log()
        proposals = rows(tokens[-1], drafts, DRAFT)[:-1]
        verdict = verify(drafts, targets, proposals, seed, len(tokens))
        assert 0 <= verdict.num_accepted <= num_drafts
        tokens += verdict.token_ids
    return tokens[1 : num_tokens + 1]


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_joint_sequences_have_the_probabilities_of_enumeration(
    excess_chi_square: ChiSquare, num_drafts: int
) -> None:
    """All 81 continuations of four tokens, over runs that are accepted, cut and begun anew: a
    chi-square test and the total variation against the product of the transitions.
    """
    draws = 1500
    counts = dict.fromkeys(itertools.product(range(3), repeat=4), 0)
    for seed in range(draws):
        counts[tuple(speculate(0, 4, num_drafts, seed))] += 1
    exact = [
        math.prod(float(TARGET[a, b]) for a, b in itertools.pairwise((0, *sequence)))
        for sequence in counts
    ]
    assert excess_chi_square(list(counts.values()), exact) < 5
    pairs = zip(counts.values(), exact, strict=True)
    variation = sum(abs(count / draws - p) for count, p in pairs) / 2
    assert variation < 4.5 / draws**0.5  # its mean is about 3 / √draws for 81 cells


@pytest.mark.parametrize("certain", [True, False])
def test_one_step_follows_the_target_row_by_row(
    excess_chi_square: ChiSquare, certain: bool
) -> None:
    """Given that k drafts were accepted, the token after them has the target's distribution there
    (recovered: of what is left), also for a drafter that has no probabilities.
    """
    counts: Matrix = [[0] * 3 for _ in range(3)]
    for seed in range(2000):
        drafts = [1, 2] if certain else [draw_from(DRAFT[0], seed, 1)]
        drafts += [] if certain else [draw_from(DRAFT[drafts[0]], seed, 2)]
        proposals = None if certain else rows(0, drafts, DRAFT)[:-1]
        tokens = verify(drafts, rows(0, drafts, TARGET).log(), proposals, seed, 1).token_ids
        counts[0][tokens[0]] += 1
        if len(tokens) > 1 and tokens[0] == 1:
            counts[1][tokens[1]] += 1
    assert excess_chi_square([int(c) for c in counts[0]], TARGET[0].tolist()) < 5
    assert excess_chi_square([int(c) for c in counts[1]], TARGET[1].tolist()) < 5


def test_excluded_tokens_are_never_emitted() -> None:
    """Whatever was drafted: only what truncation left can stand in the output."""
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(max_tokens=1, temperature=0.9, top_k=5, top_p=0.8, seed=3)
    logits = torch.randn(4, 100, generator=generator) * 2
    targets = torch.stack([scores(row, SampleSpec(params, 0)) for row in logits])
    drafting = torch.rand(3, 100, generator=generator).softmax(-1)
    for seed in range(200):
        drafts = [draw_from(drafting[i], seed, i) for i in range(3)]
        for proposals in (drafting, None):
            for index, token in enumerate(verify(drafts, targets, proposals, seed, 0).token_ids):
                assert targets[index, token] > -math.inf


def test_without_drafts_the_token_is_the_samplers_own() -> None:
    """A step that drafts nothing draws what plain sampling draws, and so does a bonus token."""
    generator = torch.Generator().manual_seed(5)
    for seed in range(40):
        logits = torch.randn(1, 500, generator=generator) * 3
        params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=seed)
        spec = SampleSpec(params, 17)
        [plain] = sample(logits, [spec])
        assert isinstance(plain, Draw)
        row = scores(logits[0], spec)
        assert verify([], row[None], None, seed, 17) == Verdict((plain.token_id,))
        sure = torch.full((1, 500), -torch.inf)
        sure[0, 9] = 0.0
        bonus = verify([9], torch.cat((sure, row[None])), None, seed, 16)
        assert bonus == Verdict((9, plain.token_id))


@pytest.mark.parametrize(
    ("drafts", "tokens"), [([2, 0, 1], (2, 0, 1, 1)), ([2, 1, 1], (2, 0)), ([0, 0, 1], (2,))]
)
def test_greedy_accepts_what_is_the_largest(drafts: list[int], tokens: tuple[int, ...]) -> None:
    """Up to the first draft that is not, which the largest replaces; ties go to the lowest id."""
    targets = torch.tensor([[0.0, 1, 2], [3, 3, 0], [0, 2, 1], [1, 2, 2]])
    assert verify(drafts, targets, None, None, 0) == Verdict(tokens)


@given(st.integers(0, 10_000), st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_sharp_targets_make_sampling_greedy(seed: int, num_drafts: int) -> None:
    """With all probability on one token the random way emits what the greedy way emits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_drafts + 1, 8, generator=generator)
    sharp = torch.full_like(logits, -torch.inf)
    sharp.scatter_(1, logits.argmax(-1, keepdim=True), 0.0)
    drafts = [
        int(row.argmax()) if torch.rand(1, generator=generator) < 0.7 else seed % 8
        for row in logits[:num_drafts]
    ]
    assert verify(drafts, sharp, None, seed, 3) == verify(drafts, logits, None, None, 3)
