"""What changed in the prefix cache: values that whoever mirrors it can replay.

Replaying them in order over an empty mirror that counts each hash gives the cached full blocks:
contents that exist twice are stored twice and removed twice. Blocks that are only partly full have
no name and appear nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks of one chain became hits; each continues the one before it.

    `parent` is the digest of the block before the run, None when the run begins a chain.
    """

    blocks: tuple[BlockHash, ...]
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of this content is gone: its block was taken for another, or found corrupt."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached any more."""


CacheEvent = BlocksStored | BlockRemoved | CacheCleared
