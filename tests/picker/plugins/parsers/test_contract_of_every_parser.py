"""The contract of every parser, and its paths."""

import pytest

from picker.config.catalog import builtin_plugins
from picker.framework.interfaces import Parser, ReadsResponses
from picker.types import Api, ParsedBody

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
    "vertexai-parser": (
        "PredictionService/ChatCompletions",
        "PredictionService/StreamRawPredict",
        "PredictionService/RawPredict",
    ),
    "vllmgrpc-parser": (
        "vllm.grpc.engine.VllmEngine/Generate",
        "vllm.grpc.engine.VllmEngine/Embed",
    ),
    "vllmhttp-parser": ("inference/v1/generate",),
}


def _parser(name: str) -> Parser:
    plugin = builtin_plugins().get(name)
    made = plugin.make("mine", plugin.parameters())
    assert isinstance(made, Parser)
    return made


@pytest.mark.parametrize("name", CLAIMS)
def test_every_parser_claims_its_paths_and_reads_responses(name: str) -> None:
    parser = _parser(name)
    assert parser.claims == CLAIMS[name]
    assert isinstance(parser, ReadsResponses) is bool(parser.claims)


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b'{"model":"m"}'])
def test_the_fallback_accepts_any_bytes(body: bytes) -> None:
    expected = ParsedBody(Api.RAW, can_rewrite=False)
    assert _parser("passthrough-parser").parse("/x", {}, body) == expected
