"""min-p, top-k and top-p: which tokens may be drawn at all.

All three keep what is not below some score, so together they are one floor, and the tokens above it
are nearly always among the few hundred likeliest: only flatter rows are sorted whole.

Sums of shares are in float64 and in one order: of the sorted scores where those are all that count,
else of the ids. A CPU kernel that sums in another order must take a token that is nearer to the
edge of the nucleus than its error for undecided; on other devices, their own sums decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.types import SamplingParams

# Sorted first; each further try takes this many times as many.
_HEAD = 256
_GROWTH = 16
# What is looked at of many rows at once where top-k bounds it.
WIDE_HEAD = 1024


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
    after = eligible.cumsum(0)
    total = after[-1] if covered else (scores.double() - head[0]).exp().cumsum(0)[-1]
    before = after - eligible
    kept = int((before < params.top_p * total).sum())
    if kept == len(head) and not covered:
        return None
    return float(head[max(kept, 1) - 1])


@dataclass(frozen=True, slots=True)
class Truncations:
    """What n rows are cut by, each [n, 1]: float64 log min-p (-inf: off) and top-p, int64 top-k."""

    log_min_p: Tensor
    top_p: Tensor
    top_k: Tensor


def floors(scores: Tensor, peaks: Tensor, limits: Truncations, width: int) -> Tensor:
    """Of scores [n, V] with the largest ones peaks [n, 1], the least that survives, [n, 1]. The
    `width` largest are looked at: no fewer than a top-k, and all for a top-p without one.
    """
    width = min(width, scores.shape[1])
    head = scores.topk(width).values
    ranked = (limits.top_k > 0) & (limits.top_k < scores.shape[1])
    kth = head.gather(1, (limits.top_k - 1).clamp(0, width - 1))
    floor = (peaks.double() + limits.log_min_p).float()
    floor = torch.where(ranked, torch.maximum(floor, kth), floor)
    total = (scores.double() - peaks).exp().mul_(scores >= floor).sum(1, keepdim=True)
    inside = head >= floor
    shares = (head.double() - peaks).exp() * inside
    before = shares.cumsum(1) - shares
    kept = ((before < limits.top_p * total) & inside).sum(1, keepdim=True)
    return torch.where(limits.top_p < 1, head.gather(1, (kept - 1).clamp(min=0)), floor)
