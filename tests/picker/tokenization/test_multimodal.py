"""Multi-modal items are read from the format of token-level APIs."""

from typing import Any

import pytest

from picker.tokenization.multimodal import read_features
from picker.types import MultiModalFeature

PROMPT = bytes(4 * 12)


def test_items_of_all_modalities_are_sorted_by_offset() -> None:
    value = {
        "mm_hashes": {"image": ["a", "b"], "video": ["v"]},
        "mm_placeholders": {
            "image": [{"offset": 9, "length": 2}, {"length": 3}],
            "video": [{"offset": 4, "length": 1}],
        },
    }
    assert read_features(value, PROMPT) == (
        MultiModalFeature("image", "b", 0, 3),
        MultiModalFeature("video", "v", 4, 1),
        MultiModalFeature("image", "a", 9, 2),
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"mm_hashes": None, "mm_placeholders": None},
        {"mm_hashes": {"image": ["a"]}},
        {"mm_hashes": {"image": None}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}},
    ],
)
def test_hashes_without_places_are_ignored(value: Any) -> None:
    assert read_features(value, PROMPT) == ()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"mm_hashes": []},
        {"mm_hashes": {"image": "a"}},
        {"mm_hashes": {"image": [1]}, "mm_placeholders": {"image": [{}]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [[0, 1]]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": -1}]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"length": True}]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"length": 1.5}]}},
    ],
)
def test_other_shapes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_features(value, PROMPT)


@pytest.mark.parametrize("length", [49, 2**64])
def test_the_total_length_of_items_is_bounded(length: int) -> None:
    """Every block is hashed with its items, so only a few items may overlap."""
    places = [{"offset": 0, "length": 12}] * 4
    value = {"mm_hashes": {"image": ["a"] * 4}, "mm_placeholders": {"image": places}}
    assert len(read_features(value, PROMPT)) == 4
    lone = {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": length}]},
    }
    with pytest.raises(ValueError, match="within the prompt"):
        read_features(lone, PROMPT)
