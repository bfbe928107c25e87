"""Draws as Triton kernels: the largest sum of score and Gumbel noise, of the scores not cut off.

The words are those of `worker.ops.noise`, NumPy's Philox4x64-10, to the bit. Float32 logarithms may
differ in the last place; where this could decide, the closest few sums are computed again in
float64, as in `worker.ops.sample.choose`.

Theory of operation: min-p, top-k and top-p retain the scores that are not below a floor
(`worker.ops.truncate`): the least score that has less above it than its limit, in tokens or mass.
The launches do not depend on values, and rows that require less end at once.

1. `_parts_kernel` finds the largest logit of every 64 tokens. The k-th largest of these is at most
   the k-th largest of all, and little more than k tokens reach it.
2. `_floor_kernel`, one program for a row, collects these, reading their parts alone, and bisects
   them for the floors of top-k and of a top-p behind it. A row of a top-p alone remains open.
3. `_best_kernel` and `_decide_kernel` draw from what reaches the floor. Tiles below are not read.
   In an open row `_above_kernel` sums what is above the token, as in FlashInfer's sampling by
   rejection. If that is less than the limit, the token is drawn. Otherwise it and all below it are
   cut off, and the row draws again: with top-p 0.9 one row in 10, and one in 200 a third time.
4. Rows still open after four draws are bisected whole, as are those with more tokens than there is
   room for: up to 33 reads of a row by its program.

All masses are in float64, summed in an order that only the row decides, so a decision differs from
the definition's only where float64 cannot distinguish. An estimate, not a measurement, for 256 rows
of 128k logits at 3 TB/s: a reading of 131 MB takes 45 µs, noise 200 µs (3.4 G operations), masses
40 µs (0.6 G in float64): a top-k costs 0.2 ms, since half of the tiles have none, a top-p 0.4 ms.
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
# Tokens of which only the largest is known at first, and the tiles of them that a program loads.
_PART, _BLOCK = 64, 2048
# Tokens of a row that can be collected.
_ROOM = 4096
# Draws of an open row, and programs for all rows from the second draw on.
_ROUNDS, _PROGRAMS = 4, 2048
# A row has its token; draws, to be tested; or draws what is final.
_DONE, _OPEN, _FINAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# The offset in a packed tensor at which a vector begins must not compile a kernel again.
_VECTORS = ("seeds", "positions", "temperatures", "log_min_p", "top_p", "top_k")


def draw(
    logits: Tensor, columns: DrawColumns, cut: Cut = Cut.ALL, stream: Stream = SAMPLING
) -> Tensor:
    """Implement `DeviceDraw`, for a stream of all tokens; rows do no more than they require."""
    (count, vocab_size), device = logits.shape, logits.device
    answers = torch.empty(2, count, dtype=torch.int32, device=device)
    if not count:
        return answers
    counts = min(_COUNTS, triton.next_power_of_2(triton.cdiv(vocab_size, 8)))
    tiles, parts = triton.cdiv(vocab_size, 8 * counts), triton.cdiv(vocab_size, _PART)
    best = torch.empty(3, count, tiles, device=device)
    maxima, found = (torch.empty(count, n, device=device) for n in (parts, min(_ROOM, vocab_size)))
    floors = torch.empty(count, 2, dtype=torch.int64, device=device)
    sums = torch.empty(2, count, tiles, dtype=torch.float64, device=device)
    ids, listed, states = (
        torch.empty(count, n, dtype=torch.int32, device=device) for n in (2 * tiles, parts, 1)
    )
    limits, stride = columns.limits, logits.stride(0)
    given = (logits, columns.temperatures, limits.log_min_p, limits.top_p, limits.top_k)
    key = (columns.seeds, columns.positions, columns.temperatures)
    # Triton takes integers of 64 bits as signed.
    offset = (stream.offset + (1 << 63)) % (1 << 64) - (1 << 63)
    common = (best, ids, stride, int(stream.purpose), offset)
    _parts_kernel[(count, tiles)](*given, maxima, stride, vocab_size, parts, _PART, _BLOCK)
    # Only rows of `Cut.ALL` can be open.
    for turn in range(_ROUNDS + 1 if cut is Cut.ALL else 1):
        _floor_kernel[(count,)](
            *(*given, maxima, sums, floors, states, answers, listed, found, stride, vocab_size),
            *(parts, tiles, turn > 0, turn == _ROUNDS, triton.next_power_of_2(parts)),
            *(triton.next_power_of_2(tiles), _PART, _BLOCK, found.shape[1]),
            num_warps=8,
        )
        # After the first draw, most rows have their token.
        programs = tiles if turn == 0 else min(tiles, triton.cdiv(_PROGRAMS, count))
        _best_kernel[(count, programs)](
            *(logits, *key, maxima, floors, states, *common, vocab_size, parts, tiles, counts),
            per_tile=max(1, 8 * counts // _PART),
        )
        _decide_kernel[(count,)](
            *(logits, *key, states, *common, answers, tiles, triton.next_power_of_2(tiles)),
            *(NOISE_ERROR, SUM_ERROR, int(DrawState.DRAWN), int(DrawState.NOT_NUMBERS)),
        )
        if turn < _ROUNDS:
            _above_kernel[(count, programs)](
                *(*given[:2], sums, floors, states, answers, stride, vocab_size, tiles, _BLOCK)
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
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _search(
    values: tl.tensor,
    size: tl.tensor,
    heat: tl.tensor,
    unit: tl.tensor,
    low: tl.tensor,
    limit: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> Any:
    """Return the least rank from `low` on, of logits [size], above which there are fewer than
    `limit`; or less mass than `limit` times that from `low` on. The largest rank has nothing above.
    """
    # Masses are in that of the score `unit`. Infinity has the rank of `high`.
    high, middle = low * 0 + 4286578688, low - 1
    while low < high:
        sums = tl.zeros((block,), tl.float64)
        downs, ups = tl.zeros((block,), tl.int64) + low, tl.zeros((block,), tl.int64) + high
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            scores = tl.div_rn(tl.load(values + at, mask=at < size, other=float("-inf")), heat)
            ranks = _rank(scores)
            above = (ranks > middle) & (at < size)
            masses = 1.0 if is_count else tl.exp(scores.to(tl.float64) - unit.to(tl.float64))
            sums += tl.where(above, masses, 0.0)
            ups = tl.where(above, tl.minimum(ups, ranks), ups)
            downs = tl.where(ranks > middle, downs, tl.maximum(downs, ranks))
        beyond = tl.sum(sums, axis=0)
        if not is_count:
            limit = tl.where(middle < low, limit * beyond, limit)
        # The distance of the bounds is halved at least, as they move to ranks that occur.
        is_less = (beyond < limit) | (beyond == 0.0)
        high = tl.where(is_less, tl.max(downs, axis=0), high)
        low = tl.where(is_less, low, tl.min(ups, axis=0))
        middle = low + (high - low) // 2
    return low


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _parts_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    temperatures: tl.tensor,
    log_min_p: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    maxima: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    parts: tl.tensor,
    part: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Store the largest logit of each part of a tile, nan if any is nan."""
    index = tl.program_id(0)
    is_limited = (tl.load(top_p + index) < 1.0) | (tl.load(top_k + index) > 0)
    is_limited |= tl.load(log_min_p + index) > float("-inf")
    if is_limited & (tl.load(temperatures + index) > 0.0):
        own = tl.program_id(1) * (block // part) + tl.arange(0, block // part)
        tokens = own[:, None] * part + tl.arange(0, part)[None, :]
        row = logits + index.to(tl.int64) * stride_row
        values = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
        has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
        tops = tl.where(has_nan, float("nan"), tl.max(values, axis=1))
        tl.store(maxima + index * parts + own, tops, mask=own < parts)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _floor_kernel(  # noqa: PLR0913, PLR0915, PLR0917
    logits: tl.tensor,
    temperatures: tl.tensor,
    log_min_p: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    floors: tl.tensor,
    states: tl.tensor,
    answers: tl.tensor,
    listed: tl.tensor,
    found: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    parts: tl.tensor,
    tiles: tl.tensor,
    tests: tl.constexpr,
    is_last: tl.constexpr,
    padded_parts: tl.constexpr,
    padded_tiles: tl.constexpr,
    part: tl.constexpr,
    block: tl.constexpr,
    room: tl.constexpr,
) -> None:
    """Find the floor of a row, and that of min-p alone; or, if it `tests`, whether the token that
    was drawn may be, and else a higher floor.
    """
    index = tl.program_id(0)
    heat, share = tl.load(temperatures + index), tl.load(top_p + index)
    row = logits + index.to(tl.int64) * stride_row
    if tests:
        if tl.load(states + index) == _OPEN:
            tile = tl.arange(0, padded_tiles)
            at = sums + index * tiles + tile
            above = tl.sum(tl.load(at, mask=tile < tiles, other=0.0), axis=0)
            at += tl.num_programs(0) * tiles
            limit = share * tl.sum(tl.load(at, mask=tile < tiles, other=0.0), axis=0)
            if (above >= limit) & (above > 0.0):
                unit = tl.div_rn(tl.load(row + tl.load(answers + index)), heat)
                low = _rank(unit) + 1
                if is_last:
                    low = tl.load(floors + 2 * index + 1)
                    low = _search(row, vocab_size, heat, unit, low, share, False, block)
                    tl.store(states + index, _FINAL)
                tl.store(floors + 2 * index, low)
            else:
                tl.store(states + index, _DONE)
    else:
        low = tl.zeros((), tl.int64)
        minimum, count = tl.load(log_min_p + index), tl.load(top_k + index)
        is_ranked = (count > 0) & ((count < vocab_size) | (vocab_size <= room)) & (heat > 0.0)
        if is_ranked | ((minimum > float("-inf")) & (heat > 0.0)):
            own, which = maxima + index * parts, tl.arange(0, padded_parts)
            tops = tl.load(own + which, mask=which < parts, other=float("-inf"))
            tops = tl.div_rn(tops, heat)
            peak = tl.max(tops, axis=0)
            low = _rank((peak.to(tl.float64) + minimum).to(tl.float32))
            if is_ranked:
                limit = count.to(tl.float64)
                if (count <= parts) & (vocab_size > room):
                    low = _search(own, parts, heat, peak, low, limit, True, block)
                # The parts that reach `low`, and then their tokens.
                reach = ((_rank(tops) >= low) & (which < parts)).to(tl.int32)
                number, place = tl.sum(reach, axis=0), listed + index * parts
                tl.store(place + tl.cumsum(reach, axis=0) - 1, which, mask=reach > 0)
                tl.debug_barrier()
                values, size = found + index * room, tl.zeros((), tl.int32)
                for first in range(0, number, block // part):
                    at = first + tl.arange(0, block // part)
                    some = tl.load(place + at, mask=at < number, other=parts)
                    tokens = some[:, None] * part + tl.arange(0, part)[None, :]
                    each = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
                    reaches = (tokens < vocab_size) & (_rank(tl.div_rn(each, heat)) >= low)
                    chosen = tl.reshape(reaches.to(tl.int32), (block,))
                    at = size + tl.cumsum(chosen, axis=0) - 1
                    fits = (chosen > 0) & (at < room)
                    tl.store(values + at, tl.reshape(each, (block,)), mask=fits)
                    size += tl.sum(chosen, axis=0)
                tl.debug_barrier()
                values = tl.where(size > room, row, values)
                size = tl.where(size > room, vocab_size, size)
                low = _search(values, size, heat, peak, low, limit, True, block)
                if share < 1.0:
                    low = _search(values, size, heat, peak, low, share, False, block)
        tl.store(floors + 2 * index, low)
        tl.store(floors + 2 * index + 1, low)
        is_open = (share < 1.0) & (heat > 0.0) & (is_ranked == 0)
        tl.store(states + index, tl.where(is_open, _OPEN, _FINAL))


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _above_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    temperatures: tl.tensor,
    sums: tl.tensor,
    floors: tl.tensor,
    states: tl.tensor,
    answers: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    tiles: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Sum, in tiles of an open row, the mass above the token drawn, and all that min-p retains."""
    index = tl.program_id(0)
    if tl.load(states + index) == _OPEN:
        heat, least = tl.load(temperatures + index), tl.load(floors + 2 * index + 1)
        row = logits + index.to(tl.int64) * stride_row
        unit = tl.div_rn(tl.load(row + tl.load(answers + index)), heat)
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            tokens = tile * block + tl.arange(0, block)
            values = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
            scores = tl.div_rn(values, heat)
            masses = tl.exp(scores.to(tl.float64) - unit.to(tl.float64))
            masses = tl.where(_rank(scores) >= least, masses, 0.0)
            place = sums + index * tiles + tile
            tl.store(place, tl.sum(tl.where(scores > unit, masses, 0.0), axis=0))
            tl.store(place + tl.num_programs(0) * tiles, tl.sum(masses, axis=0))


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _best_kernel(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    floors: tl.tensor,
    states: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    stride_row: tl.tensor,
    purpose: tl.tensor,
    offset: tl.tensor,
    vocab_size: tl.tensor,
    parts: tl.tensor,
    tiles: tl.tensor,
    counts: tl.constexpr,
    per_tile: tl.constexpr,
) -> None:
    """Find, for a draw and a tile, the two largest sums and their ids, and the largest score, nan
    if any is nan. Scores below the floor are left out.
    """
    index = tl.program_id(0)
    if tl.load(states + index) == _DONE:
        return
    heat, floor = tl.load(temperatures + index), tl.load(floors + 2 * index)
    inner = tl.arange(0, 8 * counts)
    row = logits + index.to(tl.int64) * stride_row
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        end = tl.zeros((), tl.int32) + vocab_size
        if floor > 0:
            own = tile * per_tile + tl.arange(0, per_tile)
            tops = tl.load(maxima + index * parts + own, mask=own < parts, other=float("-inf"))
            is_below = (_rank(tl.div_rn(tops, heat)) < floor).to(tl.int32)
            end = tl.where(tl.min(is_below, axis=0) > 0, 0, end)
        tokens = tile * (8 * counts) + inner
        values = tl.load(row + tokens, mask=tokens < end, other=float("-inf"))
        sums = values
        if (heat != 0.0) & (end > 0):
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
            sums = tl.where(_rank(values) < floor, float("-inf"), values + _gumbel(words))
        is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
        sums = tl.where(sums == sums, sums, float("-inf"))
        first = tl.argmax(sums, axis=0)
        others = tl.where(inner == first, float("-inf"), sums)
        place = index * tiles + tile
        plane = tl.num_programs(0) * tiles
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
    states: tl.tensor,
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
    state = tl.load(states + index)
    if state == _DONE:
        return
    tl.store(states + index, tl.where(state == _FINAL, _DONE, state))
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
