"""Rotary embedding against its twin."""

import pytest
import torch

from tests.support.model import reference_ops as reference
from worker.ops.rope import apply_rope_, make_rope_table

FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_agrees_with_its_twin(dtype: torch.dtype, tolerance: float) -> None:
    positions = torch.tensor([0, 1, 7, 63])
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = reference.rope(x, positions, FREQUENCIES)
    apply_rope_(x, make_rope_table(FREQUENCIES, 64).rows(positions))
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def test_turns_a_view_in_place() -> None:
    packed = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    before = packed.clone()
    rows = make_rope_table(FREQUENCIES, 8).rows(torch.tensor([3, 5]))
    apply_rope_(packed[:, :32].view(2, 2, 16), rows)
    assert torch.equal(packed[:, 32:], before[:, 32:])
    assert not torch.allclose(packed[:, :32], before[:, :32])
