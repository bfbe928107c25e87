"""The contract of every parser, and its paths."""

import pytest

from picker.framework.interfaces import Parser, ReadsResponses
from picker.types import Api, ParsedBody
from tests.support.picker.plugin_scenes import configured, types_of

CLAIMS = {
    "anthropic-parser": ("messages", "messages/count_tokens"),
    "openai-parser": (
        "chat/completions",
        "chat/completions/batch",
        "completions",
        "embeddings",
        "pooling",
        "responses",
        "conversations",
        "chat/completions/render",
        "completions/render",
        "images/generations",
    ),
    "passthrough-parser": (),
    "sglanghttp-parser": ("generate",),
    "vllmhttp-parser": ("inference/v1/generate",),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_parser_claims_its_paths(name: str) -> None:
    assert configured(name).claims == CLAIMS[name]


@pytest.mark.parametrize("name", types_of(Parser))
def test_every_parser_but_the_fallback_reads_responses(name: str) -> None:
    parser = configured(name)
    assert isinstance(parser, ReadsResponses) is bool(parser.claims)


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b'{"model":"m"}'])
def test_the_fallback_accepts_any_bytes(body: bytes) -> None:
    expected = ParsedBody(Api.RAW, can_rewrite=False)
    assert configured("passthrough-parser").parse("/x", {}, body) == expected
