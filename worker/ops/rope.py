"""Rotary position embedding, rotate-half layout (Su et al., arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, [max_context, head_dim] in float32.

    Both halves of a row are the same angles; the first half of `sin` carries the minus sign of the
    rotation, so that a head is rotated as x · cos + roll(x, head_dim / 2) · sin.
    """

    cos: Tensor
    sin: Tensor

    def rows(self, positions: Tensor) -> RopeTable:
        """Return the rows of some positions [T], as [T, 1, head_dim] to broadcast over heads."""
        return RopeTable(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def make_rope_table(inverse_frequencies: Tensor, max_context: int) -> RopeTable:
    """Make the table of positions below max_context for frequencies [head_dim / 2]."""
    positions = torch.arange(max_context, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.float())
    cos, sin = angles.cos(), angles.sin()
    return RopeTable(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def apply_rope_(x: Tensor, table: RopeTable) -> None:
    """Rotate x [T, heads, head_dim] in place by the rows of a table, in float32.

    Twin: `reference_ops.rope`.
    """
    rotated = x.float()
    other_halves = rotated.roll(x.shape[-1] // 2, dims=-1)
    torch.addcmul(rotated.mul(table.cos), other_halves, table.sin, out=other_halves)
    x.copy_(other_halves)
