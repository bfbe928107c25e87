"""Draws without truncation, as Triton kernels: the largest sum of score and Gumbel noise, in one
pass over the logits, with the noise made where it is added.

The words are those of `worker.ops.noise`, NumPy's Philox4x64-10, to the bit. Logarithms may differ
in the last place; a draw that this could decide is left to `worker.ops.sample.choose`.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.noise import Purpose
from worker.ops.sample import NOISE_ERROR, SUM_ERROR, DrawState

# Counts of Philox in a tile; each gives the words of eight tokens.
_COUNTS = 256


def draw(
    logits: Tensor,
    rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    purpose: Purpose = Purpose.SAMPLE,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Tokens and `DrawState`s [n] int32 of draws from rows `rows` [n] int32 of logits [R, V]
    float32, each with its seed and position [n] int64 and its temperature [n] float32 (0: greedy,
    the lowest id of the largest logit). Waits for nothing. Twin: `worker.ops.sample.draw_rows`.

    Seeds and `offset` of 2^63 and more are the int64 of the same bits.
    """
    count, vocab_size = len(rows), logits.shape[1]
    answers = torch.empty(2, count, dtype=torch.int32, device=logits.device)
    if count:
        counts = min(_COUNTS, triton.next_power_of_2(triton.cdiv(vocab_size, 8)))
        tiles = triton.cdiv(vocab_size, 8 * counts)
        best = torch.empty(3, count, tiles, device=logits.device)
        ids = torch.empty(count, tiles, dtype=torch.int32, device=logits.device)
        _best_kernel[(count, tiles)](
            logits,
            rows,
            seeds,
            positions,
            temperatures,
            best,
            ids,
            vocab_size,
            logits.stride(0),
            int(purpose),
            offset,
            counts=counts,
        )
        _decide_kernel[(count,)](
            temperatures,
            best,
            ids,
            answers,
            tiles,
            padded_tiles=triton.next_power_of_2(tiles),
            noise_error=NOISE_ERROR,
            sum_error=SUM_ERROR,
            drawn=int(DrawState.DRAWN),
            undecided=int(DrawState.UNDECIDED),
            not_numbers=int(DrawState.NOT_NUMBERS),
        )
    return answers[0], answers[1]


@triton.jit
def _philox(
    seed: tl.tensor,
    position: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    first: tl.tensor,
    counts: tl.constexpr,
) -> Any:
    """The words [8 · counts] uint32 of counts `first`, `first` + 1 … of a stream."""
    zero = tl.zeros((counts,), tl.uint64)
    a = (first + tl.arange(0, counts) + 1).to(tl.uint64)
    b = zero + offset.to(tl.uint64)
    c = zero + position.to(tl.uint64)
    d = zero + purpose.to(tl.uint64)
    key = zero + seed.to(tl.uint64)
    other = zero
    for _ in tl.static_range(10):
        factor = tl.full((counts,), 0xD2E7470EE14C6C93, tl.uint64)
        multiplier = tl.full((counts,), 0xCA5A826395121157, tl.uint64)
        high, low = tl.umulhi(factor, a), factor * a
        upper, lower = tl.umulhi(multiplier, c), multiplier * c
        a, b, c, d = upper ^ b ^ key, lower, high ^ d ^ other, low
        key += tl.full((counts,), 0x9E3779B97F4A7C15, tl.uint64)
        other += tl.full((counts,), 0xBB67AE8584CAA73B, tl.uint64)
    # In the order of memory: words a, b, c, d, the lower half of each first.
    words = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 2, 1))
    halves = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    return tl.reshape(halves, (8 * counts,))


@triton.jit
def _gumbel(words: tl.tensor) -> Any:
    """-log(-log(1 - u)), as `worker.ops.noise` makes u of words."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216)
    # log(1 - u) where 1 - u is rounded: the rounded one's, times what u is of the rounded u.
    rest = 1.0 - uniform
    taken = 1.0 - rest
    exact = taken > 0.0
    ratio = tl.where(exact, uniform / tl.where(exact, taken, 1.0), 1.0)
    mass = tl.where(exact, -tl.log(rest) * ratio, uniform)
    return -tl.log(mass)


@triton.jit
def _best_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    rows: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    counts: tl.constexpr,
) -> None:
    """Of a draw and a tile: the largest sum and its id, the second largest, and the largest score,
    nan if any is.
    """
    index = tl.program_id(0)
    tile = tl.program_id(1)
    tokens = tile * (8 * counts) + tl.arange(0, 8 * counts)
    row = tl.load(rows + index).to(tl.int64) * stride_row
    values = tl.load(logits + row + tokens, mask=tokens < vocab_size, other=float("-inf"))
    heat = tl.load(temperatures + index)
    sums = values
    if heat != 0.0:
        # As exact as in torch: plain division rounds otherwise on a GPU.
        values = tl.div_rn(values, heat)
        words = _philox(
            tl.load(seeds + index),
            tl.load(positions + index),
            tl.zeros((), tl.int64) + purpose,
            tl.zeros((), tl.int64) + offset,
            tile * counts,
            counts,
        )
        sums = values + _gumbel(words)
    is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    sums = tl.where(sums == sums, sums, float("-inf"))
    first = tl.argmax(sums, axis=0)
    place = index * tl.num_programs(1) + tile
    plane = tl.num_programs(0) * tl.num_programs(1)
    tl.store(ids + place, tile * (8 * counts) + first)
    tl.store(best + place, tl.max(sums, axis=0))
    others = tl.where(tl.arange(0, 8 * counts) == first, float("-inf"), sums)
    tl.store(best + plane + place, tl.max(others, axis=0))
    peak = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    tl.store(best + 2 * plane + place, tl.where(is_nan, float("nan"), peak))


@triton.jit
def _decide_kernel(  # noqa: PLR0913, PLR0917
    temperatures: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    answers: tl.tensor,
    tiles: tl.tensor,
    padded_tiles: tl.constexpr,
    noise_error: tl.constexpr,
    sum_error: tl.constexpr,
    drawn: tl.constexpr,
    undecided: tl.constexpr,
    not_numbers: tl.constexpr,
) -> None:
    """The token of a draw, and whether it wins by more than rounding."""
    index = tl.program_id(0)
    size = tl.num_programs(0)
    tile = tl.arange(0, padded_tiles)
    inside = tile < tiles
    at = best + index * tiles + tile
    firsts = tl.load(at, mask=inside, other=float("-inf"))
    seconds = tl.load(at + size * tiles, mask=inside, other=float("-inf"))
    peaks = tl.load(at + 2 * size * tiles, mask=inside, other=float("-inf"))
    winner = tl.argmax(firsts, axis=0)
    first = tl.max(firsts, axis=0)
    second = tl.max(tl.where(tile == winner, seconds, firsts), axis=0)
    is_nan = tl.max((peaks != peaks).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(peaks == peaks, peaks, float("-inf")), axis=0)
    heat = tl.load(temperatures + index)
    state = tl.where(first - second > noise_error + sum_error * tl.abs(first), drawn, undecided)
    state = tl.where(heat == 0.0, drawn, state)
    state = tl.where(is_nan | (tl.abs(peak) == float("inf")), not_numbers, state)
    # A temperature that is nan: too small for float32.
    state = tl.where(heat == heat, state, undecided)
    tl.store(answers + index, tl.load(ids + index * tiles + winner))
    tl.store(answers + size + index, state)
