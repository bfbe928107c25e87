"""Verification by rejection is exact: enumerated over all drafts and all decisions, no sampling."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from tests.depth import worlds
from worker.ops.drafted import DraftBatch
from worker.ops.rejection import BLOCK, METHODS, STANDARD, thresholds
from worker.ops.rejection_torch import residuals


def distribution(generator: torch.Generator, size: int, zeros: int) -> torch.Tensor:
    weights = torch.rand(size, generator=generator)
    weights[torch.randperm(size, generator=generator)[:zeros]] = 0
    return weights / weights.sum()


class Tree:
    def __init__(self, seed: int, size: int, depth: int, zeros: int) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(seed)
        self._rows = {
            context: distribution(generator, size, zeros)
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


def emitted(target: Tree, draft: Tree, depth: int, method: str) -> dict[tuple[int, ...], float]:
    """Enumerate all drafts, and all that production may decide about each."""
    every = list(itertools.product(range(target.size), repeat=depth))
    rows = [torch.cat((target.path(x), target.after(x).float()[None])).log() for x in every]
    batch = DraftBatch(
        torch.tensor(every),
        torch.stack(rows),
        torch.stack([draft.path(x) for x in every]),
        torch.full((len(every),), depth),
    )
    limits = thresholds(batch, method)
    result = dict.fromkeys(itertools.product(range(target.size), repeat=depth + 1), 0.0)
    for b, x in enumerate(every):
        q = draft.probability(x)
        if q == 0:
            continue
        for count, share in enumerate(shares(limits.values[b].tolist(), method)):
            last = target.after(x)
            if count < depth and share > 0:
                shift = limits.log_weights[b, count] - rows[b][count].double().logsumexp(-1)
                rest = residuals(rows[b][None, count], draft.path(x)[None, count], shift[None])[0]
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
    every = list(itertools.product(range(target.size), repeat=depth))
    rows = [torch.cat((target.path(x), target.after(x).float()[None])).log() for x in every]
    batch = DraftBatch(
        torch.tensor(every),
        torch.stack(rows),
        torch.stack([draft.path(x) for x in every]),
        torch.full((len(every),), depth),
    )
    limits = thresholds(batch, method).values.tolist()
    return math.fsum(
        draft.probability(x) * count * share
        for x, own in zip(every, limits, strict=True)
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
