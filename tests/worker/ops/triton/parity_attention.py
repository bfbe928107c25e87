"""The Triton kernels of attention against torch; run by `test_kernels`, on a GPU, or in Triton's
interpreter where there is none (it must be chosen before Triton is imported).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from worker.ops.paged_attention import paged_attention
from worker.ops.step import StepTensors
from worker.ops.triton import attention
from worker.ops.triton.attention import AttentionShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# bfloat16 is cut, not rounded, in the interpreter; float16 is rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# (context, rows): one token on, before and after the end of a block; drafts; a chunk; no row.
MIXED = [(1, 1), (16, 1), (17, 1), (0, 0), (63, 5), (90, 70), (47, 1), (40, 17)]
DECODE = [(1, 1), (33, 1), (300, 1), (16, 1), (700, 1)]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_step(
    spans: list[tuple[int, int]], block_size: int = 16, first_position: int = 0, shared: int = 0
) -> tuple[StepTensors, int]:
    """A step of sequences (context, rows) over blocks in no order, of which the first `shared` are
    those of all; and the number of blocks, one of which nobody has.
    """
    counts = [-(-context // block_size) for context, _ in spans]
    pool = list(range(shared + 1 + sum(counts)))
    random.Random(len(pool)).shuffle(pool)
    common = [pool.pop() for _ in range(shared)]
    tables = torch.zeros(len(spans), max(counts, default=0), dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        own = (common + [pool.pop() for _ in range(count)])[:count]
        row[:count] = torch.tensor(own, dtype=torch.int32)
    rows = torch.tensor([count for _, count in spans], dtype=torch.int32)
    starts = torch.cat((rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)))
    positions = [
        position for context, count in spans for position in range(context - count, context)
    ]
    none = torch.zeros(len(positions), dtype=torch.int32)
    step = StepTensors(
        token_ids=none,
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=none,
        query_starts=starts,
        context_lens=torch.tensor([context for context, _ in spans], dtype=torch.int32),
        block_tables=tables,
        sample_rows=none,
        first_position=first_position,
    )
    return step, shared + 1 + sum(counts)


def attend(
    queries: Tensor,
    cache: Tensor,
    step: StepTensors,
    *,
    num_sms: int = 1,
    shared_tokens: int = 0,
    window: int | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The kernels' answer, on the CPU."""
    there = StepTensors(
        *(
            value.to(DEVICE) if isinstance(value, Tensor) else value
            for value in (getattr(step, name) for name in StepTensors.__slots__)
        )
    )
    shape = AttentionShape(queries.shape[1], cache.shape[2], queries.shape[2], cache.shape[3])
    max_rows = int(step.query_starts.diff().max()) if len(step.context_lens) else 0
    max_context = int(step.context_lens.max()) if len(step.context_lens) else 0
    plan = attention.plan(there, shape, max_rows, max_context, num_sms, shared_tokens)
    out = torch.full((len(queries), queries.shape[1] * queries.shape[2]), torch.nan)
    out = out.to(DEVICE, queries.dtype)
    # Workspace that was not written is not read.
    plan.partials.fill_(torch.nan)
    plan.masses.fill_(torch.nan)
    scales = None if scales is None else scales.to(DEVICE)
    attention.run(queries.to(DEVICE), cache.to(DEVICE), plan, out, window, scales)
    return out.cpu()


def expected(
    queries: Tensor, cache: Tensor, step: StepTensors, window: int | None = None
) -> Tensor:
    """Attention by one dense masked softmax for each sequence, in float64."""
    num_rows, heads, head_dim = queries.shape
    out = torch.zeros(num_rows, heads, head_dim, dtype=torch.float64)
    starts = step.query_starts.tolist()
    for index, context in enumerate(step.context_lens.tolist()):
        mine = slice(starts[index], starts[index + 1])
        held = cache[step.block_tables[index].long()].double()
        held = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        keys, values = held.repeat_interleave(heads // cache.shape[2], dim=1)
        scores = torch.einsum("qhd,hsd->hqs", queries[mine].double(), keys) * head_dim**-0.5
        at, to = step.positions[mine].unsqueeze(1), torch.arange(context)
        seen = (to <= at) & (to >= step.first_position)
        if window is not None:
            seen &= to > at - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[mine] = torch.einsum("hqs,hsd->qhd", weights, values)
    return out.flatten(1)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Up to the rounding of the found tensor's type, of the largest value."""
    allowed = TOLERANCES[found.dtype] * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("sharing", [1, 3, 4, 8])
def test_any_mixture_of_work(sharing: int, head_dim: int) -> None:
    """Single tokens, drafts and chunks, for every number of query heads and every head size."""
    step, num_blocks = make_step(MIXED)
    cache = draw(num_blocks, 2, 2, 16, head_dim, seed=1)
    queries = draw(len(step.positions), 2 * sharing, head_dim, seed=2)
    assert_close(attend(queries, cache, step), expected(queries, cache, step))
