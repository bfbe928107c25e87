"""Draws by Triton kernels against their definition; see `test_kernels`."""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops import noise
from worker.ops.noise import Purpose, Stream
from worker.ops.sample import (
    DRAW_WORDS,
    DrawColumns,
    DrawState,
    choose,
    cut_of,
    draw_table,
    mask_rows,
)
from worker.ops.triton import draws
from worker.types import SampleSpec, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PHILOX, GUMBEL = draws._philox, draws._gumbel


@triton.jit
def noise_kernel(
    seeds: tl.tensor, words: tl.tensor, variates: tl.tensor, counts: tl.constexpr
) -> None:
    """`seeds` has the stream: seed, position, purpose, offset."""
    found = PHILOX(
        tl.load(seeds), tl.load(seeds + 1), tl.load(seeds + 2), tl.load(seeds + 3), 0, counts
    )
    index = tl.arange(0, 8 * counts)
    tl.store(words + index, found.to(tl.int32, bitcast=True))
    tl.store(variates + index, GUMBEL(found))


def signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "offset"),
    [
        (0, 0, Purpose.SAMPLE, 0),
        (123456789, 77, Purpose.DRAFT, 5),
        ((1 << 64) - 1, (1 << 40) + 3, Purpose.RESIDUAL, 1 << 63),
    ],
)
def test_words_are_those_of_numpy(seed: int, position: int, purpose: Purpose, offset: int) -> None:
    stream = [signed(seed), position, int(purpose), signed(offset)]
    words = torch.empty(512, dtype=torch.int32, device=DEVICE)
    variates = torch.empty(512, device=DEVICE)
    noise_kernel[(1,)](torch.tensor(stream, device=DEVICE), words, variates, counts=64)
    counter = (position << 128) + (int(purpose) << 192) + (offset << 64)
    raw = np.random.Philox(key=seed, counter=counter).random_raw(256)
    assert np.array_equal(words.cpu().numpy().view(np.uint32), raw.view(np.uint32))
    wanted = noise.gumbel_noise(seed, position, 512, purpose, offset=offset)
    torch.testing.assert_close(variates.cpu(), wanted, rtol=5e-7, atol=5e-7)


def test_noise_at_both_ends_of_the_words() -> None:
    found = torch.empty(8, device=DEVICE)
    words = torch.tensor([0, 1, 2, 255, 256, 1 << 31, (1 << 32) - 256, (1 << 32) - 1])
    as_ints = words.to(torch.int32) if DEVICE.type == "cuda" else words.to(torch.uint32)
    gumbel_kernel[(1,)](as_ints.view(torch.int32).to(DEVICE), found)
    uniform = (words.float() + 0.5).mul(2.0**-32).clamp(max=1.0 - 2.0**-24)
    wanted = -(-torch.log1p(-uniform.double())).log()
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=3e-7, atol=3e-7)


@triton.jit
def gumbel_kernel(words: tl.tensor, variates: tl.tensor) -> None:
    index = tl.arange(0, 8)
    tl.store(variates + index, GUMBEL(tl.load(words + index).to(tl.uint32, bitcast=True)))


def draw(
    logits: Tensor, rows: list[int], specs: list[SampleSpec], stream: Stream
) -> tuple[list[int], list[int]]:
    table = draw_table(rows, specs)
    words = torch.from_numpy(table.view(np.int32)).view(len(specs), DRAW_WORDS)
    columns = DrawColumns.of(words.to(DEVICE))
    tokens, states = draws.draw(logits[rows].to(DEVICE), columns, cut_of(table), stream).tolist()
    return tokens, states


def make_spec(seed: int, position: int, temperature: float, **cuts: Any) -> SampleSpec:
    params = SamplingParams(max_tokens=1, seed=seed, temperature=temperature, **cuts)
    return SampleSpec(params, position)


