"""Keys of prompt blocks agree with the published test vectors."""

from struct import pack

import cbor2
import pytest

from picker.prefix.block_keys import BlockKeys, HashAlgorithm
from picker.types import MultiModalFeature


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize(
    ("algorithm", "root", "keys"),
    [
        (
            HashAlgorithm.CBOR_FNV,
            17515353698173365712,
            [12915946116324560722, 16245044729138844785],
        ),
        (HashAlgorithm.XXH64, 658786475292698776, [8433318296068090153, 13396831690803705894]),
    ],
)
def test_keys_match_the_test_vectors(algorithm: HashAlgorithm, root: int, keys: list[int]) -> None:
    """The vector has model `test-model`, no seed, and tokens 1 to 8 in blocks of four."""
    maker = BlockKeys(4, algorithm=algorithm)
    assert maker.root("test-model") == root
    assert maker.prompt("test-model", tokens(*range(1, 9))) == keys


def test_an_extra_key_matches_the_test_vector() -> None:
    """The vector has tokens 1 to 4 with the extra `abc`."""
    maker = BlockKeys(4, algorithm=HashAlgorithm.CBOR_FNV)
    assert maker.chain(maker.root("test-model"), tokens(1, 2, 3, 4), [("abc",)]) == [
        9228555881068281781
    ]


def test_the_cbor_is_canonical() -> None:
    assert cbor2.dumps([1, None, "a"], canonical=True).hex() == "8301f66161"


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_only_full_blocks_have_keys_that_depend_on_all_before_them(
    algorithm: HashAlgorithm,
) -> None:
    maker = BlockKeys(2, "seed", algorithm)
    whole = maker.prompt("m", tokens(1, 2, 3, 4, 5))
    assert len(whole) == 2
    assert maker.chain(whole[0], tokens(3, 4)) == whole[1:]
    assert maker.prompt("m", tokens(9, 9, 3, 4))[1] != whole[1]
    assert maker.prompt("other", tokens(1, 2))[0] != whole[0]
    assert BlockKeys(2, "", algorithm).prompt("m", tokens(1, 2))[0] != whole[0]


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_media_mark_the_blocks_they_overlap_and_a_salt_the_first(algorithm: HashAlgorithm) -> None:
    maker = BlockKeys(2, algorithm=algorithm)
    prompt = tokens(*range(8))
    image = MultiModalFeature("image", "abc", 3, 3)
    root = maker.root("m")
    assert maker.prompt("m", prompt, [image], "salt") == maker.chain(
        root, prompt, [("salt",), ("abc",), ("abc",), ()]
    )
    both = [MultiModalFeature("image", "later", 1, 1), MultiModalFeature("audio", "first", 0, 1)]
    assert maker.prompt("m", tokens(1, 2), both, "salt") == maker.chain(
        root, tokens(1, 2), [("first", "later", "salt")]
    )
    assert maker.prompt("m", tokens(1), [image], "salt") == []


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        BlockKeys(0)
