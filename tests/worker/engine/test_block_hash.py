"""Block hashes name contents: same tokens after the same prefix under the same keys."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest

from worker.engine.block_hash import BlockHash, BlockHasher, pack_tokens


def chain(tokens: list[int], salt: str | None = None, seed: bytes = b"") -> list[BlockHash]:
    """All full blocks of `tokens`, four tokens each."""
    hashes: list[BlockHash] = []
    BlockHasher(4, seed).extend(hashes, tokens, len(tokens) // 4, salt)
    return hashes


def test_digest_is_sha256_over_parent_and_tokens() -> None:
    """The chain can be computed by anybody who knows the three ingredients."""
    first, second = chain(list(range(1, 9)))
    root = sha256(b"").digest()
    expected = sha256(root + struct.pack("<4I", 1, 2, 3, 4)).digest()
    assert first.digest == expected
    assert second.digest == sha256(expected + struct.pack("<4I", 5, 6, 7, 8)).digest()


def test_chain_grows_in_steps_to_the_same_result() -> None:
    """Hashing block by block as tokens arrive equals hashing all at once."""
    tokens = list(range(40))
    hashes: list[BlockHash] = []
    hasher = BlockHasher(4)
    for count in (1, 1, 3, 10, 2):
        hasher.extend(hashes, tokens, count)
    assert hashes == chain(tokens)


def test_equal_tokens_after_different_prefixes_differ() -> None:
    """A block's name depends on everything before it."""
    left, right = chain([1, 2, 3, 4, 9, 9, 9, 9]), chain([1, 2, 3, 5, 9, 9, 9, 9])
    assert left[1].digest != right[1].digest


def test_salt_separates_whole_chains_through_block_zero() -> None:
    """Two tenants with different salts share no block, though only the first is salted."""
    tokens = list(range(8))
    plain, salted, other = chain(tokens), chain(tokens, "a"), chain(tokens, "b")
    digests = {h.digest for hashes in (plain, salted, other) for h in hashes}
    assert len(digests) == 6
    assert len(salted[1].content) == len(plain[1].content)


def test_seed_separates_caches() -> None:
    """Chains of different seeds never meet."""
    assert chain([1, 2, 3, 4])[0].digest != chain([1, 2, 3, 4], seed=b"x")[0].digest


def test_token_ids_outside_u32_are_refused() -> None:
    """An id that does not fit is an error, not a silent truncation."""
    assert pack_tokens([2**32 - 1]) == b"\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        pack_tokens([2**32])
