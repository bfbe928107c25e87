"""The attribute that a prefix-cache producer computes, and its key."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from picker.framework.attributes import DataKey

MATCH_INFO = "PrefixCacheMatchInfo"
_NO_TIERS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


class PrefixCacheMatchInfo(msgspec.Struct, frozen=True):
    """The part of a request's prompt that each candidate probably has in its KV cache.

    `match_blocks` maps endpoint keys to numbers of blocks of `block_size_tokens` tokens;
    `tier_blocks` counts them by tier, if tiers are known (`gpu`, `cpu`; a block may be in several).
    """

    total_blocks: int
    block_size_tokens: int
    match_blocks: Mapping[str, int]
    tier_blocks: Mapping[str, Mapping[str, int]] = _NO_TIERS


def match_info_key(producer: str) -> DataKey[PrefixCacheMatchInfo]:
    return DataKey(MATCH_INFO, producer)
