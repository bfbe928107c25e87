"""Grouped products of experts against torch, one expert after the other; see `test_kernels`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.model.block_weights import random_blocks
from worker.ops.experts import Experts, mix_experts
from worker.ops.linear import DenseLinear
from worker.ops.planes import PlaneWeight, pack
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


@pytest.mark.parametrize(
    ("rows", "kinds", "hidden", "inner", "dtype"),
    [
        (0, ("Q4_K", "Q6_K"), 256, 256, torch.float32),
        (1, ("Q4_K", "Q6_K"), 256, 256, torch.float32),
        (70, ("Q4_1", "Q5_0"), 288, 96, torch.bfloat16),
        (70, (None, "Q5_1"), 96, 160, torch.bfloat16),
        (17, ("Q4_0", None), 96, 40, torch.float32),
        (3, ("Q5_K", "Q8_0"), 256, 96, torch.float32),
    ],
)
def test_packed_experts_are_those_of_the_torch_twin(
    rows: int, kinds: tuple[str | None, str | None], hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """A weight of a layer may be dense beside a packed one."""
    count = 7
    dense = make(count, hidden, inner, 2, dtype)
    assert dense.stacks is not None
    stacks: list[Tensor | PlaneWeight] = list(dense.stacks)
    wanted: list[tuple[DenseLinear, ...]] = []
    for index, (kind, outputs, inputs) in enumerate(
        zip(kinds, (2 * inner, hidden), (hidden, inner), strict=True)
    ):
        whole = dense.stacks[index]
        if kind is not None:
            size = 2 * inputs**-0.5
            packed = pack([random_blocks(kind, count * outputs, inputs, size=size)], DEVICE)
            assert packed is not None
            (stacks[index],) = packed
            whole = packed[0].decode().to(dtype).view(count, outputs, inputs)
        wanted.append(tuple(map(DenseLinear, whole)))
    x = draw(rows, hidden, seed=4, dtype=dtype)
    found = BACKEND.mix_experts(x, replace(dense, stacks=(stacks[0], stacks[1])))
    other = replace(dense, gate_up=wanted[0], down=wanted[1])
    expected = mix_experts(x, other, BACKEND.gated).float()
    allowed = TOLERANCES[dtype] * (float(expected.abs().max()) if rows else 1.0)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=allowed)


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
