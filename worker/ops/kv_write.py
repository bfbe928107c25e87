"""Store of new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write kv [T, 2·kv_heads·head_dim] (keys, then values) into one layer's cache.

    cache [num_blocks, block_size, 2, kv_heads, head_dim]; `slots` [T] int64 are
    block · block_size + offset, each written once. Keys beside values make it one copy a token.
    """
    cache.view(-1, kv.shape[-1]).index_copy_(0, slots, kv)
