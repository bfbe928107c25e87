"""Norms and rotary embedding against their twins."""

import pytest
import torch

from tests.support.model import reference_ops as reference
from worker.ops.backends import rms_norm
from worker.ops.rope import apply_rope_, make_rope_table

FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_a_norm_agrees_with_its_twin(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(5, 96, generator=generator) * 7).to(dtype)
    weight = torch.rand(96, generator=generator).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)


def test_a_norm_sums_squares_in_float32() -> None:
    """Squares that overflow float16 do not spoil the result."""
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    result = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(result, torch.ones_like(result))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_a_rotation_agrees_with_its_twin(dtype: torch.dtype, tolerance: float) -> None:
    positions = torch.tensor([0, 1, 7, 63])
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = reference.rope(x, positions, FREQUENCIES)
    apply_rope_(x, make_rope_table(FREQUENCIES, 64).rows(positions))
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def test_a_rotation_turns_a_view_in_place() -> None:
    packed = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    before = packed.clone()
    rows = make_rope_table(FREQUENCIES, 8).rows(torch.tensor([3, 5]))
    apply_rope_(packed[:, :32].view(2, 2, 16), rows)
    assert torch.equal(packed[:, 32:], before[:, 32:])
    assert not torch.allclose(packed[:, :32], before[:, :32])
