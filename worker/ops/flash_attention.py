"""Attention by the package flash-attn (Dao, arXiv:2307.08691); another backend does the rest.

Its paged kernel takes keys and values by their strides, so the cache has the layout of all
backends; its blocks hold a multiple of 256 tokens. The split of a context depends on the batch, so,
unlike with the other backends, the last bits of a row do too.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.ops.backends import TORCH, Attention, AttentionShape, Backend
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors

# The limits of the package's paged kernel.
BLOCK_TOKENS = 256
HEAD_DIMS = range(8, 257, 8)
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)


class FlashBackend:
    """Implements `Backend`: attention by `flash_attn_varlen_func`, the rest by `base`."""

    name = "flash-attn"

    def __init__(self, base: Backend, flash_attn_varlen_func: Any) -> None:
        self._plan_base = base.plan
        self._attend = flash_attn_varlen_func
        self.product, self.rms_norm, self.gated = base.product, base.rms_norm, base.gated
        self.mix_experts, self.draw, self.mask = base.mix_experts, base.draw, base.mask

    def plan(self, step: StepTensors, shape: AttentionShape, rope: RopeTable) -> Attention:
        """Compute where each context begins in their concatenation. Steps that do not see the first
        positions (those of draft heads) use torch.
        """
        if step.first_position:
            return TORCH.plan(step, shape, rope)
        # This plan only writes, so it needs no memory for partial results.
        writer = self._plan_base(dataclasses.replace(step, max_rows=0, max_context=0), shape, rope)
        ends = step.context_lens.cumsum(0, dtype=torch.int32)
        return _FlashAttention(
            self._attend, writer.write, step, shape, functional.pad(ends, (1, 0))
        )


@dataclass(frozen=True, slots=True)
class _FlashAttention:
    attend: Any
    write: Callable[..., None]
    step: StepTensors
    shape: AttentionShape
    context_starts: Tensor

    def run(
        self,
        queries: Tensor,
        cache: Tensor,
        window: int | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        step, shape = self.step, self.shape
        keys, values = cache.transpose(2, 3).unbind(1)
        attended: Tensor = self.attend(
            queries,
            keys,
            values,
            step.query_starts,
            self.context_starts,
            step.max_rows,
            step.max_context,
            softmax_scale=shape.scale,
            causal=True,
            # The package does not count the row's own position.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=shape.softcap,
            block_table=step.block_tables,
        )
        return attended.flatten(1)
