"""Changes to one row of logits before temperature, in vLLM's order.

Allowed ids, bad words, banned ids, logit bias, then repetition, frequency and presence penalties.
A token that must not be drawn gets -inf, which no later change brings back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.types import SampleSpec, SamplingParams


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
    """logits [V] float32 as `spec` wants them, a new tensor. Twin: `reference.adjust`."""
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
