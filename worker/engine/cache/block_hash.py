"""Names of the contents of full KV blocks: equal tokens after equal prefixes get the same name.

Block i's digest is H((digest of block i−1, its token ids, its extra keys)), as vLLM 0.32 computes
it, byte for byte; the parent of block 0 is the *root*, H(seed). H applies SHA-256 or XXH3-128 (no
defence against crafted collisions) to pickle protocol 5 or canonical CBOR. Extra keys make equal
tokens mean different KV: the cache salt enters block 0 only and reaches the others through the
chain; a LoRA adapter enters every block, before the salt.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import cbor2
import xxhash

from worker.config import HASH_ALGOS
from worker.errors import ConfigError
from worker.types import Adapter

DEFAULT_SEED = "vllm-none-hash"
RANDOM_SEED = "random"
_PICKLE_PROTOCOL = 5  # vLLM's: another protocol gives other digests
_EVENT_HASH_BYTES = 8

ExtraKeys = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class BlockHash:
    """The name of one full block, and all that was hashed into it. A lookup by `digest` compares
    the whole value, so that colliding blocks never stand in for each other. `parent` is the digest
    of the block before it, or the root for block 0.
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    extra: ExtraKeys | None = None
    adapter_number: int | None = field(default=None, compare=False)  # for events alone

    @property
    def short_hash(self) -> int:
        return short_hash(self.digest)


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """The written tokens, at least one, of a block that is not full; `index` full blocks precede
    it. It has no digest, because only full blocks have names that other engines could know.
    """

    index: int
    parent: bytes
    token_ids: tuple[int, ...]
    extra: ExtraKeys | None = None


def short_hash(digest: bytes) -> int:
    """Return the last 64 bits of a digest, unsigned: how KV events name blocks by default."""
    return int.from_bytes(digest[-_EVENT_HASH_BYTES:], "big")


def extra_keys(
    block_index: int, cache_salt: str | None, adapter: Adapter | None = None
) -> ExtraKeys | None:
    keys: list[tuple[str, ...]] = [] if adapter is None else [adapter.key]
    if block_index == 0 and cache_salt is not None:
        keys.append(("cache_salt", cache_salt))
    return tuple(keys) or None


def key_of(extra: ExtraKeys | None, tag: str) -> str | None:
    """Return the extra key of a block with this tag: the salt, or the adapter's name."""
    return next((key[1] for key in extra or () if key[0] == tag), None)


class BlockHasher:
    """Extends chains of block hashes. Stateless after construction.

    Chains of different seeds never meet. With `seed` None, SHA-256 uses vLLM's default, on which
    all processes agree, and XXH3 uses random bytes; "random" uses random bytes with any algorithm.
    Raises ConfigError for an unknown algorithm.
    """

    def __init__(self, block_size: int, algo: str = "sha256", seed: str | None = None) -> None:
        if algo not in HASH_ALGOS:
            known = ", ".join(HASH_ALGOS)
            raise ConfigError(f"unknown prefix caching hash algorithm {algo!r}; known are {known}")
        if seed is None:
            # Collisions of XXH3 can be crafted, but not without the seed.
            seed = DEFAULT_SEED if algo.startswith("sha256") else RANDOM_SEED
        if seed == RANDOM_SEED:
            seed = os.urandom(32).hex()
        self._block_size = block_size
        self._hash = _HASH_FUNCTIONS[algo]
        self.root = self._hash(seed)

    def extend(
        self,
        chain: list[BlockHash],
        token_ids: Sequence[int],
        num_blocks: int,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Grow `chain` to the first `num_blocks` blocks of `token_ids`, unless it is longer."""
        size, hash_of = self._block_size, self._hash
        parent = chain[-1].digest if chain else self.root
        number = None if adapter is None else adapter.number
        for index in range(len(chain), num_blocks):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            extra = extra_keys(index, cache_salt, adapter)
            digest = hash_of((parent, tokens, extra))
            chain.append(BlockHash(digest, parent, tokens, extra, number))
            parent = digest


_HASH_FUNCTIONS: dict[str, Callable[[object], bytes]] = {
    "sha256": lambda value: sha256(pickle.dumps(value, _PICKLE_PROTOCOL)).digest(),
    # Canonical CBOR can be reproduced in other languages, pickle cannot.
    "sha256_cbor": lambda value: sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickle.dumps(value, _PICKLE_PROTOCOL)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}
