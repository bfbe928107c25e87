"""Computes keys of full prompt blocks for the precise prefix cache, as the reference does.

Both algorithms chain keys from a root that identifies the model. With `cbor-fnv`, FNV-1a-64 of
canonical CBOR:

    init    = FNV(seed)
    root    = FNV(CBOR([init, null, model]))
    key_i   = FNV(CBOR([key_{i-1}, tokens of block i, extras])),  key_{-1} = root

where extras is null or a list of maps {"Hash": text}. With `xxh64`:

    init    = XXH64(seed)
    root    = XXH64(LE64(init) ‖ LE64(length of model) ‖ model)
    key_i   = XXH64(LE64(key_{i-1}) ‖ LE32 of each token ‖ for each extra LE64(length) ‖ extra)

The extras of a block are the content hashes of the media that overlap it, in order; on block 0 the
cache salt follows them. Keys need not equal an engine's hashes, because engines also send tokens.
"""

from collections.abc import Sequence
from enum import Enum
from struct import Struct, unpack

import cbor2
import xxhash

from picker.types import BYTES_PER_TOKEN, MultiModalFeature

Extras = tuple[str, ...]
_FNV_OFFSET = 0xCBF2_9CE4_8422_2325
_FNV_PRIME = 0x100_0000_01B3
_MASK = 2**64 - 1
_LE64 = Struct("<Q")


class HashAlgorithm(Enum):
    """A hash function for keys. XXH64 is about ten times faster; they differ in nothing else."""

    CBOR_FNV = "cbor-fnv"
    XXH64 = "xxh64"


class BlockKeys:
    def __init__(
        self, block_size_tokens: int, seed: str = "", algorithm: HashAlgorithm = HashAlgorithm.XXH64
    ) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"block size must be at least 1 token, got {block_size_tokens}")
        self.block_size_tokens = block_size_tokens
        self._key = _xxh64_key if algorithm is HashAlgorithm.XXH64 else _cbor_key
        self._step = block_size_tokens * BYTES_PER_TOKEN
        self._seed = seed.encode()
        self._is_xxh64 = algorithm is HashAlgorithm.XXH64

    def root(self, model: str) -> int:
        if self._is_xxh64:
            return _xxh64_key(xxhash.xxh64_intdigest(self._seed), b"", (model,))
        return _fnv(cbor2.dumps([_fnv(self._seed), None, model], canonical=True))

    def chain(self, parent: int, tokens: bytes, extras: Sequence[Extras] = ()) -> list[int]:
        """Compute the keys of the full blocks of `tokens` (packed uint32) that follow `parent`."""
        keys: list[int] = []
        step, make = self._step, self._key
        for index, start in enumerate(range(0, len(tokens) - step + 1, step)):
            own = extras[index] if index < len(extras) else ()
            parent = make(parent, tokens[start : start + step], own)
            keys.append(parent)
        return keys

    def prompt(
        self, model: str, tokens: bytes, features: Sequence[MultiModalFeature] = (), salt: str = ""
    ) -> list[int]:
        return self.chain(self.root(model), tokens, self._extras(len(tokens), features, salt))

    def _extras(
        self, num_bytes: int, features: Sequence[MultiModalFeature], salt: str
    ) -> list[Extras]:
        blocks = num_bytes // self._step
        if not blocks or not (features or salt):
            return []
        size = self.block_size_tokens
        extras: list[list[str]] = [[] for _ in range(blocks)]
        for feature in sorted(features, key=lambda feature: feature.offset):
            last = (feature.offset + feature.length - 1) // size
            for block in range(feature.offset // size, min(last + 1, blocks)):
                extras[block].append(feature.content_hash)
        if salt:
            extras[0].append(salt)
        return [tuple(own) for own in extras]


def _xxh64_key(parent: int, tokens: bytes, extras: Extras) -> int:
    message = _LE64.pack(parent) + tokens
    if extras:  # one join, because a client may send many
        texts = [extra.encode(errors="surrogatepass") for extra in extras]
        message = b"".join((message, *(_LE64.pack(len(text)) + text for text in texts)))
    return xxhash.xxh64_intdigest(message)


def _cbor_key(parent: int, tokens: bytes, extras: Extras) -> int:
    numbers = unpack(f"<{len(tokens) // BYTES_PER_TOKEN}I", tokens)
    maps = [{"Hash": extra} for extra in extras] or None
    return _fnv(cbor2.dumps([parent, numbers, maps], canonical=True))


def _fnv(data: bytes) -> int:
    # FNV-1a, 64 bits.
    value, prime, mask = _FNV_OFFSET, _FNV_PRIME, _MASK
    for byte in data:
        value = (value ^ byte) * prime & mask
    return value
