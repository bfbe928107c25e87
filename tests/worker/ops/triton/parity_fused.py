"""The fused Triton kernels against the torch ops they replace; see `test_kernels`."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from worker.ops import backends, rope
from worker.ops.paged_attention import write_kv
from worker.ops.step import StepTensors
from worker.ops.triton import fused
from worker.ops.triton.fused import HeadNorms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# bfloat16 is cut, not rounded, in the interpreter; float16 is rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCES)
EPS = 1e-5


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    allowed = TOLERANCES[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 1), (3, 576), (2, 1024), (5, 1030)])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, width + 3, seed=1, dtype=dtype), draw(width, seed=2, dtype=dtype)
    out = torch.full_like(x, torch.nan)
    fused.rms_norm(x[:, :width], weight, EPS, out[:, :width])
    assert_close(out[:, :width], backends.rms_norm(x[:, :width], weight, EPS))
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 1024), (4, 1536), (2, 2049)])
def test_gated_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = draw(rows, 2 * width, seed=1, dtype=dtype) * 4
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_close(fused.gated_mul(gate_up), (functional.silu(gate) * up).to(dtype))
    wanted = (functional.gelu(gate, approximate="tanh") * up).to(dtype)
    assert_close(fused.gated_mul(gate_up, "gelu"), wanted)


def make_step(rows: int, num_slots: int) -> StepTensors:
    generator = torch.Generator().manual_seed(rows)
    positions = torch.randint(0, 200, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=generator, dtype=torch.int32)[:rows]
    none = torch.zeros(0, dtype=torch.int32)
    return StepTensors(none, positions.to(DEVICE), slots.to(DEVICE), none, none, none, none, 1, 200)


def rope_table(head_dim: int) -> rope.RopeTable:
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return rope.make_rope_table(frequencies.to(DEVICE), 200)


def expected(
    qkv: Tensor,
    cache: Tensor,
    step: StepTensors,
    table: rope.RopeTable | None,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor]:
    qkv, cache = qkv.clone(), cache.clone()
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    every = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    heads = every.shape[1] - 2 * kv_heads
    queries, keys = every[:, :heads], every[:, heads:-kv_heads]
    if norms is not None:
        queries.copy_(backends.rms_norm(queries, norms.query, norms.eps))
        keys.copy_(backends.rms_norm(keys, norms.key, norms.eps))
    if table is not None:
        rope.apply_rope_(every[:, :-kv_heads], table.rows(step.positions))
    write_kv(cache, every[:, heads:].flatten(1), step.slots)
    return queries.flatten(1), cache


ROTATED = [
    (head_dim, sharing, bool((i + j) % 2))
    for i, sharing in enumerate((1, 3, 4, 8))
    for j, head_dim in enumerate((64, 80, 96, 128, 256))
]


@pytest.mark.parametrize(("head_dim", "sharing", "has_norms"), ROTATED)
def test_rotation_and_write(head_dim: int, sharing: int, has_norms: bool) -> None:
    step = make_step(7, 48)
    cache = draw(3, 2, 2, 16, head_dim, seed=1)
    qkv = draw(7, (2 * sharing + 4) * head_dim, seed=2)
    norms = HeadNorms(draw(head_dim, seed=3), draw(head_dim, seed=4), EPS) if has_norms else None
    table = rope_table(head_dim)
    queries, written = expected(qkv, cache, step, table, norms)
    keys_and_values = qkv[:, 2 * sharing * head_dim :].clone()
    fused.rotate_and_write(qkv, cache, step, table, norms)
    assert_close(qkv[:, : 2 * sharing * head_dim], queries)
    assert_close(cache, written)
    assert torch.equal(qkv[:, 2 * sharing * head_dim :], keys_and_values)


HALVES = [
    (
        (torch.float16, torch.bfloat16)[(rotates + has_norms + bool(rows)) % 2],
        has_norms,
        rotates,
        rows,
    )
    for rows in (0, 1, 20)
    for rotates in (False, True)
    for has_norms in (False, True)
]


@pytest.mark.parametrize(("dtype", "has_norms", "rotates", "rows"), HALVES)
def test_half_precision(dtype: torch.dtype, has_norms: bool, rotates: bool, rows: int) -> None:
    step = make_step(rows, 24)
    cache = draw(3, 2, 3, 8, 64, seed=1, dtype=dtype)
    wide = draw(rows, 16 * 64, seed=2, dtype=dtype)
    qkv = wide[:, : 15 * 64]
    weights = draw(2, 64, seed=3, dtype=dtype)
    norms = HeadNorms(weights[0], weights[1], EPS) if has_norms else None
    table = rope_table(64) if rotates else None
    queries, written = expected(qkv, cache, step, table, norms)
    fused.rotate_and_write(qkv, cache, step, table, norms)
    assert_close(qkv[:, : 9 * 64], queries)
    assert_close(cache, written)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    step = make_step(9, 48)
    qkv = draw(9, 5 * 64, seed=2)
    together, singly = draw(3, 2, 1, 16, 64, seed=1), draw(3, 2, 1, 16, 64, seed=1)
    rows, table = qkv.clone(), rope_table(64)
    fused.rotate_and_write(qkv, together, step, table)
    for index in range(9):
        mine = slice(index, index + 1)
        own = StepTensors(
            *[step.token_ids, step.positions[mine], step.slots[mine], *[step.token_ids] * 4],
            *(1, 200),
        )
        fused.rotate_and_write(rows[mine], singly, own, table)
    assert torch.equal(rows, qkv)
    assert torch.equal(together, singly)


def test_eight_bits_are_rounded_as_torch_rounds_them() -> None:
    """The numbers have neighbours to be mistaken for: normal, subnormal, halfway, too large."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    halfway = (every[1:] + every[:-1]) / 2
    values = torch.cat((every, halfway, halfway * (1 + 1e-6), halfway * (1 - 1e-6)))
    values = torch.cat((values, torch.tensor([449.0, -1e9, 1e-9])))
    values = functional.pad(values, (0, -len(values) % 128)).view(-1, 128).to(DEVICE)
    rows = len(values)
    qkv = torch.cat((torch.zeros_like(values), values, -values), dim=1)
    cache = torch.zeros(2, 2, 1, 16, 128, device=DEVICE).to(torch.float8_e4m3fn)
    step = make_step(rows, 32)
    fused.rotate_and_write(qkv, cache, step, None)
    written = cache.float()[step.slots // 16, :, 0, step.slots % 16]
    wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(written[:, 0], wanted, rtol=0, atol=0)
    torch.testing.assert_close(written[:, 1], -wanted, rtol=0, atol=0)


def test_a_cache_of_eight_bits_has_a_scale_for_each_head() -> None:
    step = make_step(6, 48)
    qkv = draw(6, 8 * 64, seed=2)
    scales = torch.tensor([[0.02, 0.01], [0.03, 0.5]], device=DEVICE)
    table = rope_table(64)
    plain = torch.zeros(3, 2, 2, 16, 64, device=DEVICE)
    cache = plain.to(torch.float8_e4m3fn)
    _, written = expected(qkv, plain, step, table, None)
    fused.rotate_and_write(qkv, cache, step, table, scales=scales)
    found = cache.float() * scales[:, :, None, None]
    # Four bits: half of the last is a sixteenth; below 2^-6 steps are 2^-9 of the scale.
    torch.testing.assert_close(found, written, rtol=1 / 16 + 1e-5, atol=0.5 * 2**-10)
