"""Random numbers as a pure function of (seed, position, purpose).

They come from the counter-based generator Philox (Salmon et al., SC 2011): the seed is its key, and
position and purpose are the upper half of its counter, so that no two draws of a request ever share
a number, and a request draws the same ones in any batch, chunking, or after a preemption.
"""

from __future__ import annotations

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
_BELOW_ONE = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """What a random number decides; each has a stream of its own at every position."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def _words(
    seed: int, position: int, purpose: Purpose, count: int, offset: int = 0
) -> npt.NDArray[np.uint64]:
    """`count` random words of 64 bits."""
    counter = (position << _POSITION_SHIFT) + (int(purpose) << _PURPOSE_SHIFT)
    counter += offset << _OFFSET_SHIFT
    words: npt.NDArray[np.uint64] = np.random.Philox(
        key=seed & _SEED_BITS, counter=counter
    ).random_raw(count)
    return words


def uniforms(seed: int, position: int, purpose: Purpose, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1), on a grid of 2^-53; more of them change none of the first."""
    words = _words(seed, position, purpose, count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel_noise(
    seed: int,
    position: int,
    size: int,
    purpose: Purpose = Purpose.SAMPLE,
    ids: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Standard Gumbel variates [size], or only those at `ids` [n] int64; float32, on the CPU.

    -log(-log(1 - u)) with u on a grid of 2^-32, finite everywhere. argmax(scores + noise) has
    exactly the distribution softmax(scores). Another `offset` (0 to 2^64) gives other numbers: for
    what is decided several times at one position.
    """
    words = _words(seed, position, purpose, -(-size // 2), offset).view(np.uint32)[:size]
    if ids is not None:
        words = words[ids.numpy(force=True)]
    uniform = torch.from_numpy(words.astype(np.float32))
    uniform.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
