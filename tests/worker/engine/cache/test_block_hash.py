"""Block hashes name contents: same tokens after the same prefix under the same keys."""

import pytest

from worker.engine.cache.block_hash import BlockHash, BlockHasher, ExtraKeys, extra_keys, short_hash
from worker.errors import ConfigError
from worker.types import Adapter

TOKENS = list(range(1, 17))


def chain(
    tokens: list[int], salt: str | None = None, algo: str = "sha256", seed: str | None = None
) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(4, algo, seed).extend(hashes, tokens, len(tokens) // 4, salt)
    return hashes


@pytest.mark.parametrize(
    ("algo", "seed", "root", "block"),
    [
        (
            "sha256",
            None,
            "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
            "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
        ),
        (
            "sha256_cbor",
            None,
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
            "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
        ),
    ],
)
def test_the_default_seed_is_vllms(algo: str, seed: str | None, root: str, block: str) -> None:
    """Root and first block of the tokens 1 to 16 are vLLM 0.32's, byte for byte."""
    hasher = BlockHasher(16, algo, seed)
    hashes: list[BlockHash] = []
    hasher.extend(hashes, TOKENS, 1)
    assert hasher.root.hex() == root
    assert hashes == [BlockHash(bytes.fromhex(block), hasher.root, tuple(TOKENS), None)]


@pytest.mark.parametrize(
    ("algo", "seed", "root", "block", "short"),
    [
        ("sha256", "vllm-none-hash", "066b1e89", "7b255da405e1d722", 1403909460543360175),
        ("sha256", "0", "1973e23848344dc4", "bea72b7d33de03c1", 7536218907325174565),
        ("sha256", "42", "c0bc02c9fc92a494", "ab60b49ca9a9b088", 4508471921923631364),
        ("sha256_cbor", "vllm-none-hash", "9bd96a48", "cd7c51bc", 8866452693264111234),
        ("sha256_cbor", "0", "4e1195df020de59e", "202da172482d928b", 3236607068019569386),
        ("sha256_cbor", "42", "9fa6eb003f14425e", "476e88fb0c175c0b", 16300212363532267629),
    ],
)
def test_seeds_give_vllms_digests_and_event_integers(
    algo: str, seed: str, root: str, block: str, short: int
) -> None:
    hasher = BlockHasher(16, algo, seed)
    hashes: list[BlockHash] = []
    hasher.extend(hashes, TOKENS, 1)
    assert hasher.root.hex().startswith(root)
    assert hashes[0].digest.hex().startswith(block)
    assert hashes[0].short_hash == short_hash(hashes[0].digest) == short


@pytest.mark.parametrize(
    ("algo", "root", "block"),
    [
        ("xxhash", "6fb31cc38bba6066183f7f2104b9c051", "6ba7d7fc1608e5f0a4612b1b0c87458f"),
        ("xxhash_cbor", "1ebe36576dcb573f26b99533a20aaeca", "c2d7a75070fc6d6b0c3fb0af456c1009"),
    ],
)
def test_xxhash_digests_are_xxh3_128_of_the_same_bytes(algo: str, root: str, block: str) -> None:
    hasher = BlockHasher(16, algo, "0")
    hashes: list[BlockHash] = []
    hasher.extend(hashes, TOKENS, 1)
    assert (hasher.root.hex(), hashes[0].digest.hex()) == (root, block)


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_xxhash_is_secret_to_the_process_by_default(algo: str) -> None:
    """XXH3 collisions can be crafted, so without a seed no two hashers agree."""
    assert BlockHasher(16, algo).root != BlockHasher(16, algo).root


def test_any_algorithm_can_be_given_a_secret_seed() -> None:
    roots = {BlockHasher(16, "sha256", "random").root for _ in range(3)}
    assert len(roots | {BlockHasher(16).root}) == 4


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'md5'.*sha256_cbor"):
        BlockHasher(16, "md5")


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_chain_grows_in_steps_to_the_same_result(algo: str) -> None:
    tokens = list(range(40))
    hashes: list[BlockHash] = []
    hasher = BlockHasher(4, algo, "s")
    for count in (1, 1, 3, 10, 2):
        hasher.extend(hashes, tokens, count, "salt")
    assert hashes == chain(tokens, "salt", algo, "s")
    assert [h.parent for h in hashes[1:]] == [h.digest for h in hashes[:-1]]


def test_salt_separates_whole_chains_through_block_zero() -> None:
    tokens = list(range(8))
    plain, salted, other = chain(tokens), chain(tokens, "a"), chain(tokens, "b")
    digests = {h.digest for hashes in (plain, salted, other) for h in hashes}
    assert len(digests) == 6
    expected: list[ExtraKeys | None] = [(("cache_salt", "a"),), None]
    assert [h.extra for h in salted] == expected
    assert [extra_keys(index, "a") for index in range(2)] == expected
    assert extra_keys(0, None) is None


def test_an_adapter_stands_in_every_block() -> None:
    first, again = Adapter("sql", "/a/sql", 1), Adapter("sql", "/a/sql", 2, version=1)
    assert extra_keys(1, "salt", first) == (("lora", "sql", "/a/sql"),)
    assert extra_keys(0, "salt", first) == (("lora", "sql", "/a/sql"), ("cache_salt", "salt"))
    assert extra_keys(1, None, again) == (("lora", "sql", "/a/sql#1"),)
