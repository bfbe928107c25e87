"""Verification by rejection leaves the target's distribution exactly as it is.

The last tests enumerate all drafts and all decisions, without any sampling.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples, worlds
from tests.support.model import reference_ops as reference
from tests.support.model.single_draws import sample, verify
from worker.ops import rejection_torch
from worker.ops.drafted import AcceptedPrefixes, DraftBatch
from worker.ops.rejection import (
    BLOCK,
    METHODS,
    STANDARD,
    DraftVerdict,
    accept,
    certain,
    thresholds,
    verify_batch,
    verify_coupled,
)
from worker.ops.rejection_torch import excess, log_normalizers, residuals
from worker.ops.sample import ALL_MASKED, DrawState, Undrawable, scores
from worker.types import Draw, SampleSpec, SamplingParams

ChiSquare = Callable[[list[int], list[float]], float]


def distribution(generator: torch.Generator, size: int, zeros: int = 0) -> torch.Tensor:
    weights = torch.rand(size, generator=generator, dtype=torch.float64)
    weights[torch.randperm(size, generator=generator)[:zeros]] = 0
    return weights / weights.sum()


def batch_of(
    generator: torch.Generator, size: int, num_drafts: int, vocab_size: int, zeros: int = 0
) -> DraftBatch:
    shape = (size, num_drafts, vocab_size)
    targets = torch.stack(
        [distribution(generator, vocab_size, zeros) for _ in range(size * (num_drafts + 1))]
    ).view(size, num_drafts + 1, vocab_size)
    proposals = torch.zeros(shape)
    drafts = torch.zeros(size, num_drafts, dtype=torch.int64)
    for b, i in itertools.product(range(size), range(num_drafts)):
        proposals[b, i] = distribution(generator, vocab_size, zeros).float()
        drafts[b, i] = torch.multinomial(proposals[b, i], 1, generator=generator)
    counts = torch.randint(0, num_drafts + 1, (size,), generator=generator)
    return DraftBatch(drafts, targets.log().float(), proposals, counts)


@pytest.mark.parametrize("method", METHODS)
def test_thresholds_are_what_the_definitions_say(method: str) -> None:
    batch = batch_of(torch.Generator().manual_seed(8), 60, 4, 7, zeros=2)
    found = thresholds(batch, method)
    for b, count in enumerate(batch.num_drafts.tolist()):
        targets = batch.scores[b].double().softmax(-1).tolist()
        proposals = batch.proposals[b].double().tolist()
        drafts = batch.drafts[b, :count].tolist()
        expected = reference.thresholds(drafts, targets, proposals, block=method == BLOCK)
        assert found.values[b, :count].tolist() == pytest.approx(expected, abs=1e-12)


@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(0, 5), st.sampled_from(METHODS))
@examples(60)
def test_a_batch_verifies_each_sequence_as_alone(
    seed: int, size: int, num_drafts: int, method: str
) -> None:
    batch = batch_of(torch.Generator().manual_seed(seed), size, num_drafts, 33, zeros=seed % 30)
    seeds, positions = range(seed, seed + size), range(40, 40 + size)
    together = verify_batch(batch, seeds, positions, method)
    limits = thresholds(batch, method)
    for b, count in enumerate(batch.num_drafts.tolist()):
        own = (batch.drafts[b, :count], batch.scores[b, : count + 1], batch.proposals[b, :count])
        alone = verify(own[0].tolist(), own[1], own[2], seeds[b], positions[b], method)
        assert together[b] == alone
        single = thresholds(
            DraftBatch(*(t[None] for t in own), batch.num_drafts[b : b + 1]), method
        )
        assert torch.equal(single.values[0], limits.values[b, :count])
        assert torch.equal(single.log_weights[0], limits.log_weights[b, : count + 1])


def test_rows_of_a_real_vocabulary_are_summed_alike_in_any_batch() -> None:
    """Sums of 49,152 terms run on all cores when they are alone."""
    generator = torch.Generator().manual_seed(3)
    scores_ = torch.randn(3, 3, 49152, generator=generator) * 4
    proposals = (torch.randn(3, 2, 49152, generator=generator) * 4).softmax(-1)
    batch = DraftBatch(proposals.argmax(-1), scores_, proposals, torch.tensor([2, 2, 1]))
    normalizers = log_normalizers(scores_[:, :2])
    weights = -torch.rand(3, 2, generator=generator, dtype=torch.float64)
    masses = excess(batch, normalizers, weights)
    for b in range(3):
        alone = DraftBatch(
            batch.drafts[b : b + 1], scores_[b : b + 1], proposals[b : b + 1], torch.tensor([2])
        )
        own = log_normalizers(scores_[b : b + 1, :1])
        assert torch.equal(own[0], normalizers[b, :1])
        assert torch.equal(excess(alone, normalizers[b : b + 1], weights[b : b + 1])[0], masses[b])


@pytest.mark.parametrize("method", METHODS)
def test_a_certain_draft_stands_with_the_targets_probability(method: str) -> None:
    """A drafter without probabilities is one that puts everything on its draft."""
    target = distribution(torch.Generator().manual_seed(1), 9, 2)
    drafts = torch.arange(9)[:, None]
    rows_ = target.log().float().expand(9, 2, 9)
    batch = DraftBatch(drafts, rows_, certain(drafts, 9), torch.ones(9, dtype=torch.int64))
    assert thresholds(batch, method).values[:, 0].tolist() == pytest.approx(
        target.tolist(), abs=1e-7
    )
    for seed, token in itertools.product(range(60), range(9)):
        verdict = verify([token], rows_[0], None, seed, 4, method)
        assert (verdict.num_accepted == 1) == (verdict.token_ids[0] == token)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("p", "q", "threshold"),
    [
        (0.25, 0.25, 1.0),
        (0.25, 0.5, 0.5),
        (0.0, 0.5, 0.0),
        (0.75, 0.25, 1.0),
        (0.75, 0.0, 0.0),  # never drawn from q: not to be trusted
        (0.75, math.nan, 0.0),
    ],
)
def test_a_lone_draft_is_accepted_by_the_ratio(
    p: float, q: float, threshold: float, method: str
) -> None:
    batch = DraftBatch(
        torch.tensor([[0]]),
        torch.tensor([[[p, 1 - p], [0.5, 0.5]]]).log(),
        torch.tensor([[[q, 1 - q]]]),
        torch.tensor([1]),
    )
    found = thresholds(batch, method).values
    assert found.tolist() == [[pytest.approx(threshold, abs=1e-7)]]
    for draw in {0.0, max(threshold - 1e-6, 0.0), min(threshold + 1e-6, 1 - 1e-6)}:
        stands = accept(batch, torch.tensor([[draw]], dtype=torch.float64), method).num_accepted
        assert bool(stands) == (draw < threshold)


def test_a_proposal_that_is_no_distribution_leaves_the_target_alone(
    excess_chi_square: ChiSquare,
) -> None:
    """This is what a broken drafter proposes."""
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    for broken in (torch.full((1, 3), torch.nan), torch.zeros(1, 3), torch.full((1, 3), torch.inf)):
        counts = [0, 0, 0]
        for seed in range(1000):
            verdict = verify([2], target.log(), broken, seed, 5)
            counts[verdict.token_ids[0]] += 1
            assert verdict.num_accepted == 0
        assert excess_chi_square(counts, target[0].tolist()) < 5


def test_equal_distributions_leave_the_target_as_residual() -> None:
    """Rounding may reject where p equals q; then any draw from p is right."""
    target = torch.tensor([[0.0, 0.0, -torch.inf]] * 2)
    proposals = torch.tensor([[[0.5, 0.5, 0.0]]])
    batch = DraftBatch(torch.tensor([[1]]), target[None], proposals, torch.tensor([1]))
    rejected = AcceptedPrefixes(torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    assert float(residuals(target[:1], proposals[0], -torch.tensor([2.0]).log()).sum()) < 1e-7
    for token in (0, 1):
        noise = torch.tensor([[-3.0, -3.0, 9.0]])
        noise[0, token] = 0.0
        assert rejection_torch.last_tokens(batch, rejected, noise).tolist() == [token]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="typical"):
        verify([0], torch.zeros(2, 3), None, 0, 0, "typical")


@given(st.integers(0, 10_000), st.integers(0, 5))
@examples(100)
def test_coupled_runs_are_those_of_one_row_after_the_other(seed: int, most: int) -> None:
    draw = random.Random(seed)
    own = [draw.randrange(most + 1) for _ in range(6)]
    tokens = torch.tensor([[draw.randrange(2) for _ in range(most + 1)] for _ in own]).int()
    states = torch.tensor(
        [[DrawState.ALL_MASKED if draw.random() < 0.1 else 0 for _ in row] for row in tokens]
    ).int()
    drafts = torch.tensor([[draw.randrange(2) for _ in range(most)] for _ in own]).int()
    drafts = drafts.view(len(own), most)
    runs = verify_coupled(tokens, states, drafts, torch.tensor(own).int())
    for index, count in enumerate(own):
        first = most - count

        def at(row: int, place: tuple[int, int] = (index, first)) -> int | Undrawable:
            where = (place[0], place[1] + row)
            return int(tokens[where]) if states[where] == 0 else Undrawable(ALL_MASKED)

        wanted, fault = reference.coupled_run(drafts[index, first:].tolist(), at)
        end, state = int(runs.ends[index]), int(runs.states[index])
        assert tokens[index, first : end + (state == 0)].tolist() == wanted
        assert (state == DrawState.ALL_MASKED) == (fault is not None)
        assert runs.lasts[index] == tokens[index, end]


def test_without_drafts_the_token_is_the_samplers_own() -> None:
    generator = torch.Generator().manual_seed(5)
    for seed in range(40):
        logits = torch.randn(1, 500, generator=generator) * 3
        params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=seed)
        spec = SampleSpec(params, 17)
        [plain] = sample(logits, [spec])
        assert isinstance(plain, Draw)
        row = scores(logits[0], spec)
        assert verify([], row[None], None, seed, 17) == DraftVerdict((plain.token_id,))
        sure = torch.full((1, 500), -torch.inf)
        sure[0, 9] = 0.0
        bonus = verify([9], torch.cat((sure, row[None])), None, seed, 16)
        assert bonus == DraftVerdict((9, plain.token_id))


@given(st.integers(0, 10_000), st.integers(0, 4), st.sampled_from(METHODS))
@examples(50)
def test_sharp_targets_leave_nothing_to_chance(seed: int, num_drafts: int, method: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(0, 8, (num_drafts + 1,), generator=generator)
    sharp = torch.full((num_drafts + 1, 8), -torch.inf)
    sharp.scatter_(1, best[:, None], 0.0)
    drafts = [
        token if torch.rand(1, generator=generator) < 0.7 else seed % 8
        for token in best[:num_drafts].tolist()
    ]
    expected, fault = reference.coupled_run(drafts, lambda index: int(best[index]))
    assert fault is None
    assert verify(drafts, sharp, None, seed, 3, method).token_ids == tuple(expected)


# ---- enumeration ----


class Tree:
    def __init__(self, seed: int, size: int, depth: int, zeros: int) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(seed)
        self._rows = {
            context: distribution(generator, size, zeros).float()
            for length in range(depth)
            for context in itertools.product(range(size), repeat=length)
        }

    def path(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._rows[tuple(tokens[:i])] for i in range(len(tokens))])

    def after(self, tokens: Sequence[int]) -> torch.Tensor:
        row = self._rows[tuple(tokens)].double()
        return row / row.sum()

    def probability(self, tokens: Sequence[int]) -> float:
        return math.prod(float(self.after(tokens[:i])[t]) for i, t in enumerate(tokens))


def every_batch(target: Tree, draft: Tree, depth: int) -> DraftBatch:
    every = list(itertools.product(range(target.size), repeat=depth))
    rows = [torch.cat((target.path(x), target.after(x).float()[None])).log() for x in every]
    proposals = torch.stack([draft.path(x) for x in every])
    counts = torch.full((len(every),), depth)
    return DraftBatch(torch.tensor(every), torch.stack(rows), proposals, counts)


def emitted(target: Tree, draft: Tree, depth: int, method: str) -> dict[tuple[int, ...], float]:
    """Enumerate all drafts, and all that production may decide about each."""
    batch = every_batch(target, draft, depth)
    limits = thresholds(batch, method)
    result = dict.fromkeys(itertools.product(range(target.size), repeat=depth + 1), 0.0)
    for b, x in enumerate(map(tuple, batch.drafts.tolist())):
        q = draft.probability(x)
        if q == 0:
            continue
        for count, share in enumerate(shares(limits.values[b].tolist(), method)):
            last = target.after(x)
            if count < depth and share > 0:
                shift = limits.log_weights[b, count] - batch.scores[b, count].double().logsumexp(-1)
                rest = residuals(
                    batch.scores[b, None, count], draft.path(x)[None, count], shift[None]
                )[0]
                last = rest / rest.sum() if float(rest.sum()) > 0 else target.after(x[:count])
            for token in range(target.size) if share > 0 else ():
                start = (*x[:count], token)
                for end in itertools.product(range(target.size), repeat=depth - count):
                    whole = start + end
                    rest_of = math.prod(
                        float(target.after(whole[:i])[whole[i]])
                        for i in range(len(start), depth + 1)
                    )
                    result[whole] += q * share * float(last[token]) * rest_of
    return result


def shares(limits: Sequence[float], method: str) -> list[float]:
    if method == STANDARD:
        reached = [1.0, *itertools.accumulate(limits, lambda a, b: a * b)]
        return [a - b for a, b in itertools.pairwise([*reached, 0.0])]
    # The longest prefix that passes: no longer one does.
    failing = list(itertools.accumulate(reversed(limits), lambda a, b: a * (1 - b), initial=1.0))
    none_longer = failing[::-1]
    return [none_longer[0], *(h * none_longer[i + 1] for i, h in enumerate(limits))]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "depth", "zeros"), [(2, 1, 0), (4, 1, 1), (3, 2, 0), (3, 2, 1), (2, 4, 0), (3, 3, 1)]
)
@pytest.mark.parametrize("seed", range(worlds(3)))
def test_a_step_has_the_targets_joint_distribution_exactly(
    seed: int, size: int, depth: int, zeros: int, method: str
) -> None:
    target, draft = (Tree(seed * 2 + i, size, depth + 1, zeros) for i in range(2))
    found = emitted(target, draft, depth, method)
    expected = {tokens: target.probability(tokens) for tokens in found}
    assert found == pytest.approx(expected, abs=1e-6)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-6)


def expected_length(target: Tree, draft: Tree, depth: int, method: str) -> float:
    batch = every_batch(target, draft, depth)
    limits = thresholds(batch, method).values.tolist()
    return math.fsum(
        draft.probability(x) * count * share
        for x, own in zip(batch.drafts.tolist(), limits, strict=True)
        for count, share in enumerate(shares(own, method))
    )


@pytest.mark.parametrize("seed", range(worlds(5)))
def test_block_verification_accepts_at_least_as_many(seed: int) -> None:
    """One draft can make up for another."""
    target, draft = (Tree(seed * 2 + i, 3, 4, 0) for i in range(2))
    assert expected_length(target, draft, 1, BLOCK) == pytest.approx(
        expected_length(target, draft, 1, STANDARD), abs=1e-6
    )
    gains = [
        expected_length(target, draft, depth, BLOCK)
        - expected_length(target, draft, depth, STANDARD)
        for depth in (2, 3)
    ]
    assert all(gain > 1e-4 for gain in gains)
