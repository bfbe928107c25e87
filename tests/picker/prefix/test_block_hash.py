"""Block hashes agree with the published test vectors."""

from struct import pack

import pytest

from picker.prefix.block_hash import block_hashes, root_hash


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
    assert block_hashes(prompt, root, block_size).tolist() == hashes


def test_a_hash_depends_on_all_blocks_before_it() -> None:
    root = root_hash("m")
    first = block_hashes(tokens(1, 2, 3, 4), root, 2)
    second = block_hashes(tokens(9, 9, 3, 4), root, 2)
    assert first[1] != second[1]
    assert block_hashes(tokens(1, 2, 7, 7), root, 2)[0] == first[0]


def test_at_most_max_blocks_are_hashed() -> None:
    root = root_hash("m")
    everything = block_hashes(tokens(*range(10)), root, 2).tolist()
    assert len(everything) == 5
    assert block_hashes(tokens(*range(10)), root, 2, max_blocks=3).tolist() == everything[:3]
    assert block_hashes(b"", root, 2).tolist() == []


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        block_hashes(tokens(1), 0, 0)


def test_a_seed_changes_every_hash() -> None:
    """A client that does not know the seed cannot construct colliding prompts."""
    plain, seeded = root_hash("m"), root_hash("m", seed=7)
    assert plain != seeded
    prompt = tokens(1, 2, 3, 4)
    one, other = (block_hashes(prompt, plain, 2, seed=seed).tolist() for seed in (0, 7))
    assert not set(one) & set(other)
