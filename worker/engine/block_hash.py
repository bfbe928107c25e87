"""Names for the contents of full KV blocks: the same tokens after the same prefix, the same name.

Block i's digest is SHA-256 over its content: the digest of block i−1 (of the seed for block 0), the
block's token ids as little-endian u32, then the extra keys that make equal tokens mean different
KV. The cache salt is such a key; it enters block 0 only and reaches the others through the chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from sys import byteorder

_TOKEN_TYPECODE = "I" if array("I").itemsize == 4 else "L"


@dataclass(frozen=True, slots=True)
class BlockHash:
    """The name of one full block, and all that was hashed into it.

    Whoever finds a block by `digest` compares `content`, so that two blocks whose digests collide
    are told apart and never answer for each other.
    """

    digest: bytes
    content: bytes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for an id outside [0, 2**32)."""
    packed = array(_TOKEN_TYPECODE, token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class BlockHasher:
    """Extends chains of block hashes. Stateless after construction.

    `seed` separates caches: chains of different seeds never meet.
    """

    def __init__(self, block_size: int, seed: bytes = b"") -> None:
        self._block_size = block_size
        self._root = sha256(seed).digest()

    def extend(
        self,
        chain: list[BlockHash],
        token_ids: Sequence[int],
        num_blocks: int,
        cache_salt: str | None = None,
    ) -> None:
        """Grow `chain` in place to the first `num_blocks` blocks of `token_ids`.

        `token_ids` holds at least `num_blocks` full blocks, of which the first `len(chain)` are
        those already hashed. A longer chain is left as it is.
        """
        size = self._block_size
        parent = chain[-1].digest if chain else self._root
        for index in range(len(chain), num_blocks):
            content = parent + pack_tokens(token_ids[index * size : (index + 1) * size])
            if index == 0 and cache_salt is not None:
                content += b"cache_salt\0" + cache_salt.encode()
            parent = sha256(content).digest()
            chain.append(BlockHash(parent, content))
