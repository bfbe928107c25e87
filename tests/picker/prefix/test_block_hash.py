"""Block hashes agree with the published check vectors."""

from __future__ import annotations

from struct import pack

import pytest

from picker.prefix.block_hash import block_hashes, root_hash


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


def test_whole_blocks_match_the_check_vector() -> None:
    """Model `test-model`, four tokens in blocks of two."""
    root = root_hash("test-model")
    assert root == 3725054772343846052
    assert block_hashes(tokens(1, 2, 3, 4), root, 2).tolist() == [
        9930943305924734546,
        10152593023489682002,
    ]


def test_a_salt_changes_the_root_and_a_partial_tail_is_hashed() -> None:
    """Model `test-model`, salt `salt`, three tokens in blocks of two."""
    root = root_hash("test-model", "salt")
    assert root == 11019316477126004455
    assert block_hashes(tokens(1, 2, 3), root, 2).tolist() == [
        2868846555763096814,
        4872061566854504950,
    ]


def test_estimated_tokens_match_the_check_vector() -> None:
    """`hello world` packed by four bytes, model `m`, blocks of 64."""
    packed = tokens(1819043176, 1870078063, 6581362)
    assert packed == b"hello world\0"
    root = root_hash("m")
    assert root == 13415755381228090088
    assert block_hashes(packed, root, 64).tolist() == [17753566424715801716]


def test_a_hash_stands_for_everything_before_it() -> None:
    """Equal second blocks behind different first blocks hash differently."""
    root = root_hash("m")
    first = block_hashes(tokens(1, 2, 3, 4), root, 2)
    second = block_hashes(tokens(9, 9, 3, 4), root, 2)
    assert first[1] != second[1]
    assert block_hashes(tokens(1, 2, 7, 7), root, 2)[0] == first[0]


def test_at_most_max_blocks_are_hashed() -> None:
    """The cap cuts the tail, and an empty prompt has no blocks."""
    root = root_hash("m")
    everything = block_hashes(tokens(*range(10)), root, 2).tolist()
    assert len(everything) == 5
    assert block_hashes(tokens(*range(10)), root, 2, max_blocks=3).tolist() == everything[:3]
    assert block_hashes(b"", root, 2).tolist() == []


def test_a_block_size_below_one_is_refused() -> None:
    """Nothing can be cut into blocks of nothing."""
    with pytest.raises(ValueError, match="at least 1 token"):
        block_hashes(tokens(1), 0, 0)


def test_a_seed_changes_every_hash() -> None:
    """Whoever does not know the seed cannot look for prompts that collide."""
    plain, seeded = root_hash("m"), root_hash("m", seed=7)
    assert plain != seeded
    prompt = tokens(1, 2, 3, 4)
    one, other = (block_hashes(prompt, plain, 2, seed=seed).tolist() for seed in (0, 7))
    assert not set(one) & set(other)