@pytest.mark.parametrize(("vocab_size", "count"), [(1, 40), (7, 480), (2049, 80), (300, 120)])
def test_draws_are_the_definitions(vocab_size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 3
    logits[1, :: max(1, vocab_size // 3)] = 9.5
    logits[2, 1:] = -torch.inf
    rows = [index % 5 for index in range(count)]
    specs = [
        make_spec(index * 0x9E3779B97F4A7C15 % (1 << 64), index, (0.0, 0.3, 1.0, 1.7)[index % 4])
        for index in range(count)
    ]
    stream = Stream(Purpose.DRAFT, 3)
    tokens, states = draw(logits, rows, specs, stream)
    assert states == [DrawState.DRAWN] * count
    assert tokens == [
        choose(logits[row], spec, stream) for row, spec in zip(rows, specs, strict=True)
    ]


@pytest.mark.parametrize(
    ("vocab_size", "cuts"),
    [
        (300, {"top_p": 0.8}),
        (300, {"top_k": 5, "top_p": 0.7}),
        (300, {"min_p": 0.05}),
        (300, {"top_k": 3}),
        (4100, {"top_k": 900, "top_p": 0.95, "min_p": 0.001}),
        (7, {"top_k": 7, "top_p": 1e-6}),
    ],
)
def test_truncated_draws_are_the_definitions(vocab_size: int, cuts: dict[str, Any]) -> None:
    count = 12 if vocab_size < 1000 else 9
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    logits[7] = logits[7].round()
    logits[5, : vocab_size // 2] = -torch.inf
    wishes: list[dict[str, Any]] = [cuts, {}, cuts]
    specs = [
        make_spec(index, index, (0.9, 0.7, 1.4, 0.0)[index % 4], **wishes[index % 3])
        for index in range(count)
    ]
    tokens, states = draw(logits, [*range(count)], specs, Stream())
    assert states == [DrawState.DRAWN] * count
    assert tokens == [choose(row, spec) for row, spec in zip(logits, specs, strict=True)]


# More tokens than can be collected of a row; the largest top-k is of more tokens than parts.
LARGE = 4200
KINDS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 5},
    {},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.05},
    {"min_p": 1e-3, "top_p": 0.6},
    {"top_k": 5, "min_p": 0.3},
    {"top_k": 70, "top_p": 0.5},
    {"top_p": 0.02},
    {"top_p": 0.0},
]


@pytest.mark.parametrize("scale", [8.0, 2.0, 0.4])
def test_rows_of_all_kinds_are_drawn_together(scale: float) -> None:
    count = len(KINDS) + 1
    logits = torch.randn(count, LARGE, generator=torch.Generator().manual_seed(3)) * scale
    # As many ties as bfloat16 makes; tokens that are forbidden; large ones that are neighbours.
    logits[::2] = (logits[::2] * 8).round() / 8
    logits[:3, 100:2000] = -torch.inf
    logits[[3, 4, 7]] = logits[[3, 4, 7]].sort().values
    specs = [make_spec(scale > 1, row, 0.9, **KINDS[row % len(KINDS)]) for row in range(count)]
    specs[-1] = make_spec(1, 2, 0.0, top_p=0.5)
    tokens, states = draw(logits, [*range(count)], specs, Stream(Purpose.SAMPLE, 7))
    assert states == [DrawState.DRAWN] * count
    assert tokens == [
        choose(row, spec, Stream(Purpose.SAMPLE, 7))
        for row, spec in zip(logits, specs, strict=True)
    ]


@pytest.mark.full
def test_flat_rows_are_cut_off_right_after_any_number_of_draws() -> None:
    """By some of the limits, nearly all tokens that are drawn are rejected."""
    wishes: list[dict[str, Any]] = [
        *[{"top_p": 0.02}] * 4,
        *[{"top_p": 0.4}] * 2,
        *[{"min_p": 0.6, "top_p": 0.5}] * 4,
        *[{"top_k": 2}] * 10,
    ]
    logits = torch.randn(len(wishes), 300, generator=torch.Generator().manual_seed(4)) * 0.4
    specs = [make_spec(5, place, 1.0, **wish) for place, wish in enumerate(wishes)]
    tokens, states = draw(logits, [*range(len(wishes))], specs, Stream())
    assert states == [DrawState.DRAWN] * len(wishes)
    assert tokens == [choose(row, spec) for row, spec in zip(logits, specs, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_tokens_of_a_flat_row_are_drawn_until_one_is_in_the_nucleus(top_p: float) -> None:
    logits = torch.randn(LARGE, generator=torch.Generator().manual_seed(5)).sort().values[None]
    specs = [make_spec(3, place, 1.0, top_p=top_p) for place in range(24)]
    tokens, _ = draw(logits, [0] * len(specs), specs, Stream())
    assert tokens == [choose(logits[0], spec) for spec in specs]


@pytest.mark.parametrize(
    ("temperature", "cuts"),
    [(0.0, {}), (0.7, {}), (0.7, {"top_p": 0.5}), (0.7, {"top_k": 4, "top_p": 0.5})],
)
def test_rows_that_are_no_numbers(temperature: float, cuts: dict[str, Any]) -> None:
    logits = torch.zeros(5, 2100)
    logits[0, 2050], logits[1, 4], logits[2], logits[4, 17] = math.nan, math.inf, -math.inf, 50.0
    specs = [make_spec(1, 2, temperature, **cuts)] * 5
    tokens, states = draw(logits, [0, 1, 2, 3, 4], specs, Stream())
    assert states == [DrawState.NOT_NUMBERS] * 3 + [DrawState.DRAWN] * 2
    assert tokens[4] == 17
    if temperature:
        hot = [make_spec(1, 2, 1e-37), make_spec(1, 2, math.nan)]
        assert draw(logits, [4, 4], hot, Stream())[1] == [DrawState.NOT_NUMBERS] * 2


@pytest.mark.full
@pytest.mark.parametrize("other", [101, 3000])
def test_sums_that_are_equal_are_made_again(other: int) -> None:
    """Two tokens, in one tile or in two, have sums that are equal in float32."""
    logits = torch.full((40, 4096), -50.0)
    specs = [make_spec(5, place, 1.0) for place in range(40)]
    for spec, row in zip(specs, logits, strict=True):
        variates = noise.gumbel_noise(5, spec.position, 4096)
        row[other] = 40.0
        row[100] = (row[other] + variates[other]) - variates[100]
    tokens, states = draw(logits, [*range(40)], specs, Stream())
    assert states == [DrawState.DRAWN] * 40
    assert tokens == [choose(row, spec) for row, spec in zip(logits, specs, strict=True)]
    assert set(tokens) == {100, other}


def test_a_greedy_draw_takes_the_lower_of_equal_ids() -> None:
    """The equal ids are in different tiles."""
    logits = torch.full((1, 4096), -50.0)
    logits[0, [100, 3000]] = 40.0
    assert draw(logits, [0], [make_spec(5, 6, 0.0)], Stream()) == ([100], [DrawState.DRAWN])


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 2048, 5003])
def test_masks_equal_those_of_torch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    logits[0, vocab_size // 2] = -torch.inf
    words = torch.randint(-(1 << 31), 1 << 31, (3, -(-vocab_size // 32)), generator=generator)
    words[1] = 0
    rows, bits = torch.tensor([3, 2, 0], dtype=torch.int32), words.int()
    wanted, found = logits.clone(), logits.to(DEVICE)
    mask_rows(wanted, rows, bits)
    draws.mask_rows(found, rows.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(found.cpu(), wanted)
    assert torch.equal(wanted[1], logits[1])
    assert (wanted[2] == -torch.inf).all()


def test_no_draws() -> None:
    assert draw(torch.zeros(1, 8), [], [], Stream()) == ([], [])
