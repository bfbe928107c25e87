"""ChosenToken of the next token: greedy, or a draw after temperature, min-p, top-k and top-p.

The order is vLLM's: `adjust` (masks, bias, penalties), temperature, min-p, top-k, top-p, draw. A
draw is Gumbel-max: argmax(score + noise) has exactly the softmax distribution, and the noise is a
pure function of the request's seed and the position (see `noise`). Rows are drawn one by one, and
what is computed for many at once is exact or goes row by row inside: nothing in a row's arithmetic
can see its neighbours.

Adjusting a row. Changes to one row of logits before temperature, in vLLM's order.

Allowed ids, bad words, banned ids, logit bias, then repetition, frequency and presence penalties.
A token that must not be drawn gets -inf, which no later change brings back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.ops.noise import gumbel_noise
from worker.ops.truncate import surviving, truncate, truncates
from worker.types import Draw, SampleSpec, SamplingParams

NOT_NUMBERS = "the model's logits are not finite numbers"
ALL_MASKED = "no token may be drawn: every one is excluded by the request's parameters"

# Finding the largest of a row's largest parts is many times as fast as finding its place at once.
_PART_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Undrawable:
    """A row from which no token can be drawn, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token that was chosen from a row of logits, for a request with `params`."""

    row: int
    params: SamplingParams
    token_id: int


class RowSampler:
    """Draws from rows of logits [R, V] float32, which stay as they are, one by one in any order.

    What is cheaper for all rows at once (which token is the largest, are they numbers) is computed
    at once; a row that is never drawn from costs no more than that.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._peaks, self._argmaxes = largest(logits)

    def choose(self, row: int, spec: SampleSpec) -> int | Undrawable:
        """The token that `spec` draws from the row."""
        if not math.isfinite(self._peaks[row]):
            return Undrawable(NOT_NUMBERS)
        if spec.params.temperature == 0 and not adjusts(spec):
            return self._argmaxes[row]
        return _choose(self._logits[row], spec)

    def scores(self, row: int, spec: SampleSpec) -> Tensor | Undrawable:
        """The row's `scores`, of which at least one is above -inf."""
        if not math.isfinite(self._peaks[row]):
            return Undrawable(NOT_NUMBERS)
        prepared = scores(self._logits[row], spec)
        return _fault(float(prepared.amax())) or prepared


def largest(logits: Tensor) -> tuple[list[float], list[int]]:
    """Of each row of logits [R, V], the largest value and the lowest id that has it; nan and any id
    for a row with a nan in it.
    """
    num_rows, vocab_size = logits.shape
    size = next((size for size in _PART_SIZES if vocab_size % size == 0), None)
    if size is None or not logits.is_contiguous():
        ids = logits.argmax(dim=-1, keepdim=True)
    else:
        parts = logits.view(num_rows, -1, size)
        best = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
        inside = parts.gather(1, best.unsqueeze(-1).expand(-1, 1, size)).squeeze(1)
        ids = best * size + inside.argmax(dim=-1, keepdim=True)
    return logits.gather(1, ids).flatten().tolist(), ids.flatten().tolist()


def scores(logits: Tensor, spec: SampleSpec) -> Tensor:
    """logits [V] → the scores whose softmax `spec` draws from, -inf for what cannot be drawn. Of a
    greedy spec, the adjusted logits: the largest is drawn.
    """
    params = spec.params
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature == 0:
        return row
    row = row / params.temperature
    return truncate(row, params) if truncates(params) else row


def _choose(logits: Tensor, spec: SampleSpec) -> int | Undrawable:
    """A token id from logits [V] that hold numbers."""
    params = spec.params
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature > 0:
        row = row / params.temperature
    [peak], [argmax] = largest(row[None])
    fault = _fault(peak)
    if fault is not None or params.temperature == 0:
        return fault or argmax
    ids = surviving(row, params).sort().values if truncates(params) else None
    noisy = row if ids is None else row[ids]
    noise = gumbel_noise(params.seed, spec.position, len(row), ids=ids)
    [chosen] = largest((noisy + noise.to(row.device))[None])[1]
    return chosen if ids is None else int(ids[chosen])


def _fault(peak: float) -> Undrawable | None:
    """What is wrong with a row of which `peak` is the largest score."""
    if peak == -math.inf:
        return Undrawable(ALL_MASKED)
    return None if math.isfinite(peak) else Undrawable(NOT_NUMBERS)


def draws(logits: Tensor, choices: Sequence[ChosenToken]) -> list[Draw]:
    """The tokens chosen from rows of logits [R, V], with log probabilities where asked for."""
    queries: dict[int, LogprobQuery] = {}
    for index, choice in enumerate(choices):
        params = choice.params
        if params.logprobs is not None or params.logprob_token_ids:
            queries[index] = LogprobQuery(
                choice.row, choice.token_id, params.logprobs or 0, params.logprob_token_ids
            )
    answers = dict(zip(queries, token_logprobs(logits, list(queries.values())), strict=True))
    return [Draw(choice.token_id, answers.get(index)) for index, choice in enumerate(choices)]


def adjusts(spec: SampleSpec) -> bool:
    """Whether `adjust` would change anything."""
    params = spec.params
    return bool(
        spec.banned_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.needs_history
    )


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """logits [V] float32 as `spec` wants them, a new tensor. Twin: `reference_ops.adjust`."""
    params = spec.params
    logits = logits.clone()
    if params.allowed_token_ids is not None:
        _keep_only(logits, params.allowed_token_ids)
    output = spec.history[spec.num_prompt :]
    banned = [*_completing(params.bad_words, output), *spec.banned_ids]
    if banned:
        logits[banned] = -torch.inf
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _ints(ids, logits), torch.tensor(biases).to(logits))
    if _penalizes(params):
        _penalize(logits, params, spec.history, output)
    return logits


def _keep_only(logits: Tensor, token_ids: Sequence[int]) -> None:
    allowed = list(token_ids)
    kept = logits[allowed]
    logits.fill_(-torch.inf)
    logits[allowed] = kept


def _completing(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete a banned sequence. As in vLLM, the beginning of a sequence is
    looked for among the generated tokens only, never in the prompt.
    """
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(output) + 1
        and tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]


def _penalizes(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def _penalize(
    logits: Tensor, params: SamplingParams, history: Sequence[int], output: Sequence[int]
) -> None:
    """Repetition (Keskar et al., arXiv:1909.05858) over prompt and output, then frequency and
    presence (as OpenAI defines them) over the output.
    """
    if params.repetition_penalty != 1.0 and history:
        seen = _ints(np.unique(np.asarray(history, np.int64)), logits)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and output:
        ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        drawn = _ints(ids, logits)
        times = torch.from_numpy(counts).to(logits)
        logits[drawn] -= params.frequency_penalty * times
        logits[drawn] -= params.presence_penalty


def _ints(values: npt.ArrayLike, beside: Tensor) -> Tensor:
    """Token ids as an index on the device of `beside`."""
    return torch.from_numpy(np.asarray(values, np.int64)).to(beside.device)
