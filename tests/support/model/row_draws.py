"""Draws row by row from plain values only, so that a mistake in batches cannot hide here."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.sample import ALL_MASKED, NOT_NUMBERS, Undrawable
from worker.types import SampleSpec, SamplingParams

_PART_SIZES = (128, 64, 32)
_HEAD = 256
_GROWTH = 16
_BELOW_ONE = 1.0 - 2.0**-24


def choose(logits: Tensor, spec: SampleSpec) -> int | Undrawable:
    if not math.isfinite(_largest(logits[None])[0][0]):
        return Undrawable(NOT_NUMBERS)
    return _choose(logits, spec)


def _largest(logits: Tensor) -> tuple[list[float], list[int]]:
    """A row with a nan has nan and any id."""
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


def _choose(logits: Tensor, spec: SampleSpec) -> int | Undrawable:
    params = spec.params
    row = _adjust(logits, spec)
    if params.temperature > 0:
        row = row / params.temperature
    [peak], [argmax] = _largest(row[None])
    fault = _fault(peak)
    if fault is not None or params.temperature == 0:
        return fault or argmax
    ids = _surviving(row, params).sort().values if _truncates(params) else None
    noisy = row if ids is None else row[ids]
    noise = _gumbel_noise(params.seed, spec.position, len(row), ids)
    [chosen] = _largest((noisy.double() + noise)[None])[1]
    return chosen if ids is None else int(ids[chosen])


def _fault(peak: float) -> Undrawable | None:
    if peak == -math.inf:
        return Undrawable(ALL_MASKED)
    return None if math.isfinite(peak) else Undrawable(NOT_NUMBERS)


def _adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
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
    remaining = logits[allowed]
    logits.fill_(-torch.inf)
    logits[allowed] = remaining


def _completing(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """In vLLM too, a banned sequence begins among the generated tokens, never in the prompt."""
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
    """Repetition is as in Keskar et al., arXiv:1909.05858; frequency and presence as in OpenAI."""
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
    return torch.from_numpy(np.asarray(values, np.int64)).to(beside.device)


def _truncates(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _surviving(scores: Tensor, params: SamplingParams) -> Tensor:
    """min-p keeps what is at least `min_p` times as likely as the likeliest. top-k keeps all that
    are not below the k-th largest. top-p keeps a token while the larger ones, as shares of what is
    left by then, sum to less than `top_p`, and all that equal the last of these.
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


def _floor(scores: Tensor, head: Tensor, params: SamplingParams, *, whole: bool) -> float | None:
    """Return None when the largest scores are too few; `whole`: no other score is above -inf."""
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
    remaining = int((before < params.top_p * total).sum())
    if remaining == len(head) and not covered:
        return None
    return float(head[max(remaining, 1) - 1])


def _mass(scores: Tensor) -> Tensor:
    return (-scores.log_softmax(dim=-1).amax().double()).exp()


def _gumbel_noise(seed: int, position: int, size: int, ids: Tensor | None) -> Tensor:
    generator = np.random.Philox(key=seed & ((1 << 64) - 1), counter=position << 128)
    words = generator.random_raw(-(-size // 2)).view(np.uint32)[:size]
    if ids is not None:
        words = words[ids.numpy()]
    uniform = torch.from_numpy(words.astype(np.float32))
    uniform.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return -(-torch.log1p(-uniform.double())).log()
