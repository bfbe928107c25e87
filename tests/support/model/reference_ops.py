"""Slow, obviously right torch twins of the ops, which the tests compare with."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.ops.sample import Undrawable
from worker.types import SampleSpec, SamplingParams, TokenLogprobs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.double()).to(x.dtype)


def rope(x: Tensor, positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of x [T, heads, head_dim] by position · frequency i."""
    angles = positions.double()[:, None, None] * inverse_frequencies.double()
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    block_tables: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
    window: int | None = None,
) -> Tensor:
    """Attend with queries [T, heads, head_dim], the tokens of each sequence in turn."""
    num_tokens, heads, head_dim = queries.shape
    kv_heads, block_size = cache.shape[2:4]
    outputs: list[Tensor] = []
    for table, own in zip(block_tables, positions, strict=True):
        for position in own:
            first = 0 if window is None else max(0, position - window + 1)
            seen = [
                cache[table[p // block_size], ..., p % block_size, :]
                for p in range(first, position + 1)
            ]
            keys, values = torch.stack(seen).double().unbind(1)
            keys = keys.repeat_interleave(heads // kv_heads, dim=1)
            values = values.repeat_interleave(heads // kv_heads, dim=1)
            query = queries[len(outputs)].double()
            weights = torch.einsum("hd,shd->hs", query, keys).div(head_dim**0.5).softmax(dim=-1)
            outputs.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(outputs).to(queries.dtype).view(num_tokens, heads * head_dim)


def adjust(logits: Tensor, spec: SampleSpec) -> list[float]:
    params, output = spec.params, list(spec.history[spec.num_prompt :])
    completing = {
        word[-1] for word in params.bad_words if [*output, word[-1]][-len(word) :] == list(word)
    }
    adjusted = []
    for token, logit in enumerate(logits.tolist()):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if spec.masks and not _is_set(spec.masks[0], token):
            adjusted.append(-math.inf)
            continue
        if not allowed or token in completing or token in spec.banned_ids:
            adjusted.append(-math.inf)
            continue
        logit += sum(bias for biased, bias in params.logit_bias if biased == token)
        if token in spec.history:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        adjusted.append(logit)
    return adjusted


def _is_set(mask: bytes, token: int) -> bool:
    return bool(int.from_bytes(mask, "little") >> token & 1)


def truncate(scores: Tensor, params: SamplingParams) -> list[int]:
    weights = scores.double().softmax(dim=-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = [token for token in order if weights[token] > 0]
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    if 0 < params.top_k < len(order):
        order = [t for t in order if weights[t] >= weights[order[params.top_k - 1]]]
    if params.top_p < 1:
        total = math.fsum(weights[token] for token in order)
        before, last = 0.0, order[0]
        for token in order:
            if before >= params.top_p * total:
                break
            last = token
            before += weights[token]
        order = [token for token in order if weights[token] >= weights[last]]
    return sorted(order)


def probabilities(logits: Tensor, spec: SampleSpec) -> list[float]:
    adjusted = torch.tensor(adjust(logits, spec), dtype=torch.float64)
    scores = adjusted / spec.params.temperature
    remaining = truncate(scores, spec.params)
    result = [0.0] * len(scores)
    for token, share in zip(remaining, scores[remaining].softmax(dim=-1).tolist(), strict=True):
        result[token] = share
    return result


def token_logprobs(
    logits: Tensor, token_id: int, num_top: int, fixed_ids: Sequence[int] = ()
) -> TokenLogprobs:
    wide = logits.double().log_softmax(dim=-1).tolist()
    values = logits.tolist()
    order = sorted(range(len(wide)), key=lambda token: (-values[token], token))
    ids = (token_id, *(order if num_top < 0 else order[:num_top]), *fixed_ids)
    rank = sum(value >= values[token_id] for value in values)
    return TokenLogprobs(ids, tuple(wide[token] for token in ids), rank)


def thresholds(
    drafts: Sequence[int],
    targets: Sequence[Sequence[float]],
    proposals: Sequence[Sequence[float]],
    *,
    block: bool,
) -> list[float]:
    """Return the bound for the uniform number of each draft."""
    found: list[float] = []
    weight = 1.0
    for index, draft in enumerate(drafts):
        p, q = targets[index][draft], proposals[index][draft]
        ratio = p / q if q > 0 else 0.0
        weight = min(1.0, (weight if block else 1.0) * ratio)
        if not block or index == len(drafts) - 1:
            found.append(weight)
            continue
        after = zip(targets[index + 1], proposals[index + 1], strict=True)
        mass = math.fsum(max(weight * p - q, 0.0) for p, q in after)
        found.append(mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0)
    return found


def coupled_run(
    drafts: Sequence[int], draw: Callable[[int], int | Undrawable]
) -> tuple[list[int], Undrawable | None]:
    """Draw from the rows that plain sampling would come to; also return why the run ended."""
    tokens: list[int] = []
    for index in range(len(drafts) + 1):
        token = draw(index)
        if isinstance(token, Undrawable):
            return tokens, token
        tokens.append(token)
        if index < len(drafts) and token != drafts[index]:
            break
    return tokens, None
