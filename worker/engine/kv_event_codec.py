"""Cache events as vLLM 0.32 sends them: msgpack, as maps or in the older positional form.

A batch is the array `[ts, events, data_parallel_rank]`, ts in seconds since the epoch. An event is
a map whose first key is `type` (`format` "map"), or an array that begins with its type ("array",
what older vLLM and SGLang send):

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                      lora_name, and extra_keys: if no block has any, a map omits it and an
                      array has nil
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

A hash is the last 64 bits of the digest as an unsigned integer, or the raw digest. `extra_keys` has
an entry for each block, an array of its keys without their tags, or nil.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from worker.engine.block_hash import BlockHash, short_hash
from worker.engine.cache_events import BlockRemoved, BlocksStored, CacheEvent

MEDIUM = "GPU"  # what the engine's own KV cache is called, whatever the device is

ExternalHash = int | bytes


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True):
    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, frozen=True):
    block_hashes: list[ExternalHash]
    medium: str | None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    pass


class _StoredArray(_StoredMap, tag="BlockStored", array_like=True, frozen=True):
    pass


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True, frozen=True):
    pass


class _ClearedArray(_ClearedMap, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


class EventEncoder:
    """Turns cache events into the payload of a batch. Pure, but for the buffers of its encoder.

    `form` is "map" or "array". With `int_hashes` off blocks are named by their whole digest.
    """

    def __init__(
        self, block_size: int, form: str = "map", int_hashes: bool = True, rank: int = 0
    ) -> None:
        self._block_size = block_size
        self._stored: type[_StoredMap] = _StoredMap if form == "map" else _StoredArray
        self._removed: type[_RemovedMap] = _RemovedMap if form == "map" else _RemovedArray
        self._cleared: type[_ClearedMap] = _ClearedMap if form == "map" else _ClearedArray
        self._name: Callable[[bytes], ExternalHash] = short_hash if int_hashes else bytes
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[CacheEvent], seconds: float) -> bytes:
        """One batch with the time `seconds`."""
        return self._encoder.encode([seconds, [self._event(e) for e in events], self._rank])

    def _event(self, event: CacheEvent) -> msgspec.Struct:
        if isinstance(event, BlocksStored):
            return self._stored(
                block_hashes=[self._name(block.digest) for block in event.blocks],
                parent_block_hash=None if event.parent is None else self._name(event.parent),
                token_ids=[token for block in event.blocks for token in block.token_ids],
                block_size=self._block_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=_extra_keys(event.blocks),
            )
        if isinstance(event, BlockRemoved):
            return self._removed(block_hashes=[self._name(event.digest)], medium=MEDIUM)
        return self._cleared()


def _extra_keys(blocks: Sequence[BlockHash]) -> list[list[str] | None] | None:
    """The keys of each block without their tags; None when no block has any."""
    if all(block.extra is None for block in blocks):
        return None
    return [None if block.extra is None else [key[1] for key in block.extra] for block in blocks]
