"""min-p, top-k and top-p: the set of tokens that may be drawn.

Each retains the scores above some bound, so together they are one floor, and the tokens above it
are nearly always among the few hundred likeliest: only flatter rows are sorted whole.

Sums of shares are in float64 and in one order. A CPU kernel that sums in another order must treat a
token as undecided if it is nearer to the edge of the nucleus than the kernel's error; on other
devices, their own sums decide.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.types import SamplingParams

# The number of scores sorted first, and its factor for each further try.
_HEAD = 256
_GROWTH = 16
# The scores that are sorted for many rows at once if top-k bounds them.
WIDE_HEAD = 1024


def truncates(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def surviving(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return the ids [n] int64 of the scores [V] float32 that min-p, then top-k, then top-p retain.

    min-p retains tokens that are at least `min_p` times as likely as the likeliest; top-k all that
    are not below the k-th largest. top-p retains a token while the larger ones, as shares of the
    tokens still retained, sum to less than `top_p`, and all that equal the last retained token.
    Twin: `reference_ops.truncate`.
    """
    vocab_size = len(scores)
    # One more than top-k shows whether the k-th largest ties with a score outside.
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
    """Return scores [V] with -inf for all tokens that do not survive, a new tensor."""
    ids = surviving(scores, params)
    truncated = torch.full_like(scores, -torch.inf)
    truncated[ids] = scores[ids]
    return truncated


def _floor(scores: Tensor, head: Tensor, params: SamplingParams, *, whole: bool) -> float | None:
    """Return the least retained score, from the largest scores in descending order; None if there
    are too few to decide. `whole` means that no other score is above -inf.
    """
    floor = -math.inf
    if params.min_p > 0:
        # In float32, as `floors` has it, so that every device cuts at the same score.
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
    # cumsum adds in one order; the order of sum depends on the length.
    total = after[-1] if covered else (scores.double() - head[0]).exp().cumsum(0)[-1]
    before = after - eligible
    count = int((before < params.top_p * total).sum())
    if count == len(head) and not covered:
        return None
    # The likeliest token survives a top-p of 0.
    return float(head[max(count, 1) - 1])


@dataclass(frozen=True, slots=True)
class Truncations:
    """The limits of n rows, each [n, 1]: float64 log min-p (-inf: off) and top-p, int64 top-k."""

    log_min_p: Tensor
    top_p: Tensor
    top_k: Tensor


def floors(scores: Tensor, peaks: Tensor, limits: Truncations, width: int) -> Tensor:
    """Return, for scores [n, V] with the largest scores peaks [n, 1], the least that survives, [n,
    1]. The `width` largest are sorted: at least a top-k, and all for a top-p without a top-k.
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
    counts = ((before < limits.top_p * total) & inside).sum(1, keepdim=True)
    return torch.where(limits.top_p < 1, head.gather(1, (counts - 1).clamp(min=0)), floor)
