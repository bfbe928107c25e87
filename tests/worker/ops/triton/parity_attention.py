"""The Triton kernels of attention against torch; see `test_kernels`."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.ops.paged_attention import paged_attention
from worker.ops.step import StepTensors
from worker.ops.triton import attention
from worker.ops.triton.attention import AttentionShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# bfloat16 is cut, not rounded, in the interpreter; float16 is rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# (context, rows): one token on, before and after the end of a block; drafts; a chunk; no row.
SCALE = 0.3  # of scores, where it is not the usual one
MIXED = [(1, 1), (16, 1), (0, 0), (63, 5), (90, 40), (47, 1), (17, 17)]
DECODE = [(1, 1), (33, 1), (300, 1), (16, 1), (700, 1)]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_step(
    spans: list[tuple[int, int]], block_size: int = 16, first_position: int = 0
) -> tuple[StepTensors, int]:
    """Blocks are in no order, and no sequence has the last one."""
    counts = [-(-context // block_size) for context, _ in spans]
    pool = list(range(1 + sum(counts)))
    random.Random(len(pool)).shuffle(pool)
    tables = torch.full((len(spans), max(counts, default=0)), pool.pop(), dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([pool.pop() for _ in range(count)], dtype=torch.int32)
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
        max_rows=max((count for _, count in spans), default=0),
        max_context=max((context for context, _ in spans), default=0),
        first_position=first_position,
    )
    return step, 1 + sum(counts)


def on_device(step: StepTensors) -> StepTensors:
    values = {name: getattr(step, name) for name in StepTensors.__slots__}
    return StepTensors(
        **{
            name: value.to(DEVICE) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
    )


def attend(
    queries: Tensor,
    cache: Tensor,
    step: StepTensors,
    *,
    num_sms: int = 1,
    window: int | None = None,
    scales: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    there = on_device(step)
    heads, head_dim = queries.shape[1:]
    scale = head_dim**-0.5 if not softcap else SCALE
    shape = AttentionShape(heads, cache.shape[2], head_dim, cache.shape[3], scale, softcap)
    plan = attention.plan(there, shape, num_sms)
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
    allowed = TOLERANCES[found.dtype] * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=allowed)


def rows_of(step: StepTensors, index: int) -> slice:
    return slice(int(step.query_starts[index]), int(step.query_starts[index + 1]))


def alone(step: StepTensors, index: int) -> StepTensors:
    mine, context = rows_of(step, index), step.context_lens[index : index + 1]
    count = mine.stop - mine.start
    width = -(-int(context) // 16)
    return replace(
        step,
        token_ids=step.token_ids[mine],
        positions=step.positions[mine],
        slots=step.slots[mine],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=context,
        block_tables=step.block_tables[index : index + 1, :width].contiguous(),
    )


def spoil_unused(cache: Tensor, step: StepTensors) -> Tensor:
    block_size = cache.shape[3]
    held = torch.zeros(len(cache), block_size, dtype=torch.bool)
    for table, context in zip(step.block_tables.long(), step.context_lens.tolist(), strict=True):
        positions = torch.arange(context)
        held[table[positions // block_size], positions % block_size] = True
    return cache.masked_fill(~held[:, None, None, :, None], torch.nan)


@pytest.mark.parametrize(
    ("sharing", "head_dim"),
    [(1, 64), (3, 64), (3, 80), (4, 96), (4, 128), (8, 128), (1, 256), (8, 256)],
)
def test_any_mixture_of_work(sharing: int, head_dim: int) -> None:
    step, num_blocks = make_step(MIXED)
    cache = draw(num_blocks, 2, 1, 16, head_dim, seed=1)
    queries = draw(len(step.positions), sharing, head_dim, seed=2)
    found = attend(queries, spoil_unused(cache, step), step)
    assert_close(found, expected(queries, cache, step))


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.bfloat16, 16), (torch.float16, 128), (torch.bfloat16, 8)]
)
def test_half_precision_and_other_blocks(dtype: torch.dtype, block_size: int) -> None:
    step, num_blocks = make_step([*MIXED, (300, 3)], block_size)
    cache = draw(num_blocks, 2, 2, block_size, 64, seed=1, dtype=dtype)
    queries = draw(len(step.positions), 10, 64, seed=2, dtype=dtype)[:, :6]
    assert_close(attend(queries, cache, step), expected(queries, cache, step))


def test_a_cache_of_fewer_bits_than_the_queries() -> None:
    step, num_blocks = make_step(MIXED)
    cache = draw(num_blocks, 2, 2, 16, 64, seed=1, dtype=torch.bfloat16)
    queries = draw(len(step.positions), 6, 64, seed=2)
    assert_close(attend(queries, cache, step), expected(queries, cache, step))


def test_the_torch_twin() -> None:
    step, num_blocks = make_step([span for span in MIXED if span[1]])
    cache = draw(num_blocks, 2, 3, 16, 64, seed=1)
    queries = draw(len(step.positions), 9, 64, seed=2)
    assert_close(attend(queries, cache, step), paged_attention(queries, cache, step).double())


@pytest.mark.parametrize("window", [None, 40])
def test_a_softcap_and_another_scale(window: int | None) -> None:
    """Scores are far beyond the cap."""
    step, num_blocks = make_step([span for span in (*MIXED, (700, 1)) if span[1]])
    cache = draw(num_blocks, 2, 2, 16, 64, seed=1)
    queries = draw(len(step.positions), 4, 64, seed=2)
    found = attend(queries, spoil_unused(cache, step), step, window=window, softcap=2.0)
    twin = paged_attention(queries, cache, step, window, SCALE, 2.0)
    assert_close(found, twin.double())


def test_splits_are_merged() -> None:
    step, num_blocks = make_step([*DECODE, (513, 4)])
    cache = draw(num_blocks, 2, 2, 16, 64, seed=1)
    queries = draw(len(step.positions), 6, 64, seed=2)
    found = attend(queries, spoil_unused(cache, step), step)
    assert_close(found, expected(queries, cache, step))
    for num_sms in (3, 132):
        assert torch.equal(attend(queries, cache, step, num_sms=num_sms), found)


@pytest.mark.full
def test_a_long_context_has_longer_splits() -> None:
    most = attention.SPLIT_TOKENS * attention.MAX_SPLITS
    step, num_blocks = make_step([(most + 300, 1), (most, 1), (5, 1)])
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1)
    queries = draw(3, 1, 64, seed=2)
    assert_close(attend(queries, cache, step), expected(queries, cache, step))


@pytest.mark.full
def test_a_row_alone_is_the_row_in_a_batch() -> None:
    """Neither neighbours nor the width of tables nor the device's size change a bit."""
    step, num_blocks = make_step([*DECODE, (520, 3), (90, 70), (40, 17)])
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1)
    queries = draw(len(step.positions), 3, 64, seed=2)
    whole = attend(queries, cache, step, num_sms=132)
    for index in range(len(step.context_lens)):
        mine = rows_of(step, index)
        assert torch.equal(attend(queries[mine], cache, alone(step, index)), whole[mine])


