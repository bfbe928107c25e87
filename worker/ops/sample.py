"""Choice of the next token: greedy, or a draw after temperature, top-k and top-p.

A draw is Gumbel-max: argmax(logit / temperature + noise) has exactly the softmax distribution. The
noise of a row is a pure function of (seed, position), taken from the counter-based generator Philox
(Salmon et al., SC 2011), so a request draws the same tokens in any batch, chunking, or after a
preemption. Rows are drawn one by one: nothing in a row's arithmetic can see its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.types import SampleSpec

_SEED_BITS = (1 << 64) - 1
# Philox counts up from its start once per 256 bits; positions are 2^128 counts apart.
_POSITION_SHIFT = 128
_BELOW_ONE = 1.0 - 2.0**-24
# A nucleus is nearly always found among this many tokens; only flatter rows are sorted whole.
_NUCLEUS_TRY = 256


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token id for each row of logits [R, V] float32, by the spec of the same index.

    Temperature 0 is greedy. Equal logits: the lowest id wins. Banned ids are masked in `logits`.
    """
    for index, spec in enumerate(specs):
        if spec.banned_ids:
            logits[index, list(spec.banned_ids)] = -torch.inf
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for index, spec in enumerate(specs):
        if spec.params.temperature > 0:
            tokens[index] = _draw(logits[index], spec)
    return tokens


def _draw(logits: Tensor, spec: SampleSpec) -> int:
    """logits [V] → a token id."""
    scores = keep_top(logits / spec.params.temperature, spec.params.top_k, spec.params.top_p)
    scores += gumbel_noise(spec.params.seed, spec.position, len(scores)).to(scores.device)
    return int(scores.argmax())


def keep_top(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits [V] with everything outside top-k, then outside top-p of what is left, at -inf.

    top-k keeps all that are not below the k-th largest. top-p keeps a token while the tokens before
    it in descending order sum to less than `top_p` (so the largest always stays), and all that
    equal the last one kept. `top_k` 0 and `top_p` 1 are off. Twin: `reference.keep_top`.
    """
    if 0 < top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, top_p), -torch.inf)
    return logits


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit inside the nucleus of logits [V]."""
    total = logits.logsumexp(dim=-1)
    vocab_size = len(logits)
    count = min(_NUCLEUS_TRY, vocab_size)
    while True:
        largest = logits.topk(count).values
        probabilities = (largest - total).double().exp()
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < top_p).sum())
        if kept < count or count == vocab_size:
            return largest[max(kept, 1) - 1]
        count = vocab_size


def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """Standard Gumbel variates [size], float32, a pure function of the arguments.

    -log(-log(1 - u)) with u on a grid of 2^-32, finite everywhere.
    """
    philox = np.random.Philox(key=seed & _SEED_BITS, counter=position << _POSITION_SHIFT)
    words = philox.random_raw(-(-size // 2)).view(np.uint32)[:size]
    uniform = torch.from_numpy(words.astype(np.float32))
    uniform.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
