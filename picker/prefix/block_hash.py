"""Hashes the blocks of a prompt in a chain, like the reference picker's approximate prefix cache.

A prompt is its tokens packed as little-endian uint32. With XXH64:

    root   = XXH64(model ‖ salt)
    id_i   = XXH64(the bytes of block i)
    hash_i = XXH64(LE64(id_i) ‖ LE64(hash_{i-1})),  hash_{-1} = root

so a hash identifies its block and all blocks before it; a partial last block is hashed too. The
reference seeds XXH64 with 0; a random seed prevents clients from constructing colliding prompts.
"""

from collections.abc import Iterable
from struct import Struct, pack, unpack
from typing import TypeAlias

import xxhash

BYTES_PER_TOKEN = 4
BYTES_PER_HASH = 8
# The hashes of a prompt's blocks, first block first, as little-endian uint64.
BlockHashes: TypeAlias = bytes
_LINK = Struct("<QQ")
_RUN = 8  # blocks that are remembered together
_MAX_RUNS = 2048  # in each of two generations; one takes about 300 bytes


class BlockHasher:
    """Hashes prompts; remembers the hashes of runs of blocks, because prompts share beginnings.

    A run is found by the hash before it and XXH3-128 of its tokens, with the seed.
    """

    def __init__(self, block_size_tokens: int, seed: int = 0) -> None:
        """Raises `ValueError` for a block size below 1."""
        if block_size_tokens < 1:
            raise ValueError(f"block size must be at least 1 token, got {block_size_tokens}")
        self.block_size_tokens, self.seed = block_size_tokens, seed
        self._young: dict[tuple[int, int], BlockHashes] = {}
        self._old: dict[tuple[int, int], BlockHashes] = {}

    def prompts(
        self, prompts: Iterable[bytes], model: str, salt: str, max_blocks: int | None = None
    ) -> tuple[BlockHashes, ...]:
        root = root_hash(model, salt, self.seed)
        return tuple([self.hashes(prompt, root, max_blocks) for prompt in prompts])

    def hashes(self, tokens: bytes, root: int, max_blocks: int | None = None) -> BlockHashes:
        """Compute the hashes of the first `max_blocks` blocks of packed uint32 tokens."""
        size = self.block_size_tokens * BYTES_PER_TOKEN
        step, end = size * _RUN, len(tokens)
        if max_blocks is not None:
            end = min(end, max_blocks * size)
        whole = end - end % step
        pieces: list[BlockHashes] = []
        for start in range(0, whole, step):
            run = tokens[start : start + step]
            name = (root, xxhash.xxh3_128_intdigest(run, self.seed))
            found = self._young.get(name) or self._remember(name, run)
            pieces.append(found)
            root = int.from_bytes(found[-BYTES_PER_HASH:], "little")
        if whole < end:
            pieces.append(block_hashes(tokens[whole:end], root, self.block_size_tokens, self.seed))
        return b"".join(pieces)

    def _remember(self, name: tuple[int, int], run: bytes) -> BlockHashes:
        found = self._old.get(name)
        if found is None:
            found = block_hashes(run, name[0], self.block_size_tokens, self.seed)
        if len(self._young) >= _MAX_RUNS:
            self._young, self._old = {}, self._young
        self._young[name] = found
        return found


def root_hash(model: str, salt: str = "", seed: int = 0) -> int:
    """Compute the hash before block 0; it separates models, adapters and the salts of tenants."""
    # JSON of clients may contain lone surrogates, which have no UTF-8.
    return xxhash.xxh64_intdigest(model.encode() + salt.encode(errors="surrogatepass"), seed)


def block_hashes(tokens: bytes, root: int, block_size_tokens: int, seed: int = 0) -> BlockHashes:
    """Compute the hashes of the blocks of packed uint32 tokens, one after the other."""
    digest, link = xxhash.xxh64_intdigest, _LINK.pack
    step = block_size_tokens * BYTES_PER_TOKEN
    previous = root
    hashes: list[int] = []
    for start in range(0, len(tokens), step):
        previous = digest(link(digest(tokens[start : start + step], seed), previous), seed)
        hashes.append(previous)
    return packed(hashes)


def packed(hashes: list[int]) -> BlockHashes:
    return pack(f"<{len(hashes)}Q", *hashes)


def unpacked(hashes: BlockHashes) -> tuple[int, ...]:
    return unpack(f"<{len(hashes) // BYTES_PER_HASH}Q", hashes)
