"""A block manager of small blocks and how tests drive it: match, admit, seal, free."""

from typing import Any

from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher, PartialBlock, extra_keys
from worker.engine.cache.block_manager import BlockManager, PrefixHit

SIZE = 4
HASHER = BlockHasher(SIZE)


def manager(num_blocks: int, **settings: Any) -> BlockManager:
    return BlockManager(CacheConfig(num_blocks, SIZE, **settings))


def hashes_of(tokens: list[int], salt: str | None = None) -> list[BlockHash]:
    chain: list[BlockHash] = []
    HASHER.extend(chain, tokens, len(tokens) // SIZE, salt)
    return chain


def find(blocks: BlockManager, tokens: list[int], salt: str | None = None) -> PrefixHit:
    return blocks.match(hashes_of(tokens, salt), tokens, salt)


def run(blocks: BlockManager, seq_id: int, tokens: list[int], tenant: str = "") -> int:
    hit = find(blocks, tokens)
    assert blocks.admit(seq_id, len(tokens), hit, tenant=tenant)
    blocks.take_copies()
    chain = hashes_of(tokens)
    blocks.seal(seq_id, chain, len(chain))
    blocks.check_integrity()
    return hit.num_tokens


def tail_of(tokens: list[int], salt: str | None = None) -> PartialBlock:
    chain = hashes_of(tokens, salt)
    parent = chain[-1].digest if chain else HASHER.root
    index = len(chain)
    return PartialBlock(index, parent, tuple(tokens[index * SIZE :]), extra_keys(index, salt))


def end(blocks: BlockManager, seq_id: int, tokens: list[int]) -> None:
    """Free a sequence as the scheduler does: its partial tail stays a hit."""
    blocks.free(seq_id, tail_of(tokens))
    blocks.check_integrity()
