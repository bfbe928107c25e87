"""Hashes the blocks of a prompt in a chain, like the reference picker's approximate prefix cache.

A prompt is its tokens packed as little-endian uint32. With XXH64:

    root   = XXH64(model ‖ salt)
    id_i   = XXH64(the bytes of block i)
    hash_i = XXH64(LE64(id_i) ‖ LE64(hash_{i-1})),  hash_{-1} = root

so a hash identifies its block and all blocks before it; a partial last block is hashed too. The
reference seeds XXH64 with 0; a random seed prevents clients from constructing colliding prompts.
"""

from collections.abc import Iterable
from struct import Struct

import numpy as np
import numpy.typing as npt
import xxhash

BYTES_PER_TOKEN = 4
BlockHashes = npt.NDArray[np.uint64]
_LINK = Struct("<QQ")


def prompt_hashes(
    prompts: Iterable[bytes],
    model: str,
    salt: str,
    block_size_tokens: int,
    max_blocks: int | None = None,
    seed: int = 0,
) -> tuple[BlockHashes, ...]:
    root = root_hash(model, salt, seed)
    return tuple(
        [block_hashes(prompt, root, block_size_tokens, max_blocks, seed) for prompt in prompts]
    )


def root_hash(model: str, salt: str = "", seed: int = 0) -> int:
    """Compute the hash before block 0; it separates models, adapters and the salts of tenants."""
    # JSON of clients may contain lone surrogates, which have no UTF-8.
    return xxhash.xxh64_intdigest(model.encode() + salt.encode(errors="surrogatepass"), seed)


def block_hashes(
    tokens: bytes, root: int, block_size_tokens: int, max_blocks: int | None = None, seed: int = 0
) -> BlockHashes:
    """Compute the hashes of the first `max_blocks` blocks of packed uint32 tokens."""
    if block_size_tokens < 1:
        raise ValueError(f"block size must be at least 1 token, got {block_size_tokens}")
    digest, link = xxhash.xxh64_intdigest, _LINK.pack
    step = block_size_tokens * BYTES_PER_TOKEN
    end = len(tokens)
    if max_blocks is not None:
        end = min(end, max_blocks * step)
    previous = root
    hashes: list[int] = []
    for start in range(0, end, step):
        previous = digest(link(digest(tokens[start : start + step], seed), previous), seed)
        hashes.append(previous)
    return np.array(hashes, np.uint64)
