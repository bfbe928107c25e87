"""Draws as Triton kernels: the largest sum of score and Gumbel noise, in one pass over the logits.

The words are those of `worker.ops.noise`, NumPy's Philox4x64-10, to the bit. Float32 logarithms may
differ in the last place; where this could decide, the closest few sums are computed again in
float64, as in `worker.ops.sample.choose`.

min-p, top-k and top-p retain the scores that are not below a floor (`worker.ops.truncate`): the
least score that has less above it than its limit, in tokens or mass. It is found four bits at a
time, in eight launches over all rows, without a sort.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.noise import Stream
from worker.ops.sample import NOISE_ERROR, SAMPLING, SUM_ERROR, Cut, DrawColumns, DrawState

# Counts of Philox in a tile; each gives the words of eight tokens.
_COUNTS = 256
# Tokens of one program of a mask.
_MASKED_TOKENS = 2048
# Scores of a program of the search for a floor, and the part that it loads together.
_SEARCHED, _PART = 2048, 256
# Values that differ between steps must not compile a kernel again: numbers, and the offset in a
# packed tensor at which a vector begins.
_NUMBERS = ("level",)
_VECTORS = ("seeds", "positions", "temperatures", "log_min_p", "top_p", "top_k", "floors")


def draw(
    logits: Tensor, columns: DrawColumns, cut: Cut = Cut.ALL, stream: Stream = SAMPLING
) -> Tensor:
    """Implement `DeviceDraw`, for a stream of all tokens."""
    count, vocab_size = logits.shape
    answers = torch.empty(2, count, dtype=torch.int32, device=logits.device)
    if not count:
        return answers
    least = None
    if cut in {Cut.HEAD, Cut.ALL}:
        least = _floors(logits, columns)
    counts = min(_COUNTS, triton.next_power_of_2(triton.cdiv(vocab_size, 8)))
    tiles = triton.cdiv(vocab_size, 8 * counts)
    best = torch.empty(3, count, tiles, device=logits.device)
    ids = torch.empty(2, count, tiles, dtype=torch.int32, device=logits.device)
    key = (columns.seeds, columns.positions, columns.temperatures)
    # Triton takes integers of 64 bits as signed.
    offset = (stream.offset + (1 << 63)) % (1 << 64) - (1 << 63)
    common = (best, ids, logits.stride(0), int(stream.purpose), offset)
    _best_kernel[(count, tiles)](logits, *key, least, *common, vocab_size, counts=counts)
    _decide_kernel[(count,)](
        logits,
        *key,
        *common,
        answers,
        tiles,
        padded_tiles=triton.next_power_of_2(tiles),
        noise_error=NOISE_ERROR,
        sum_error=SUM_ERROR,
        drawn=int(DrawState.DRAWN),
        not_numbers=int(DrawState.NOT_NUMBERS),
    )
    return answers


def mask_rows(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Implement `DeviceMask`. Twin: `worker.ops.sample.mask_rows`."""
    count, width = bits.shape
    size = (count, triton.cdiv(logits.shape[1], _MASKED_TOKENS))
    _mask_kernel[size](logits, rows, bits, logits.shape[1], width, tokens=_MASKED_TOKENS)


