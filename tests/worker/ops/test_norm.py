"""Root-mean-square normalisation against its twin."""

import pytest
import torch

from tests.support.model import reference_ops as reference
from worker.ops.norm import rms_norm


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_agrees_with_its_twin(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(5, 96, generator=generator) * 7).to(dtype)
    weight = torch.rand(96, generator=generator).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)


def test_sums_squares_in_float32() -> None:
    """Squares that overflow float16 do not spoil the result."""
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    result = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(result, torch.ones_like(result))
