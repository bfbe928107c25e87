"""Deciders: whether a stage of a request is worth an endpoint of its own."""

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Decider
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import MultiModalFeature
from tests.support.picker.plugin_scenes import configured, placed, request_for

IMAGE = MultiModalFeature("image", "hash", 0, 10)
APPROXIMATE = "approx-prefix-cache-producer"


def matched(
    blocks: dict[str, int], block_size: int = 10, producer: str = APPROXIMATE
) -> Attributes:
    attributes = Attributes()
    by_key = {f"default/{name}": count for name, count in blocks.items()}
    info = PrefixCacheMatchInfo(10, block_size, by_key)
    attributes[match_info_key(producer)] = info
    return attributes


def test_the_always_decider_runs_every_stage() -> None:
    decider = configured("always-disagg-pd-decider")
    assert isinstance(decider, Decider)
    assert decider.should_run(request_for(), None, Attributes())


@pytest.mark.parametrize(
    ("features", "expected"),
    [((), False), (((),), False), (((), (IMAGE,)), True), (((IMAGE, IMAGE),), True)],
)
def test_the_multimodal_decider_runs_the_stage_for_any_item(
    features: tuple[tuple[MultiModalFeature, ...], ...], expected: bool
) -> None:
    decider = configured("always-disagg-multimodal-decider")
    assert isinstance(decider, Decider)
    request = request_for(features=features)
    assert decider.should_run(request, None, Attributes()) is expected
    parsed = replace(request_for(), body=replace(request_for().body, features=features))
    assert decider.should_run(parsed, None, Attributes()) is expected


@pytest.mark.parametrize(
    ("parameters", "tokens", "blocks", "expected"),
    [
        ({"nonCachedTokens": 50}, 100, {"w": 5}, True),
        ({"nonCachedTokens": 51}, 100, {"w": 5}, False),
        ({"nonCachedTokens": 50}, 100, {"w": 6}, False),
        ({"nonCachedTokens": 50}, 100, {"other": 9}, True),
        ({"nonCachedTokens": 50}, 100, {}, True),
        ({"nonCachedTokens": 100}, 100, {}, True),
        ({"nonCachedTokens": 101}, 100, {}, False),
        ({"nonCachedTokens": 1}, 95, {"w": 10}, False),
        ({"nonCachedTokens": 1}, 0, {}, False),
        ({"nonCachedTokens": 0}, 100, {}, False),
        ({}, 100, {}, False),
        ({"nonCachedTokens": 10, "promptTokens": 100}, 99, {}, False),
        ({"nonCachedTokens": 10, "promptTokens": 100}, 100, {}, True),
        ({"nonCachedTokens": 10, "promptTokens": 5}, 9, {}, False),
    ],
)
def test_the_prefix_decider_runs_the_stage_for_enough_uncached_tokens(
    parameters: dict[str, int], tokens: int, blocks: dict[str, int], expected: bool
) -> None:
    decider = configured("prefix-based-pd-decider", parameters)
    first = tokens // 3
    request = request_for(prompts=(bytes(4 * first), bytes(4 * (tokens - first))))
    assert decider.should_run(request, placed("w"), matched(blocks)) is expected


def test_the_prefix_decider_needs_an_endpoint_and_a_finding() -> None:
    decider = configured("prefix-based-pd-decider", {"nonCachedTokens": 1})
    request = request_for(prompts=(bytes(400),))
    assert not decider.should_run(request, None, matched({}))
    assert not decider.should_run(request, placed("w"), Attributes())
    precise = matched({}, producer="precise-prefix-cache-producer")
    assert not decider.should_run(request, placed("w"), precise)
    assert decider.should_run(request, placed("w"), matched({}))
    assert decider.consumes == (match_info_key(APPROXIMATE),)
    assert configured("prefix-based-pd-decider").consumes == ()
