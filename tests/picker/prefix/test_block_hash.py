"""Block hashes agree with the published test vectors."""

from random import Random
from struct import pack

import pytest

from picker.prefix.block_hash import BlockHasher, block_hashes, root_hash, unpacked


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize(
    ("model", "salt", "prompt", "block_size", "root", "hashes"),
    [
        (
            *("test-model", "", tokens(1, 2, 3, 4), 2),
            3725054772343846052,
            [9930943305924734546, 10152593023489682002],
        ),
        (  # a salt and a partial last block
            *("test-model", "salt", tokens(1, 2, 3), 2),
            11019316477126004455,
            [2868846555763096814, 4872061566854504950],
        ),
        ("m", "", b"hello world\0", 64, 13415755381228090088, [17753566424715801716]),
    ],
)
def test_hashes_match_the_test_vectors(
    model: str, salt: str, prompt: bytes, block_size: int, root: int, hashes: list[int]
) -> None:
    assert root_hash(model, salt) == root
    assert list(unpacked(block_hashes(prompt, root, block_size))) == hashes


def test_a_hash_depends_on_all_blocks_before_it() -> None:
    root = root_hash("m")
    first = unpacked(block_hashes(tokens(1, 2, 3, 4), root, 2))
    second = unpacked(block_hashes(tokens(9, 9, 3, 4), root, 2))
    assert first[1] != second[1]
    assert unpacked(block_hashes(tokens(1, 2, 7, 7), root, 2))[0] == first[0]


def test_at_most_max_blocks_are_hashed() -> None:
    root, hasher = root_hash("m"), BlockHasher(2)
    everything = unpacked(hasher.hashes(tokens(*range(10)), root))
    assert len(everything) == 5
    assert unpacked(hasher.hashes(tokens(*range(10)), root, max_blocks=3)) == everything[:3]
    assert hasher.hashes(b"", root) == b""


def test_remembered_runs_change_no_hash() -> None:
    rng, hasher = Random(3), BlockHasher(3, seed=11)
    known = [b""]
    for _ in range(1500):
        start = rng.choice(known)
        prompt = start[: rng.randrange(len(start) + 1)] + rng.randbytes(rng.randrange(300))
        known = [*known[-40:], prompt]
        root = rng.randrange(3)
        assert hasher.hashes(prompt, root) == block_hashes(prompt, root, 3, seed=11)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        BlockHasher(0)


def test_a_seed_changes_every_hash() -> None:
    """A client that does not know the seed cannot construct colliding prompts."""
    plain, seeded = root_hash("m"), root_hash("m", seed=7)
    assert plain != seeded
    prompt = tokens(1, 2, 3, 4)
    one, other = (unpacked(block_hashes(prompt, plain, 2, seed=seed)) for seed in (0, 7))
    assert not set(one) & set(other)
