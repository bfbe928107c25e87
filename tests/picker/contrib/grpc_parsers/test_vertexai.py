"""Vertex AI's gRPC messages around OpenAI's JSON."""

import json

import pytest

from picker.contrib.grpc_parsers.vertexai import VertexAIParser
from picker.types import Api, ParsedBody, Usage
from tests.support.picker.grpc_messages import field, frame

SERVICE = "/google.cloud.aiplatform.v1beta1.PredictionService"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def request(document: object) -> bytes:
    http_body = field(1, b"application/json") + field(2, json.dumps(document).encode())
    return frame(field(1, b"projects/p/endpoints/e") + field(2, http_body))


def test_a_chat_completion_is_read_and_cannot_be_changed() -> None:
    parsed = VertexAIParser().parse(f"{SERVICE}/ChatCompletions", {}, request(CHAT))
    assert parsed == ParsedBody(
        api=Api.CHAT_COMPLETIONS, model="m", stream=True, payload=CHAT, can_rewrite=False
    )


@pytest.mark.parametrize("method", ["RawPredict", "StreamRawPredict"])
def test_a_raw_prediction_is_a_request_of_the_responses_api(method: str) -> None:
    parsed = VertexAIParser().parse(f"{SERVICE}/{method}", {}, request({"input": "hi"}))
    assert (parsed.api, parsed.can_rewrite) == (Api.RESPONSES, False)


def test_the_methods_are_claimed() -> None:
    methods = ("ChatCompletions", "StreamRawPredict", "RawPredict")
    assert VertexAIParser.claims == tuple(f"PredictionService/{method}" for method in methods)


def test_other_methods_are_not_read() -> None:
    parsed = VertexAIParser().parse(f"{SERVICE}/Explain", {}, b"anything")
    assert parsed == ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no healthy upstream",
        frame(b""),
        frame(b"\xff"),
        frame(field(2, b"\xff")),
        frame(field(2, field(1, b"text"))),
        request([1]),
    ],
)
def test_an_unreadable_body_is_forwarded(body: bytes) -> None:
    """The endpoint answers what it cannot read; there is no model to replace."""
    parsed = VertexAIParser().parse(f"{SERVICE}/ChatCompletions", {}, body)
    assert parsed == ParsedBody(Api.RAW, can_rewrite=False)


USAGE = b'{"usage":{"prompt_tokens":5,"completion_tokens":10}}'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([USAGE], Usage(5, 10, 15)),
        ([b" ", USAGE[:9], USAGE[9:]], Usage(5, 10, 15)),
        ([b"data: {}\n\n", b"data: " + USAGE[:9], USAGE[9:] + b"\n\n"], Usage(5, 10, 15)),
        ([b"nonsense"], None),
        ([], None),
    ],
)
def test_usage_is_read_from_json_and_from_events(data: list[bytes], expected: Usage | None) -> None:
    body = b"".join(frame(field(1, b"type") + field(2, piece)) for piece in data) + frame(b"\xff")
    reader = VertexAIParser().response_reader(ParsedBody(Api.CHAT_COMPLETIONS), "application/grpc")
    for byte in body:
        reader.feed(bytes([byte]), False)
    reader.feed(b"", True)
    assert reader.usage == expected
