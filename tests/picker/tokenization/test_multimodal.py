"""Multi-modal items beside token ids."""

from __future__ import annotations

from typing import Any

import pytest

from picker.tokenization.multimodal import read_features
from picker.types import MultiModalFeature

PROMPT = bytes(4 * 12)


def test_items_of_all_modalities_come_in_the_order_of_their_offsets() -> None:
    """Each hash belongs to the place at the same position of its modality."""
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
def test_what_has_no_hash_or_no_place_is_no_item(value: Any) -> None:
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
def test_other_shapes_are_errors(value: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_features(value, PROMPT)


@pytest.mark.parametrize("length", [49, 2**64])
def test_items_do_not_cover_a_prompt_more_than_they_can(length: int) -> None:
    """Each is hashed with every block it reaches into; a few may overlap."""
    places = [{"offset": 0, "length": 12}] * 4
    value = {"mm_hashes": {"image": ["a"] * 4}, "mm_placeholders": {"image": places}}
    assert len(read_features(value, PROMPT)) == 4
    lone = {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": length}]},
    }
    with pytest.raises(ValueError, match="within the prompt"):
        read_features(lone, PROMPT)
