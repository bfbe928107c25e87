"""Store of new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write kv [T, 2·kv_heads·head_dim] (keys, then values) into one layer's cache.

    cache [num_blocks, 2, kv_heads, block_size, head_dim]; `slots` [T · 2 · kv_heads] int64 say
    where each head of each token goes among the cache's rows of head_dim values; none twice.
    """
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, slots, kv.reshape(-1, head_dim))
