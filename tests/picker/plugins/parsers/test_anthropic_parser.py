"""The bodies of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picker.errors import RefusedError
from picker.plugins.parsers.anthropic_parser import AnthropicParser
from picker.types import Api, ParsedBody, Usage

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hi"}


def parse(path: str, body: object) -> ParsedBody:
    """Parse a JSON value, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AnthropicParser().parse(path, {}, data)


def test_a_request_is_read() -> None:
    """Model, streaming, output cap and cache salt are found; the payload is whole."""
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


def test_of_what_is_counted_the_model_is_known() -> None:
    """It may be another one's name; no prompt is, as counting caches nothing."""
    found = parse("/v1/messages/count_tokens", {"model": "m", "messages": [USER]})
    assert (found.api, found.model, found.can_rewrite, found.skip_response) == (
        *(Api.RAW, "m", True, True),
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]"])
def test_counting_goes_on_raw(body: bytes) -> None:
    """Whatever it says, and its response is not looked at."""
    expected = ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    assert parse("/v1/messages/count_tokens", body) == expected
    assert parse("/v1/messages/count_tokens/", body) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "must have messages field"),
        ({"messages": []}, "must have messages field"),
        ({"messages": "hi"}, "must have messages field"),
        ({"messages": ["hi"]}, "must have valid messages field"),
        (
            {"messages": [{"content": 1}]},
            r"valid messages field: messages\[0\].content must be a string or a list, not a number",
        ),
        ({"messages": [USER, {"role": 1}]}, r"messages field: messages\[1\].role must be a string"),
        ({"messages": [{"content": [{"text": 1}]}]}, r"\.text must be a string, not a number"),
        ({"messages": [{"content": [{"source": 1}]}]}, r"\.source must be an object"),
        ({"messages": [{"content": [{"source": {"url": {}}}]}]}, r"\.url must be a string"),
        ({"messages": [{"content": ["hi"]}]}, "must have valid messages field"),
        ({"messages": [{"content": {"type": "text"}}]}, "must have valid messages field"),
        ({"messages": [USER], "system": 1}, "system must be"),
        ({"messages": [USER], "system": ["x"]}, r"system\[0\] must be"),
        ({"messages": [USER], "tools": {}}, "tools must be a list, not an object"),
        ({"messages": [USER], "tools": [1]}, r"tools\[0\] must be an object"),
        ({"messages": [USER], "cache_salt": 1}, "cache_salt must be"),
        (b"nonsense", "error unmarshaling request bodyMap"),
        ([], "error unmarshaling request bodyMap"),
    ],
)
def test_what_is_wrong_is_named(body: Any, message: str) -> None:
    """Always with 400."""
    with pytest.raises(RefusedError, match=message) as refusal:
        parse(MESSAGES, body)
    assert refusal.value.status == 400


@pytest.mark.parametrize("content", [None, "", "hi", [], [{"type": "odd"}]])
def test_contents_are_texts_or_blocks(content: object) -> None:
    """Blocks of unknown types are the endpoint's business."""
    assert parse(MESSAGES, {"messages": [{"role": "user", "content": content}]}).can_rewrite


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/batches", "/xmessages"])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(RefusedError, match="unsupported Anthropic API path"):
        parse(path, {"messages": [USER]})


def test_responses_tell_their_usage() -> None:
    """The prompt in the first event, the completion in the last but one."""
    parser = AnthropicParser()
    reader = parser.response_reader(parse(MESSAGES, {"messages": [USER]}), "text/event-stream")
    reader.feed(
        b'event: a\ndata: {"type":"message_start","message":{"usage":{"input_tokens":4', False
    )
    reader.feed(b'}}}\n\ndata: {"type":"message_delta","usage":{"output_tokens":3}}\n\n', False)
    assert reader.usage == Usage(4, 3, 7)