@pytest.mark.parametrize(
    ("window", "first_position"), [(1, 20), (16, 0), (40, 0), (40, 20), (290, 20)]
)
def test_windows(window: int, first_position: int) -> None:
    """Blocks that no row sees any more may belong to others, and hold anything."""
    step, num_blocks = make_step([*MIXED, (330, 2), (700, 1)], first_position=first_position)
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1)
    queries = draw(len(step.positions), 4, 64, seed=2)
    wanted = expected(queries, cache, step, window)
    tables = step.block_tables.clone()
    for index, context in enumerate(step.context_lens.tolist()):
        mine = rows_of(step, index)
        lowest = max(first_position, context - (mine.stop - mine.start) - window + 1)
        tables[index, : max(0, lowest) // 16] = num_blocks
    spoiled = torch.cat((spoil_unused(cache, step), torch.full_like(cache[:1], torch.nan)))
    found = attend(queries, spoiled, replace(step, block_tables=tables), window=window)
    assert_close(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize("first_position", [1, 17, 270])
def test_no_row_sees_below_the_first_position(first_position: int) -> None:
    """Keys below it may be nan; a row whose context ends below it is zero."""
    step, num_blocks = make_step([*MIXED, (600, 2)], first_position=first_position)
    cache = draw(num_blocks, 2, 2, 16, 64, seed=1)
    queries = draw(len(step.positions), 6, 64, seed=2)
    wanted = expected(queries, cache, step)
    for table, context in zip(step.block_tables.long(), step.context_lens.tolist(), strict=True):
        positions = torch.arange(min(first_position, context))
        cache[table[positions // 16], :, :, positions % 16] = torch.nan
    assert_close(attend(queries, cache, step), wanted)


@pytest.mark.full
@pytest.mark.parametrize("span", [(40, 6), (90, 40), (300, 3)])
@pytest.mark.parametrize("plane", [0, 1])
def test_a_row_that_is_nan_spoils_none_before_it(span: tuple[int, int], plane: int) -> None:
    step, num_blocks = make_step([span])
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1)
    queries = draw(span[1], 3, 64, seed=2)
    clean = attend(queries, cache, step)
    position = span[0] - 2
    bad = cache.clone()
    bad[step.block_tables[0, position // 16].long(), plane, 0, position % 16, 5] = torch.nan
    found, twin = attend(queries, bad, step), paged_attention(queries, bad.clone(), step)
    assert torch.equal(found[:-2], clean[:-2])
    assert found[-2:].isnan().all()
    assert torch.equal(found.isnan(), twin.isnan())


@pytest.mark.full
def test_many_query_heads_of_one_kv_head() -> None:
    """There are more rows than a tile of the short path has."""
    step, num_blocks = make_step(MIXED)
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1)
    queries = draw(len(step.positions), 20, 64, seed=2)
    assert_close(attend(queries, cache, step), expected(queries, cache, step))


def test_nothing_to_do() -> None:
    cache = draw(2, 2, 1, 16, 64, seed=1)
    empty, _ = make_step([])
    assert attend(draw(0, 3, 64, seed=2), cache, empty).shape == (0, 192)
    padded = replace(
        make_step([(5, 1), (1, 1)])[0], context_lens=torch.tensor([5, 0], dtype=torch.int32)
    )
    queries = draw(2, 3, 64, seed=2)
    found = attend(queries, cache.repeat(2, 1, 1, 1, 1), padded)
    assert found[0].isfinite().all()
    assert not found[1].any()


@pytest.mark.parametrize("spans", [MIXED, [*DECODE, (520, 3)]])
def test_a_cache_of_eight_bits(spans: list[tuple[int, int]]) -> None:
    step, num_blocks = make_step(spans)
    cache = draw(num_blocks, 2, 2, 16, 64, seed=1).mul(50).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.02, 0.01], [0.03, 0.5]])
    queries = draw(len(step.positions), 6, 64, seed=2)
    found = attend(queries, cache, step, scales=scales)
    whole = cache.float() * scales[:, :, None, None]
    assert_close(found, expected(queries, whole, step))


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not name.startswith(("aten._local_scalar_dense", "aten._to_copy", "aten.copy_")), (
            name
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_the_host_reads_nothing() -> None:
    """A graph may hold the plan of a step and the run of a layer."""
    step, num_blocks = make_step([*MIXED, *DECODE])
    cache = draw(num_blocks, 2, 1, 16, 64, seed=1).to(DEVICE)
    queries = draw(len(step.positions), 3, 64, seed=2).to(DEVICE)
    out = torch.empty(len(queries), 192, device=DEVICE)
    there = on_device(step)
    launched: list[object] = []
    with pytest.MonkeyPatch.context() as patch, NoReads():
        for name in ("_split_kernel", "_merge_kernel", "_chunk_kernel"):
            patch.setattr(attention, name, Launches(launched))
        plan = attention.plan(there, AttentionShape(3, 1, 64, 16, 0.125), 132)
        attention.run(queries, cache, plan, out)
    assert len(launched) == 3


class Launches:
    """Replaces a kernel and lists the grids it is launched on."""

    def __init__(self, launched: list[object]) -> None:
        self._launched = launched

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: self._launched.append(grid)


def test_splits_follow_from_the_context_programs_from_the_batch() -> None:
    assert [attention.num_splits(n) for n in (0, 1, 256, 257, 8192, 1 << 20)] == [
        0,
        1,
        1,
        2,
        32,
        64,
    ]
    assert attention.num_programs(32, 8, 132) == 32
    assert attention.num_programs(32, 64 * 8, 132) == 3
    assert attention.num_programs(32, 4096, 132) == 1
    assert attention.num_programs(0, 0, 132) == 1