@triton.jit(do_not_specialize_on_alignment=("bits",))
def _mask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    bits: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    tokens: tl.constexpr,
) -> None:
    mask, first = tl.program_id(0), tl.program_id(1) * tokens
    row = tl.load(rows + mask).to(tl.int64)
    token = first + tl.arange(0, tokens)
    inside = token < vocab_size
    words = tl.load(bits + mask * width + token // 32, mask=inside, other=-1)
    forbidden = ((words >> (token % 32)) & 1) == 0
    tl.store(logits + row * vocab_size + token, float("-inf"), mask=inside & forbidden)


def _floors(logits: Tensor, columns: DrawColumns) -> Tensor:
    (size, vocab_size), limits = logits.shape, columns.limits
    block = min(_SEARCHED, max(16, triton.next_power_of_2(vocab_size)))
    tiles = triton.cdiv(vocab_size, block)
    padded = triton.next_power_of_2(tiles)
    device = logits.device
    ranks = torch.empty(3, size, dtype=torch.int64, device=device)
    sums = torch.empty(2, size, tiles * 16, dtype=torch.float64, device=device)
    states = torch.empty(2, size, 2, dtype=torch.float64, device=device)
    least = torch.empty(size, device=device)
    found = (logits.amax(1), ranks[2], ranks, states, sums)
    given = (columns.temperatures, limits.top_p, limits.top_k)
    # top-k first: the shares of top-p are of the tokens that it retains.
    for is_count in (True, False):
        for level in range(8):
            _digits_kernel[(size, tiles)](
                *(logits, *given, *found, logits.stride(0), vocab_size, level, is_count, padded),
                block=block,
                part=min(_PART, block),
            )
        _floor_kernel[(size,)](
            *(given[0], limits.log_min_p, *given[1:], *found, least, vocab_size, tiles, level),
            *(is_count, padded),
        )
    return least


@triton.jit
def _philox(
    seed: tl.tensor,
    position: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    first: tl.tensor,
    counts: tl.constexpr,
) -> Any:
    """Return the words [8 · counts] uint32 of counts `first`, `first` + 1 … of a stream."""
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
def _uniform(words: tl.tensor) -> Any:
    return tl.minimum((words.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216)


@triton.jit
def _gumbel(words: tl.tensor) -> Any:
    """Return -log(-log(1 - u)), with u of words as in `worker.ops.noise`."""
    return _twice_logged(_uniform(words))


@triton.jit
def _twice_logged(uniform: tl.tensor) -> Any:
    # log(1 - u) if 1 - u is rounded: the logarithm of the rounded number, times u / rounded u.
    rest = 1.0 - uniform
    taken = 1.0 - rest
    exact = taken > 0.0
    ratio = tl.where(exact, uniform / tl.where(exact, taken, 1.0), 1.0)
    mass = tl.where(exact, -tl.log(rest) * ratio, uniform)
    return -tl.log(mass)


@triton.jit
def _rank(scores: tl.tensor) -> Any:
    """Map float32 scores to ranks of 0 to 2^32 - 1 as int64, in the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _next_digit(
    sums: tl.tensor,
    low: tl.tensor,
    above: tl.tensor,
    limit: tl.tensor,
    part: tl.tensor,
    level: tl.tensor,
    tiles: tl.tensor,
    padded_tiles: tl.constexpr,
) -> Any:
    """Evaluate a level's `sums` [tiles, 16] of a row: return the least rank so far, with one digit
    more; the sum above all ranks with these digits; and the limit, which is `part` of the whole on
    level 0.
    """
    digits = tl.arange(0, 16)
    tile = tl.arange(0, padded_tiles)
    at = sums + tile[:, None] * 16 + digits[None, :]
    each = tl.sum(tl.load(at, mask=(tile < tiles)[:, None], other=0.0), axis=0)
    if level == 0:
        limit = tl.where(limit < 0.0, part * tl.sum(each, axis=0), limit)
    after = tl.where(digits[None, :] > digits[:, None], each[None, :], 0.0)
    beyond = above + tl.sum(after, axis=1)
    digit = tl.min(tl.where(beyond < limit, digits, 15), axis=0)
    above = tl.sum(tl.where(digits == digit, beyond, 0.0), axis=0)
    return low + (digit.to(tl.int64) << (28 - 4 * level)), above, limit


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def _digits_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    peaks: tl.tensor,
    floors: tl.tensor,
    lows: tl.tensor,
    states: tl.tensor,
    sums: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    level: tl.tensor,
    is_count: tl.constexpr,
    padded_tiles: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
) -> None:
    """Count, in a row and a tile, the tokens with each value of the next digit, among those whose
    rank begins with the digits found so far; or sum their mass, in shares of the likeliest token's.

    Levels alternate between two places each for lows [2, n], states [2, n, 2] (the sum above, and
    the limit) and sums [2, n, tiles, 16].
    """
    index = tl.program_id(0)
    size, tiles = tl.num_programs(0), tl.num_programs(1)
    count, share = tl.load(top_k + index), tl.load(top_p + index)
    if is_count:
        if (count <= 0) | (count >= vocab_size):
            return
    elif share >= 1.0:
        return
    low = tl.zeros((), tl.int64)
    if level > 0:
        old = (level - 1) % 2 * size + index
        low, above, limit = _next_digit(
            sums + old * tiles * 16,
            tl.load(lows + old),
            tl.load(states + 2 * old),
            tl.load(states + 2 * old + 1),
            share,
            level - 1,
            tiles,
            padded_tiles,
        )
    else:
        above = tl.zeros((), tl.float64)
        # A negative limit becomes a share of the whole mass, which the end of level 0 knows.
        limit = count.to(tl.float64) if is_count else above - 1.0
    place = level % 2 * size + index
    if tl.program_id(1) == 0:
        tl.store(lows + place, low)
        tl.store(states + 2 * place, above)
        tl.store(states + 2 * place + 1, limit)
    heat = tl.load(temperatures + index)
    heat = tl.where(heat == 0.0, 1.0, heat)
    row = logits + index.to(tl.int64) * stride_row
    digits = tl.arange(0, 16)
    found = tl.zeros((part, 16), tl.float64)
    for start in range(tl.program_id(1) * block, (tl.program_id(1) + 1) * block, part):
        at = start + tl.arange(0, part)
        scores = tl.div_rn(tl.load(row + at, mask=at < vocab_size, other=float("-inf")), heat)
        ranks = _rank(scores)
        own = (ranks - low) >> (28 - 4 * level)
        counts = at < vocab_size
        if not is_count:
            counts &= ranks >= tl.load(floors + index)
        own = tl.where(counts, own, -1)
        # Most of a row is excluded after few levels.
        if tl.max(((own >= 0) & (own < 16)).to(tl.int32), axis=0) > 0:
            shares = tl.full((part,), 1.0, tl.float64)
            if not is_count:
                peak = tl.div_rn(tl.load(peaks + index), heat)
                shares = tl.exp(scores.to(tl.float64) - peak.to(tl.float64))
            found += tl.where(own[:, None] == digits[None, :], shares[:, None], 0.0)
    at = (place * tiles + tl.program_id(1)) * 16 + digits
    tl.store(sums + at, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def _floor_kernel(  # noqa: PLR0913, PLR0917
    temperatures: tl.tensor,
    log_min_p: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    peaks: tl.tensor,
    floors: tl.tensor,
    lows: tl.tensor,
    states: tl.tensor,
    sums: tl.tensor,
    least: tl.tensor,
    vocab_size: tl.tensor,
    tiles: tl.tensor,
    level: tl.tensor,
    is_count: tl.constexpr,
    padded_tiles: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    count, share = tl.load(top_k + index), tl.load(top_p + index)
    if is_count:
        is_limited = (count > 0) & (count < vocab_size)
        heat = tl.load(temperatures + index)
        peak = tl.div_rn(tl.load(peaks + index), tl.where(heat == 0.0, 1.0, heat))
        floor = _rank((peak.to(tl.float64) + tl.load(log_min_p + index)).to(tl.float32))
    else:
        is_limited = share < 1.0
        floor = tl.load(floors + index)
    if is_limited:
        old = level % 2 * tl.num_programs(0) + index
        low, _, _ = _next_digit(
            sums + old * tiles * 16,
            tl.load(lows + old),
            tl.load(states + 2 * old),
            tl.load(states + 2 * old + 1),
            share,
            level,
            tiles,
            padded_tiles,
        )
        floor = tl.maximum(floor, low)
    tl.store(floors + index, floor)
    bits = (floor - 2147483648).to(tl.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    tl.store(least + index, bits.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _best_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    stride_row: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    vocab_size: tl.tensor,
    counts: tl.constexpr,
) -> None:
    """Find, for a draw and a tile, the two largest sums and their ids, and the largest score, nan
    if any is nan. Scores below `least` are left out.
    """
    index = tl.program_id(0)
    tile = tl.program_id(1)
    inner = tl.arange(0, 8 * counts)
    tokens = tile * (8 * counts) + inner
    row = index.to(tl.int64) * stride_row
    values = tl.load(logits + row + tokens, mask=tokens < vocab_size, other=float("-inf"))
    heat = tl.load(temperatures + index)
    sums = values
    if heat != 0.0:
        # Divide exactly, as torch does: plain division rounds otherwise on a GPU.
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
        if least is not None:
            sums = tl.where(values < tl.load(least + index), float("-inf"), sums)
    is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    sums = tl.where(sums == sums, sums, float("-inf"))
    first = tl.argmax(sums, axis=0)
    others = tl.where(inner == first, float("-inf"), sums)
    place = index * tl.num_programs(1) + tile
    plane = tl.num_programs(0) * tl.num_programs(1)
    tl.store(ids + place, tile * (8 * counts) + first)
    tl.store(ids + plane + place, tile * (8 * counts) + tl.argmax(others, axis=0))
    tl.store(best + place, tl.max(sums, axis=0))
    tl.store(best + plane + place, tl.max(others, axis=0))
    peak = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    tl.store(best + 2 * plane + place, tl.where(is_nan, float("nan"), peak))


@triton.jit
def _exact_sum(
    score: tl.tensor,
    token: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
) -> Any:
    words = _philox(seed, position, purpose, offset, token // 8, 1)
    own = tl.arange(0, 8) == token % 8
    uniform = tl.sum(tl.where(own, _uniform(words), 0.0), axis=0)
    return score.to(tl.float64) + _twice_logged(uniform.to(tl.float64))


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _decide_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    stride_row: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    answers: tl.tensor,
    tiles: tl.tensor,
    padded_tiles: tl.constexpr,
    noise_error: tl.constexpr,
    sum_error: tl.constexpr,
    drawn: tl.constexpr,
    not_numbers: tl.constexpr,
) -> None:
    """Return the token of a draw, and whether its row holds numbers. Of the four largest sums,
    those that rounding could make the largest are computed again.
    """
    index = tl.program_id(0)
    size = tl.num_programs(0)
    tile = tl.arange(0, padded_tiles)
    inside = tile < tiles
    at = index * tiles + tile
    plane = size * tiles
    firsts = tl.load(best + at, mask=inside, other=float("-inf"))
    seconds = tl.load(best + plane + at, mask=inside, other=float("-inf"))
    peaks = tl.load(best + 2 * plane + at, mask=inside, other=float("-inf"))
    is_nan = tl.max((peaks != peaks).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(peaks == peaks, peaks, float("-inf")), axis=0)
    heat = tl.load(temperatures + index)
    first_ids = tl.load(ids + at, mask=inside, other=0)
    second_ids = tl.load(ids + plane + at, mask=inside, other=0)
    first = tl.max(firsts, axis=0)
    token = tl.max(tl.where(tile == tl.argmax(firsts, axis=0), first_ids, 0), axis=0)
    # A nan temperature is too small for float32: scores overflow.
    is_number = (heat == heat) & (is_nan == 0) & (tl.abs(peak) < float("inf"))
    if (heat != 0.0) & is_number:
        seed = tl.load(seeds + index)
        position = tl.load(positions + index)
        counter = tl.zeros((), tl.int64) + purpose
        start = tl.zeros((), tl.int64) + offset
        row = logits + index.to(tl.int64) * stride_row
        least = first - (noise_error + sum_error * tl.abs(first))
        highest = tl.full((), float("-inf"), tl.float64)
        # As many candidates as `worker.ops.sample` adds again.
        for _ in tl.static_range(4):
            winner = tile == tl.argmax(firsts, axis=0)
            if tl.max(firsts, axis=0) >= least:
                other = tl.max(tl.where(winner, first_ids, 0), axis=0)
                score = tl.div_rn(tl.load(row + other), heat)
                total = _exact_sum(score, other, seed, position, counter, start)
                is_better = (total > highest) | ((total == highest) & (other < token))
                token = tl.where(is_better, other, token)
                highest = tl.maximum(total, highest)
            # After the first sum of a tile comes its second; no further sums are known.
            firsts = tl.where(winner, seconds, firsts)
            first_ids = tl.where(winner, second_ids, first_ids)
            seconds = tl.where(winner, float("-inf"), seconds)
    tl.store(answers + index, token)
    tl.store(answers + size + index, tl.where(is_number, drawn, not_numbers))
