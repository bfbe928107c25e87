"""Slow, plain torch twins of the ops: what each is compared with by the tests.

They trade everything for being obviously right: loops over sequences and tokens, float64 sums, full
sorts. Nothing in the serving path imports them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / sqrt(mean(x²) + eps) · weight [H], in float64."""
    wide = x.double()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.double()).to(x.dtype)


def rope(x: Tensor, positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """x [T, heads, head_dim], each pair (i, i + head_dim/2) turned by position · frequency i."""
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
) -> Tensor:
    """queries [T, heads, head_dim], the tokens of each sequence in turn → [T, heads · head_dim].

    cache [num_blocks, 2, kv_heads, block_size, head_dim]; `positions[i]` are those of sequence i's
    queries, and each sees the keys at positions 0 to its own, found through `block_tables[i]`.
    """
    num_tokens, heads, head_dim = queries.shape
    kv_heads, block_size = cache.shape[2:4]
    outputs: list[Tensor] = []
    for table, own in zip(block_tables, positions, strict=True):
        for position in own:
            seen = [
                cache[table[p // block_size], ..., p % block_size, :] for p in range(position + 1)
            ]
            keys, values = torch.stack(seen).double().unbind(1)
            keys = keys.repeat_interleave(heads // kv_heads, dim=1)
            values = values.repeat_interleave(heads // kv_heads, dim=1)
            query = queries[len(outputs)].double()
            weights = torch.einsum("hd,shd->hs", query, keys).div(head_dim**0.5).softmax(dim=-1)
            outputs.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(outputs).to(queries.dtype).view(num_tokens, heads * head_dim)


def keep_top(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits [V] outside top-k, then outside top-p, at -inf, by one full sort and a loop."""
    order = logits.argsort(descending=True).tolist()
    values = logits.tolist()
    if top_k:
        order = [token for token in order if values[token] >= values[order[top_k - 1]]]
    total = logits[order].double().logsumexp(dim=-1)
    before, last = 0.0, order[0]
    for token in order:
        if before >= top_p and top_p < 1:
            break
        last = token
        before += float((logits[token].double() - total).exp())
    kept = [token for token in order if values[token] >= values[last]]
    result = torch.full_like(logits, -torch.inf)
    result[kept] = logits[kept]
    return result
