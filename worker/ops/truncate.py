"""min-p, top-k and top-p: which tokens may be drawn at all.

All three keep what is not below some score, so together they are one floor, and the tokens above it
are nearly always among the few hundred likeliest: only flatter rows are sorted whole.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from worker.types import SamplingParams

# Sorted first; each further try takes this many times as many.
_HEAD = 256
_GROWTH = 16


def truncates(params: SamplingParams) -> bool:
    """Whether `surviving` would leave anything out."""
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def surviving(scores: Tensor, params: SamplingParams) -> Tensor:
    """Ids [n] int64 of the scores [V] float32 that min-p, then top-k, then top-p keep, in no
    particular order.

    min-p keeps what is at least `min_p` times as likely as the likeliest. top-k keeps all that are
    not below the k-th largest. top-p keeps a token while the tokens before it, in descending order
    and as shares of what is left by then, sum to less than `top_p` (so the largest always stays),
    and all that equal the last one kept. Twin: `reference_ops.truncate`.
    """
    vocab_size = len(scores)
    count = min(max(_HEAD, params.top_k + 1), vocab_size)
    while True:
        head = scores.topk(count)
        least = float(head.values[-1])
        whole = count == vocab_size or least == -math.inf
        floor = _floor(scores, head.values, params, whole=whole)
        if floor is not None and (whole or least < floor):
            ids: Tensor = head.indices[(head.values >= floor) & (head.values > -math.inf)]
            return ids
        count = min(count * _GROWTH, vocab_size)


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """scores [V] with everything that does not survive at -inf, a new tensor."""
    ids = surviving(scores, params)
    kept = torch.full_like(scores, -torch.inf)
    kept[ids] = scores[ids]
    return kept


def _floor(scores: Tensor, head: Tensor, params: SamplingParams, *, whole: bool) -> float | None:
    """The least score kept, judged by the largest scores in descending order; None when they are
    too few to tell. `whole` says that no other score is above -inf.
    """
    floor = -math.inf
    if params.min_p > 0:
        floor = float(np.float32(float(head[0]) + math.log(params.min_p)))
    if 0 < params.top_k < len(head):
        floor = max(floor, float(head[params.top_k - 1]))
    if params.top_p >= 1:
        return floor
    covered = whole or float(head[-1]) < floor
    if floor > -math.inf and not covered:
        return None
    shares = (head.double() - head[0]).exp()
    eligible = shares[head >= floor]
    total = eligible.sum() if covered else _mass(scores)
    before = eligible.cumsum(0) - eligible
    kept = int((before < params.top_p * total).sum())
    if kept == len(head) and not covered:
        return None
    return float(head[max(kept, 1) - 1])


def _mass(scores: Tensor) -> Tensor:
    """Σ exp(score - the largest score) of scores [V], in float64."""
    return (-scores.log_softmax(dim=-1).amax().double()).exp()
