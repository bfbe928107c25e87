"""Attention over a paged cache against a loop over tokens, for any mixture of work."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.model import reference_ops as reference
from tests.support.model.measured_sums import assert_alike
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.ops.paged_attention import padded_context, paged_attention, write_kv
from worker.types import ScheduledSequence

BLOCK_SIZE = 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    spans: tuple[tuple[int, int], ...]
    kv_heads: int
    sharing: int
    seed: int
    window: int | None


works = st.builds(
    Work,
    st.lists(
        st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 150))),
        min_size=1,
        max_size=5,
    ).map(tuple),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2**16),
    st.none() | st.integers(1, 90),
)


def schedule(work: Work) -> list[ScheduledSequence]:
    """Blocks come from a shuffled pool, so that no table is in order."""
    counts = [-(-(start + length) // BLOCK_SIZE) for start, length in work.spans]
    pool = list(range(sum(counts) + 1))
    random.Random(work.seed).shuffle(pool)
    tables = [[pool.pop() for _ in range(count)] for count in counts]
    return [
        ScheduledSequence(index, [0] * length, start, table)
        for index, ((start, length), table) in enumerate(zip(work.spans, tables, strict=True))
    ]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    sequences: list[ScheduledSequence],
    queries: dict[int, torch.Tensor],
    cache: torch.Tensor,
    window: int | None = None,
) -> dict[int, torch.Tensor]:
    step = StepBatch(sequences, DeviceState(BLOCK_SIZE, CPU)).tensors
    rows = torch.cat([queries[sequence.seq_id] for sequence in sequences])
    with torch.inference_mode():
        out = paged_attention(rows, cache, step, window)
    parts = out.split([len(sequence.token_ids) for sequence in sequences])
    return {s.seq_id: part for s, part in zip(sequences, parts, strict=True)}


@given(works)
@examples(40)
def test_agrees_with_its_twin_on_any_step(work: Work) -> None:
    sequences = schedule(work)
    num_blocks = sum(len(s.block_table) for s in sequences) + 1
    cache = draw(num_blocks, 2, work.kv_heads, BLOCK_SIZE, 16, seed=work.seed)
    heads = work.kv_heads * work.sharing
    queries = {
        s.seq_id: draw(len(s.token_ids), heads, 16, seed=work.seed + s.seq_id + 1)
        for s in sequences
    }
    result = run(sequences, queries, cache, work.window)
    expected = reference.paged_attention(
        torch.cat([queries[s.seq_id] for s in sequences]),
        cache,
        [s.block_table for s in sequences],
        [range(s.start, s.start + len(s.token_ids)) for s in sequences],
        work.window,
    )
    actual = torch.cat([result[s.seq_id] for s in sequences])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_groups_and_tiles_leave_a_row_alone(dtype: torch.dtype) -> None:
    length, heads = 420, 9
    cache = draw(4 * 53, 2, 3, BLOCK_SIZE, 64, seed=1, dtype=dtype)
    tables = [list(range(i, 4 * 53, 4)) for i in range(4)]
    queries = draw(length, heads, 64, seed=2, dtype=dtype)
    whole = run([ScheduledSequence(0, [0] * length, 0, tables[0])], {0: queries}, cache)[0]
    others = [
        ScheduledSequence(1, [0], 35, tables[1]),
        ScheduledSequence(2, [0], 413, tables[2]),
        ScheduledSequence(3, [0] * 9, 130, tables[3]),
    ]
    extra = {1: queries[:1], 2: queries[:1], 3: queries[:9]}
    for start, count in [(0, 2), (17, 1), (211, 1), (300, 1), (419, 1), (3, 3), (100, 200)]:
        part = queries[start : start + count]
        mine = ScheduledSequence(0, [0] * count, start, tables[0])
        alone = run([mine], {0: part}, cache)[0]
        together = run([*others, mine], {0: part, **extra}, cache)[0]
        assert_alike(alone, together)
        assert_alike(alone, whole[start : start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_any_length_give_the_same_rows(dtype: torch.dtype) -> None:
    length = 400
    cache = draw(50, 2, 3, BLOCK_SIZE, 64, seed=1, dtype=dtype)
    queries = draw(length, 9, 64, seed=2, dtype=dtype)

    def rows(start: int, count: int) -> torch.Tensor:
        chunk = ScheduledSequence(0, [0] * count, start, range(50))
        return run([chunk], {0: queries[start : start + count]}, cache)[0]

    whole = rows(0, length)
    for count in range(1, 270):
        assert_alike(rows(90, count), whole[90 : 90 + count])


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32, 64, 128]))
def test_a_padded_context_is_whole_blocks_and_never_splits_unevenly(
    length: int, block_size: int
) -> None:
    """MKL splits other lengths at a point that depends on them."""
    padded = padded_context(length, block_size)
    assert padded >= length
    assert padded % block_size == 0
    assert padded % 512 <= 192
    assert padded - length < max(block_size, 16) + 320


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("plane", [0, 1])
def test_a_row_does_not_depend_on_unseen_positions(value: float, plane: int) -> None:
    """Slots of other sequences and unwritten slots, which are nan, are never read."""
    table, end = list(range(0, 60, 2)), 230
    cache = draw(60, 2, 3, BLOCK_SIZE, 16, seed=1)
    queries = draw(end - 40, 9, 16, seed=2)
    chunk = ScheduledSequence(0, [0] * len(queries), 40, table)
    expected = run([chunk], {0: queries}, cache)[0]
    cache[1::2] = value
    cache[table[-1], :, :, end % BLOCK_SIZE :] = value
    assert torch.equal(run([chunk], {0: queries}, cache)[0], expected)
    cache[table[100 // BLOCK_SIZE], plane, 1, 100 % BLOCK_SIZE, 3] = value
    found = run([chunk], {0: queries}, cache)[0]
    assert torch.equal(found[:60], expected[:60])
    assert found[60:].isnan().all()


@pytest.mark.parametrize("plane", [0, 1])
def test_a_row_does_not_depend_on_positions_outside_its_window(plane: int) -> None:
    window, start, table = 50, 600, list(range(90))
    cache = draw(90, 2, 3, BLOCK_SIZE, 16, seed=1)
    queries = draw(110, 9, 16, seed=2)
    chunk = ScheduledSequence(0, [0] * 110, start, table)
    expected = run([chunk], {0: queries}, cache, window)[0]
    for position in (10, 570, 630):
        spoiled = cache.clone()
        spoiled[table[position // BLOCK_SIZE], plane, 1, position % BLOCK_SIZE, 3] = torch.nan
        found = run([chunk], {0: queries}, spoiled, window)[0]
        rows = torch.arange(start, start + 110)
        sees = (rows >= position) & (rows < position + window)
        assert torch.equal(found.isnan().all(-1), sees)
        assert torch.equal(found[~sees], expected[~sees])
    for row in (0, 49, 50, 109):
        alone = ScheduledSequence(0, [0], start + row, table)
        mine = run([alone], {0: queries[row : row + 1]}, cache, window)[0]
        assert_alike(mine, expected[row : row + 1])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("sharing", [1, 3, 40])
def test_scores_with_a_softcap(window: int | None, sharing: int) -> None:
    """Scores are c · tanh(score · scale / c)."""
    scale, cap, start, kv_heads = 0.3, 2.0, 300, 2
    cache = draw(50, 2, kv_heads, BLOCK_SIZE, 16, seed=1)
    queries = draw(90, kv_heads * sharing, 16, seed=2)

    def rows(first: int, count: int) -> torch.Tensor:
        chunk = ScheduledSequence(0, [0] * count, start + first, range(50))
        step = StepBatch([chunk], DeviceState(BLOCK_SIZE, CPU)).tensors
        return paged_attention(queries[first : first + count], cache, step, window, scale, cap)

    held = cache.transpose(0, 1).transpose(1, 2).reshape(2, kv_heads, -1, 16)[:, :, : start + 90]
    keys, values = held.double().repeat_interleave(sharing, dim=1)
    at, to = torch.arange(start, start + 90)[:, None], torch.arange(start + 90)
    seen = (to <= at) & (to > at - (window or 1000))
    scores = cap * torch.einsum("qhd,hsd->hqs", queries.double(), keys).mul(scale / cap).tanh()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqs,hsd->qhd", weights, values).flatten(1)
    whole = rows(0, 90)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-5)
    for first, count in [(0, 1), (89, 1), (3, 2), (17, 40)]:
        assert_alike(rows(first, count), whole[first : first + count])


def test_rows_see_nothing_below_the_first_position() -> None:
    cache = draw(9, 2, 2, BLOCK_SIZE, 16, seed=1)
    queries = draw(50, 4, 16, seed=2)
    step = StepBatch(
        [ScheduledSequence(0, [0] * 50, 1, range(9))], DeviceState(BLOCK_SIZE, CPU), 1
    ).tensors
    keys = cache.transpose(0, 1).transpose(1, 2).reshape(2, 2, -1, 16)[:, :, 1:51]
    mask = torch.ones(50, 50, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), *keys.repeat_interleave(2, dim=1), attn_mask=mask
    )
    cache[0, :, :, 0] = torch.nan
    found = paged_attention(queries, cache, step)
    torch.testing.assert_close(found, expected.transpose(0, 1).reshape(50, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "sharing"), [(3, 1), (3, 3), (2, 4), (1, 7), (1, 1)])
def test_a_drafts_row_is_the_row_that_decoding_gives(
    dtype: torch.dtype, kv_heads: int, sharing: int
) -> None:
    length, heads = 1100, kv_heads * sharing
    num_blocks = length // BLOCK_SIZE + 1
    cache = draw(3 * num_blocks, 2, kv_heads, BLOCK_SIZE, 64, seed=3, dtype=dtype)
    tables = [list(range(i, 3 * num_blocks, 3)) for i in range(3)]
    queries = draw(length, heads, 64, seed=4, dtype=dtype)

    def alone(position: int, table: int) -> torch.Tensor:
        decode = ScheduledSequence(0, [0], position, tables[table])
        return run([decode], {0: queries[position : position + 1]}, cache)[0]

    choose = random.Random(5)
    edges = [0, 1, 14, 30, 190, 300, 380, 505, 512, 700, 1020]
    for _ in range(25):
        starts = [max(0, choose.choice(edges) + choose.randint(-3, 3)) for _ in range(6)]
        near = choose.randint(0, 1000)  # these share a call although their lengths differ
        starts += [near + choose.randint(0, 60) for _ in range(4)]
        counts = [choose.choice([1, 2, 3, 4, 5, 9, 17, 32, 40]) for _ in starts[:-4]]
        counts += [choose.randint(2, 6) for _ in range(4)]
        step = [
            ScheduledSequence(i, [0] * count, start, tables[i % 3])
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        parts = {s.seq_id: queries[s.start : s.start + len(s.token_ids)] for s in step}
        found = run(step, parts, cache)
        for s in step:
            row = choose.randrange(len(s.token_ids))
            expected = alone(s.start + row, s.seq_id % 3)
            assert_alike(found[s.seq_id][row : row + 1], expected)


def test_write_kv_puts_every_token_into_its_slot() -> None:
    cache = torch.zeros(3, 2, 2, BLOCK_SIZE, 4)
    kv = draw(2, 16, seed=1)
    write_kv(cache, kv, torch.tensor([5, 2 * BLOCK_SIZE + 1], dtype=torch.int32))
    assert torch.equal(cache[0, :, :, 5].flatten(), kv[0])
    assert torch.equal(cache[2, :, :, 1].flatten(), kv[1])
    assert int(cache.count_nonzero()) == 32
