"""Log probabilities of chosen tokens and of the likeliest tokens, from raw logits.

Tokens are ordered by their logits, which are finer than any float32 log probability, so order and
rank match greedy sampling: descending, equal logits by the lower id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.types import TokenLogprobs

# Requests the whole vocabulary, as in the API.
_ALL = -1


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """A request for `token_id`'s log probability and rank in a row of logits, for the log
    probabilities of the `num_top` likeliest tokens (-1: of all), and for those of the tokens
    `fixed_ids`.
    """

    row: int
    token_id: int
    num_top: int = 0
    fixed_ids: tuple[int, ...] = ()


def token_logprobs(logits: Tensor, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
    """Answer `queries` in order, over logits [R, V] float32, each row independently."""
    if not queries:
        return []
    asked = sorted({query.row for query in queries})
    if len(asked) < len(logits):
        logits = logits[asked]
    index = {row: position for position, row in enumerate(asked)}
    rows = _Rows(logits, max(query.num_top for query in queries))
    return [rows.answer(index[query.row], query) for query in queries]


class _Rows:
    """The values that the answers of several rows share, computed for all rows at once."""

    def __init__(self, logits: Tensor, num_top: int) -> None:
        self._logits = logits
        # The log-softmax of the largest logit is that logit less the row's log-sum-exp.
        peaks = logits.amax(dim=-1).tolist()
        tops = logits.log_softmax(dim=-1).amax(dim=-1).tolist()
        self._log_masses = [peak - top for peak, top in zip(peaks, tops, strict=True)]
        # One extra token shows whether the last requested token ties with one outside.
        head = logits.topk(min(max(num_top, 1) + 1, logits.shape[1]))
        self._head_logits: list[list[float]] = head.values.tolist()
        self._head_ids: list[list[int]] = head.indices.tolist()

    def answer(self, row: int, query: LogprobQuery) -> TokenLogprobs:
        logits = self._logits[row]
        extra = torch.tensor([query.token_id, *query.fixed_ids], device=logits.device)
        chosen, *fixed = logits[extra].tolist()
        top_ids, top_logits = self._top(row, query.num_top)
        mass = self._log_masses[row]
        return TokenLogprobs(
            (query.token_id, *top_ids, *query.fixed_ids),
            tuple(logit - mass for logit in (chosen, *top_logits, *fixed)),
            self._rank(row, chosen),
        )

    def _top(self, row: int, count: int) -> tuple[Sequence[int], Sequence[float]]:
        if count == 0:
            return (), ()
        vocab_size = self._logits.shape[1]
        if count == _ALL or count >= vocab_size:
            ordered = self._logits[row].sort(descending=True, stable=True)
            return ordered.indices.tolist(), ordered.values.tolist()
        logits, ids = self._head_logits[row], self._head_ids[row]
        # topk takes any of equal logits, but the lower id comes first: find all of them.
        if logits[count] == logits[count - 1]:
            ids = (self._logits[row] >= logits[count]).nonzero().flatten().tolist()
            logits = self._logits[row, ids].tolist()
        ranked = sorted(zip(logits, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:count]
        return [token_id for _, token_id in ranked], [logit for logit, _ in ranked]

    def _rank(self, row: int, logit: float) -> int:
        head = self._head_logits[row]
        # The head has every token at or above `logit`: no pass over the vocabulary.
        if head[-1] < logit:
            return sum(other >= logit for other in head)
        return int((self._logits[row] >= logit).sum())
