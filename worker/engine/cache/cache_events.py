"""Changes of the prefix cache, as values that a mirror of it can replay.

A mirror must count each hash: contents that exist twice are stored twice and removed twice. Blocks
that are only partly full have no name and appear nowhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.engine.cache.block_hash import BlockHash

# Where contents are, as vLLM calls it: the engine's own KV cache, whatever the device is, and the
# tiers below it.
GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks that can now be hit; `parent` is the digest before it, None at the start."""

    blocks: tuple[BlockHash, ...]
    parent: bytes | None
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of these contents is gone: its block was taken for others, or found corrupt."""

    digest: bytes
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class CacheCleared: ...


CacheEvent = BlocksStored | BlockRemoved | CacheCleared


def announcement(blocks: Iterable[tuple[BlockHash, bool]]) -> list[CacheEvent]:
    """Return events that bring a mirror in any state up to date: clear everything, then store these
    blocks. Each is paired with whether it begins a chain; parents come before children.
    """
    events: list[CacheEvent] = [CacheCleared()]
    run: list[BlockHash] = []
    run_parent: bytes | None = None
    for block, first in blocks:
        if run and (first or block.parent != run[-1].digest):
            events.append(BlocksStored(tuple(run), run_parent))
            run = []
        if not run:
            run_parent = None if first else block.parent
        run.append(block)
    if run:
        events.append(BlocksStored(tuple(run), run_parent))
    return events
