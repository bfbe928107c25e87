"""Logits and statistics that the tests of sampling share."""

from collections.abc import Callable

import pytest
import torch

ChiSquare = Callable[[list[int], list[float]], float]


@pytest.fixture
def excess_chi_square() -> ChiSquare:
    """Pearson's statistic, in standard deviations above its mean, is below 5 but for one honest
    draw in a hundred thousand, and infinite when something impossible was counted.
    """

    def measure(counts: list[int], probabilities: list[float]) -> float:
        total = sum(counts)
        if any(count and p == 0 for count, p in zip(counts, probabilities, strict=True)):
            return float("inf")
        pairs = [(c, p * total) for c, p in zip(counts, probabilities, strict=True) if p > 0]
        statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
        freedom = len(pairs) - 1
        return (statistic - freedom) / (2 * freedom) ** 0.5 if freedom else statistic

    return measure


@pytest.fixture
def draw_logits() -> Callable[..., torch.Tensor]:
    def draw(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale

    return draw
