"""Random numbers as a pure function of (seed, position, purpose).

They come from the counter-based generator Philox (Salmon et al., SC 2011): the seed is its key, and
position and purpose are the upper half of its counter. So no two draws of a request share a number,
and a request draws the same numbers in any batch or chunking, and after a preemption.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SEED_BITS = (1 << 64) - 1
# Philox counts up from its start once per 256 bits; offsets are 2^64 counts apart, positions 2^128,
# purposes 2^192.
_OFFSET_SHIFT = 64
_POSITION_SHIFT = 128
_PURPOSE_SHIFT = 192
_BELOW_ONE = 1.0 - 2.0**-24  # as float32; log(1 - u) stays finite
_LOW = (1 << 32) - 1


class Purpose(IntEnum):
    """The decision that a random number serves; each has its own stream at every position."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


@dataclass(frozen=True, slots=True)
class Stream:
    """The Gumbel variates of a position that a draw uses: those of a purpose, at an offset (see
    `gumbel_noise`). `token_ids` [n] int64, ascending, are the tokens of a row's entries, out of
    `vocab_size`; None: the row has all of them.
    """

    purpose: Purpose = Purpose.SAMPLE
    offset: int = 0
    token_ids: Tensor | None = None
    vocab_size: int | None = None


def _words(
    seed: int, position: int, purpose: Purpose, count: int, offset: int = 0
) -> npt.NDArray[np.uint64]:
    counter = (position << _POSITION_SHIFT) + (int(purpose) << _PURPOSE_SHIFT)
    counter += offset << _OFFSET_SHIFT
    words: npt.NDArray[np.uint64] = np.random.Philox(
        key=seed & _SEED_BITS, counter=counter
    ).random_raw(count)
    return words


def uniforms(seed: int, position: int, purpose: Purpose, count: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), on a grid of 2^-53; `count` does not change the first ones."""
    words = _words(seed, position, purpose, count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel_noise(
    seed: int,
    position: int,
    size: int,
    purpose: Purpose = Purpose.SAMPLE,
    ids: Tensor | None = None,
    offset: int = 0,
    exact: bool = False,
) -> Tensor:
    """Return standard Gumbel variates [size], or only those at `ids` [n] int64; float32, on the
    CPU; with `exact`, logarithms are computed in float64.

    -log(-log(1 - u)) with u on a grid of 2^-32, finite everywhere. argmax(scores + noise) has
    exactly the distribution softmax(scores). Another `offset` (0 to 2^64) gives other numbers, for
    several decisions at one position.
    """
    words = _words(seed, position, purpose, -(-size // 2), offset).view(np.uint32)[:size]
    if ids is not None:
        words = words[ids.numpy(force=True)]
    values = torch.from_numpy(words.astype(np.float32))
    return _exact_gumbel(values) if exact else _gumbel(values)


def gumbel_rows(seeds: Tensor, positions: Tensor, size: int, stream: Stream) -> Tensor:
    """Return `gumbel_noise` of seeds and positions [n] int64, for rows of `size` entries: [n, size]
    on their device, by a number of calls that does not depend on n. Logarithms may differ in the
    last place. Seeds of 2^63 and more are passed as the int64 of the same bits.
    """
    whole = size if stream.token_ids is None else stream.vocab_size or size
    # NumPy increments the counter before it makes the first words.
    counts = torch.arange(1, -(-whole // 8) + 1, device=seeds.device)[None]
    words = philox(seeds, positions, counts, stream).flatten(1)
    words = words[:, :whole] if stream.token_ids is None else words[:, stream.token_ids]
    return _gumbel(words.float())


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, stream: Stream) -> Tensor:
    """Return the entries `ids` [n, m] int64 of `gumbel_rows`, with logarithms in float64."""
    tokens = ids if stream.token_ids is None else stream.token_ids[ids]
    words = philox(seeds, positions, tokens // 8 + 1, stream)
    return _exact_gumbel(words.gather(2, (tokens % 8)[..., None])[..., 0].float())


def _uniform(words: Tensor) -> Tensor:
    # Half a step above 0: -log(1 - u) of 0 would have no logarithm.
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def _gumbel(words: Tensor) -> Tensor:
    return _uniform(words).neg_().log1p_().neg_().log_().neg_()


def _exact_gumbel(words: Tensor) -> Tensor:
    return -(-torch.log1p(-_uniform(words).double())).log()


def philox(seeds: Tensor, positions: Tensor, counts: Tensor, stream: Stream) -> Tensor:
    """Return the same words as `_words`, by torch and in halves of 32 bits: [n, m, 8] int64, the
    eight halves for each of counts [n or 1, m] int64, which begin at 1.
    """
    key, other = seeds[:, None], torch.zeros_like(seeds[:, None])
    a = counts.expand(len(seeds), -1)
    b, c = torch.full_like(a, _signed(stream.offset)), positions[:, None].expand_as(a)
    d = torch.full_like(a, int(stream.purpose))
    # The rounds and constants of Philox4x64-10, NumPy's generator.
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            _product(a, 0xD2E7470EE14C6C93),
            _product(c, 0xCA5A826395121157),
        )
        a, b, c, d = high1 ^ b ^ key, low1, high0 ^ d ^ other, low0
        key, other = key + _signed(0x9E3779B97F4A7C15), other + _signed(0xBB67AE8584CAA73B)
    words = torch.stack((a, b, c, d), -1)
    return torch.stack((words & _LOW, (words >> 32) & _LOW), -1).flatten(2)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 64 bits of products of unsigned numbers, held as int64."""
    low, high = x & _LOW, (x >> 32) & _LOW
    factor_low, factor_high = factor & _LOW, factor >> 32
    first, middle = low * factor_low, high * factor_low
    other = low * factor_high + ((first >> 32) & _LOW) + (middle & _LOW)
    upper = high * factor_high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW)
    return upper, x * _signed(factor)


def _signed(value: int) -> int:
    return ((value + (1 << 63)) & _SEED_BITS) - (1 << 63)
