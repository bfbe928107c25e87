"""Reads multi-modal items in the format of vLLM's token-level API."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from picker.types import BYTES_PER_TOKEN, MultiModalFeature

MAX_ITEMS_PER_TOKEN = 4  # items may overlap, as a video and its sound do


def distinct_items(features: Sequence[Sequence[MultiModalFeature]]) -> dict[str, str]:
    """Map the content hash of each distinct item to its modality, in prompt order."""
    return {one.content_hash: one.modality for prompt in features for one in prompt}


def modalities(features: Sequence[Sequence[MultiModalFeature]]) -> Mapping[str, int]:
    return Counter(distinct_items(features).values())


def read_features(value: object, prompt: bytes) -> tuple[MultiModalFeature, ...]:
    """Read the items of `prompt` (packed tokens) from `value`, sorted by offset. Raises
    `ValueError` for a malformed one.

    `value` is `{mm_hashes: {modality: [hash]}, mm_placeholders: {modality: [{offset, length}]}}`,
    or None. A hash without a place, or a place without a hash, is ignored.
    """
    if value is None:
        return ()
    hashes, places = _member(value, "mm_hashes"), _member(value, "mm_placeholders")
    features = [
        _feature(modality, content_hash, place)
        for modality, of_modality in hashes.items()
        for content_hash, place in zip(
            _list(of_modality), _list(places.get(modality)), strict=False
        )
    ]
    check_items(features, prompt)
    return tuple(sorted(features, key=lambda feature: feature.offset))


def check_items(features: Sequence[MultiModalFeature], prompt: bytes) -> None:
    """Raise `ValueError` if items take over `MAX_ITEMS_PER_TOKEN` times the tokens of `prompt`."""
    # Every block is hashed with its items, so a short request could cause much work.
    room = MAX_ITEMS_PER_TOKEN * (len(prompt) // BYTES_PER_TOKEN)
    if sum(feature.length for feature in features) > room:
        raise ValueError("the items must be within the prompt")


def _member(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("features must be an object")
    member = value.get(name)
    if member is None:
        return {}
    if not isinstance(member, dict):
        raise ValueError(f"features.{name} must be an object")
    return member


def _list(value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("the hashes and places of a modality must be lists")
    return value


def _feature(modality: str, content_hash: object, place: object) -> MultiModalFeature:
    if not isinstance(content_hash, str) or not isinstance(place, dict):
        raise ValueError("a hash must be a string and a place an object")
    offset, length = place.get("offset", 0), place.get("length", 0)
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("offset and length must be whole numbers of at least zero")
    return MultiModalFeature(modality, content_hash, offset, length)
