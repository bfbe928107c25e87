"""The bodies of Anthropic's Messages API."""

import json
from typing import Any

import pytest

from picker.errors import RefusedError
from picker.plugins.parsers.http_parsers import AnthropicParser
from picker.tokenization.estimate import PromptEstimator
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.tokenization.render import question_of
from picker.types import Api, ParsedBody, Usage

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hi"}


def parse(path: str, body: object) -> ParsedBody:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AnthropicParser().parse(path, {}, data)


def test_a_request_is_read() -> None:
    body = {
        "model": "m",
        "messages": [USER],
        "system": [{"type": "text", "text": "x"}],
        "tools": [{"name": "t", "input_schema": {}}],
        "max_tokens": 9,
        "stream": True,
        "cache_salt": "s",
    }
    assert parse(MESSAGES, body) == ParsedBody(
        api=Api.MESSAGES, model="m", stream=True, payload=body, max_output_tokens=9, cache_salt="s"
    )


def test_the_model_of_a_count_is_read() -> None:
    """Counting fills no cache, so there is no prompt."""
    found = parse("/v1/messages/count_tokens", {"model": "m", "messages": [USER]})
    assert (found.api, found.model, found.can_rewrite, found.skip_response) == (
        *(Api.RAW, "m", True, True),
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]"])
def test_a_count_is_forwarded_raw(body: bytes) -> None:
    expected = ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    assert parse("/v1/messages/count_tokens", body) == expected
    assert parse("/v1/messages/count_tokens/", body) == expected


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b""])
def test_another_body_than_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError, match="cannot be read as JSON") as refusal:
        parse(MESSAGES, body)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": ["hi", {"role": 1}, {"content": 1}, {"content": ["x", {"source": 1}]}]},
        {"messages": [USER, {"role": "system", "content": "later"}], "system": 1},
        {"messages": [USER], "tools": [1], "system": ["x"], "cache_salt": 1},
        {"messages": [{"role": "user", "content": {"type": "text"}}], "tools": {}},
    ],
)
def test_an_incomplete_request_is_forwarded(body: dict[str, Any]) -> None:
    parsed = parse(MESSAGES, {"model": "m", **body})
    assert (parsed.api, parsed.model, parsed.can_rewrite) == (Api.MESSAGES, "m", True)
    estimator = PromptEstimator(MediaTokens(EstimateParameters()))
    assert all(one.tokens for one in estimator.prompts(parsed.api, parsed.payload or {}, {}))
    question_of(parsed, "m")


@pytest.mark.parametrize("content", [None, "", "hi", [], [{"type": "odd"}]])
def test_contents_are_texts_or_blocks(content: object) -> None:
    assert parse(MESSAGES, {"messages": [{"role": "user", "content": content}]}).can_rewrite


def test_usage_is_read_from_responses() -> None:
    parser = AnthropicParser()
    reader = parser.response_reader(parse(MESSAGES, {"messages": [USER]}), "text/event-stream")
    reader.feed(
        b'event: a\ndata: {"type":"message_start","message":{"usage":{"input_tokens":4', False
    )
    reader.feed(b'}}}\n\ndata: {"type":"message_delta","usage":{"output_tokens":3}}\n\n', False)
    assert reader.usage == Usage(4, 3, 7)
