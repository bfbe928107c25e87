"""vllmhttp-parser: the bodies of vLLM's token-level API."""

import json
from typing import Any

import pytest

from picker.plugins.parsers.http_parsers import VllmHttpParser
from picker.types import Api, MultiModalFeature, ParsedBody, Usage

PATH = "/inference/v1/generate"


def parse(body: object) -> ParsedBody:
    return VllmHttpParser().parse(PATH, {}, json.dumps(body).encode())


def test_a_request_is_read() -> None:
    body = {
        "model": "m",
        "token_ids": [1, 2, 3],
        "features": {
            "mm_hashes": {"image": ["h"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        },
        "sampling_params": {"max_tokens": 5},
        "stream": True,
        "cache_salt": "s",
    }
    assert parse(body) == ParsedBody(
        api=Api.GENERATE,
        model="m",
        stream=True,
        payload=body,
        max_output_tokens=5,
        cache_salt="s",
        prompts=(b"\1\0\0\0\2\0\0\0\3\0\0\0",),
        features=((MultiModalFeature("image", "h", 1, 2),),),
    )


@pytest.mark.parametrize("token_ids", [[1.0, 2], [1e0, 2.0]])
def test_whole_numbers_may_be_written_as_fractions(token_ids: list[float]) -> None:
    """JSON has only one kind of numbers."""
    assert parse({"token_ids": token_ids}).prompts == (b"\1\0\0\0\2\0\0\0",)


@pytest.mark.parametrize(
    "token_ids",
    [None, [], "1", [-1], [2**32], [1.5], [True], ["1"], [[1]], [1, None], [1e10], [4294967296.0]],
)
def test_other_token_ids_are_no_prompt(token_ids: Any) -> None:
    parsed = parse({"model": "m", "token_ids": token_ids})
    assert (parsed.model, parsed.prompts, parsed.features) == ("m", (), ())


ENDLESS = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 2**64}]},
}


@pytest.mark.parametrize("features", [[], ENDLESS, {"mm_hashes": []}])
def test_a_prompt_whose_items_cannot_be_placed_has_no_prefix(features: Any) -> None:
    """Without its items it would equal another prompt."""
    parsed = parse({"token_ids": [1], "features": features, "cache_salt": 1})
    assert (parsed.prompts, parsed.features, parsed.cache_salt) == ((), (), "1")


@pytest.mark.parametrize("sampling_params", [None, [], {}, {"max_tokens": -1}])
def test_an_output_cap_may_be_missing(sampling_params: Any) -> None:
    assert parse({"token_ids": [1], "sampling_params": sampling_params}).max_output_tokens is None


def test_usage_has_the_shape_of_openai() -> None:
    reader = VllmHttpParser().response_reader(parse({"token_ids": [1]}), "application/json")
    reader.feed(b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', True)
    assert reader.usage == Usage(1, 2, 3)
