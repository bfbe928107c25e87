"""Grouped products of experts against torch, one expert after the other; see `test_kernels`."""

import pytest
import torch
from torch import Tensor

from worker.ops.experts import Experts, mix_experts
from worker.ops.linear import DenseLinear
from worker.ops.triton.backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = TritonBackend(DEVICE)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise.to(DEVICE, dtype)


def make(count: int, hidden: int, inner: int, per_token: int, dtype: torch.dtype) -> Experts:
    stacks = (
        draw(count, 2 * inner, hidden, seed=2, dtype=dtype) * hidden**-0.5,
        draw(count, hidden, inner, seed=3, dtype=dtype) * inner**-0.5,
    )
    router = draw(count, hidden, seed=1, dtype=dtype)
    router[0] = 0
    return Experts(
        ExactLinear(router),
        tuple(DenseLinear(weight) for weight in stacks[0]),
        tuple(DenseLinear(weight) for weight in stacks[1]),
        per_token,
        True,
        stacks,
    )


class ExactLinear(DenseLinear):
    """In float64 the rounding that depends on the batch does not show."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x.double() @ self.weight.double().T


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("rows", "count", "hidden", "inner", "per_token"),
    [
        (0, 4, 64, 32, 2),
        (1, 4, 64, 32, 1),
        (200, 3, 65, 24, 2),
        (70, 40, 128, 130, 4),
        (5, 3, 96, 40, 3),
    ],
)
def test_the_torch_twin(
    rows: int, count: int, hidden: int, inner: int, per_token: int, dtype: torch.dtype
) -> None:
    """Sizes are no multiples of a tile's, and some experts are never chosen."""
    mixture = make(count, hidden, inner, per_token, dtype)
    x = draw(rows, hidden, seed=4, dtype=dtype)
    found = BACKEND.mix_experts(x, mixture)
    wanted = mix_experts(x, mixture, BACKEND.gated)
    largest = float(wanted.float().abs().max()) if rows else 1.0
    allowed = TOLERANCES[dtype] * largest
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=allowed)


@pytest.mark.full
def test_a_row_alone_is_the_row_in_a_batch() -> None:
    """In the interpreter rows are equal to rounding only: a tile's rows are summed in another
    order.
    """
    allowed = 0.0 if DEVICE.type == "cuda" else 1e-6
    mixture, x = make(3, 96, 40, 2, torch.float32), draw(150, 96, seed=5)
    together = BACKEND.mix_experts(x, mixture)
    for first, count in ((0, 1), (149, 1), (60, 70)):
        alone = BACKEND.mix_experts(x[first : first + count], mixture)
        wanted = together[first : first + count]
        torch.testing.assert_close(alone, wanted, rtol=allowed, atol=allowed)
