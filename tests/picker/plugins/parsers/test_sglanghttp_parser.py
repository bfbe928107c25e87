"""sglanghttp-parser: the bodies of SGLang's generate."""

import json
from typing import Any

import pytest

from picker.plugins.parsers.http_parsers import SglangHttpParser
from picker.types import Api, ParsedBody, Usage


def parse(body: object, path: str = "/generate") -> ParsedBody:
    return SglangHttpParser().parse(path, {}, json.dumps(body).encode())


def test_a_request_is_read_and_its_body_stays_raw() -> None:
    body = {
        "input_ids": [1, 2],
        "extra_key": "k",
        "sampling_params": {"max_new_tokens": 0},
        "stream": True,
        "model": "m",
    }
    assert parse(body) == ParsedBody(
        api=Api.GENERATE,
        stream=True,
        max_output_tokens=0,
        cache_salt="k",
        can_rewrite=False,
        prompts=(b"\1\0\0\0\2\0\0\0",),
    )


@pytest.mark.parametrize(
    "path", ["/v1/generate", "/inference/v1/generate", "/generate/x", "/regenerate"]
)
def test_the_path_is_generate_and_nothing_else(path: str) -> None:
    assert parse({"input_ids": [1]}, "/generate/").prompts
    assert parse({"input_ids": [1]}, path) == ParsedBody(Api.RAW, can_rewrite=False)


def test_a_body_of_another_generate_is_not_read() -> None:
    """TGI has the prompt in another member."""
    assert parse({"inputs": "hello"}) == ParsedBody(Api.RAW, can_rewrite=False)


@pytest.mark.parametrize("text", ["hello", ["hello", "you"]])
def test_text_is_a_prompt(text: Any) -> None:
    found = parse({"text": text})
    assert (found.payload, found.can_rewrite, found.prompts) == ({"prompt": text}, False, ())


def test_token_ids_go_before_text_and_may_be_of_several_prompts() -> None:
    found = parse({"text": "x", "input_ids": [[1], [2]]})
    assert (found.payload, found.prompts) == (None, (b"\1\0\0\0", b"\2\0\0\0"))


@pytest.mark.parametrize(
    ("body", "salt"),
    [
        ({"text": ""}, ""),
        ({"text": [1]}, ""),
        ({"input_ids": []}, ""),
        ({"input_ids": [[1], []]}, ""),
        ({"input_ids": [1.0]}, ""),
        ({"text": "", "extra_key": ["a", "b"]}, '["a","b"]'),
    ],
)
def test_an_unreadable_body_is_forwarded_without_a_prompt(body: Any, salt: str) -> None:
    parsed = parse(body)
    assert (parsed.api, parsed.prompts, parsed.cache_salt) == (Api.GENERATE, (), salt)
    assert parsed.can_rewrite is False


@pytest.mark.parametrize("body", [{"input_embeds": [[0.5]]}, [1], None, "x"])
def test_a_body_without_a_prompt_is_not_read(body: Any) -> None:
    assert parse(body) == ParsedBody(Api.RAW, can_rewrite=False)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_usage_is_read_from_meta_info(content_type: str) -> None:
    info = {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1, "finish_reason": "stop"}
    text = json.dumps({"text": "x", "meta_info": info})
    data = f"data: {text}\n\ndata: [DONE]\n\n" if "event" in content_type else text
    reader = SglangHttpParser().response_reader(parse({"input_ids": [1]}), content_type)
    reader.feed(data.encode(), True)
    assert reader.usage == Usage(2, 3, 5, 1)
