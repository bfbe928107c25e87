"""The finding of a prefix-cache producer, and its key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from picker.framework.attributes import DataKey

MATCH_INFO = "PrefixCacheMatchInfo"
_NO_TIERS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


class PrefixCacheMatchInfo(msgspec.Struct, frozen=True):
    """How much of a request's prompt each candidate probably has in its KV cache.

    `match_blocks` maps an endpoint key to a number of blocks in [0, `total_blocks`]; an endpoint
    that is absent matches nothing. Blocks have `block_size_tokens` tokens, the last of a prompt
    perhaps fewer. `tier_blocks`, where tiers are known, counts the blocks at each endpoint by tier
    (`gpu`, `cpu`; a block may be in several).
    """

    total_blocks: int
    block_size_tokens: int
    match_blocks: Mapping[str, int]
    tier_blocks: Mapping[str, Mapping[str, int]] = _NO_TIERS


def match_info_key(producer: str) -> DataKey[PrefixCacheMatchInfo]:
    """The key under which the producer instance called `producer` stores its finding."""
    return DataKey(MATCH_INFO, producer)
