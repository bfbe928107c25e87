"""openai-parser: request bodies of the OpenAI APIs, and other bodies."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.plugins.parsers.http_parsers import OpenAIParser, api_of
from picker.tokenization.estimate import PromptEstimator
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.types import Api, ParsedBody, Usage
from tests.depth import examples

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(path: str, body: object) -> ParsedBody:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return OpenAIParser().parse(path, {}, data)


def refusal(path: str, body: object) -> str:
    with pytest.raises(RefusedError) as error:
        parse(path, body)
    assert error.value.status == 400
    return error.value.message


def test_a_chat_request_is_read() -> None:
    body = {
        "model": "m",
        "messages": MESSAGES,
        "stream": True,
        "max_tokens": 7,
        "max_completion_tokens": 5,
        "cache_salt": "s",
        "extra": 1,
    }
    assert parse(CHAT, body) == ParsedBody(
        api=Api.CHAT_COMPLETIONS,
        model="m",
        stream=True,
        payload=body,
        max_output_tokens=5,
        cache_salt="s",
    )


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT_COMPLETIONS),
        ("/v1/chat/completions/render", Api.CHAT_COMPLETIONS),
        ("/v1/completions/", Api.COMPLETIONS),
        ("/v1/completions/render", Api.COMPLETIONS),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/conversations", Api.CONVERSATIONS),
        ("/v1/images/generations", Api.IMAGES),
        ("/anything", Api.COMPLETIONS),
    ],
)
def test_the_api_is_chosen_by_the_end_of_the_path(path: str, api: Api) -> None:
    assert api_of(path) is api


def chat(*content: object, **members: object) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "user", "content": list(content)}], **members}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (CHAT, body)
            for body in ({}, {"messages": []}, {"messages": "hi"}, {"messages": ["hi"]})
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        (CHAT, {"messages": [None, {"role": 1, "content": {}, "tool_calls": {}}]}),
        (CHAT, chat("text", None, {"type": 1}, {"text": ["x"]}, {"type": "odd", "odd": 1})),
        (CHAT, chat({"type": "image_url", "image_url": 1}, {"type": "image_embeds"})),
        (CHAT, chat(tools={}, documents="x", chat_template=[], add_generation_prompt=0)),
        ("/v1/chat/completions/batch", {"messages": [{"role": "user"}]}),
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ("x", "", [], ["x", ""], [-1], [1.5], 3)),
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ([[1], []], [[1], "x"], [2**32], [True])),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"prompt_embeds": ["AAAA", "BBBB"], "prompt": None}),
        ("/pooling", {"data": {"data": "https://a/x.tif", "data_format": "url"}}),
        ("/pooling", {"messages": []}),
        ("/v1/embeddings", {"input": [{"content": [{"type": "image_base64"}]}]}),
        ("/v1/embeddings", {"messages": MESSAGES, "input_type": "query"}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}, "previous_response_id": "r"}),
        ("/v1/conversations", {"items": [], "metadata": 1}),
        ("/v1/images/generations", {"prompt": ["a"], "n": 1.5, "size": 1}),
    ],
)
def test_an_incomplete_body_is_forwarded(path: str, body: dict[str, Any]) -> None:
    parsed = parse(path, {"model": "m", **body})
    assert (parsed.api, parsed.model, parsed.can_rewrite) == (api_of(path), "m", True)
    assert parsed.prompts == ()
    estimator = PromptEstimator(MediaTokens(EstimateParameters()))
    prompts = estimator.prompts(parsed.api, parsed.payload or {}, {})
    assert all(prompt.tokens for prompt in prompts)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt_embeds": "AAAA", "prompt": None}),
        ("/pooling", {"data": {"a": 1}}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}),
        ("/v1/conversations", {}),
        (CHAT, {"messages": []}),
    ],
)
def test_a_body_without_text_has_no_prefix(path: str, body: dict[str, Any]) -> None:
    parsed = parse(path, body)
    assert (
        PromptEstimator(MediaTokens(EstimateParameters())).prompts(
            parsed.api, parsed.payload or {}, {}
        )
        == ()
    )


@pytest.mark.parametrize(
    "body",
    [
        b"no healthy upstream",
        b"",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt":"x"',
        b'{"prompt":"\xff"}',
        b'{"prompt":NaN}',
        b'{"prompt":"\\ud8"}',
        b'{"prompt":' + b"[" * 100_000,
    ],
)
def test_another_body_than_a_json_object_is_refused(body: bytes) -> None:
    assert refusal(COMPLETIONS, body).startswith("the request body cannot be read as JSON: ")


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ([0, 2**32 - 1], (b"\0\0\0\0\xff\xff\xff\xff",)),
        ([[1], [2, 3]], (b"\1\0\0\0", b"\2\0\0\0\3\0\0\0")),
        ("text", ()),
        (["text"], ()),
    ],
)
def test_token_ids_are_prompts_that_need_no_tokenizer(
    value: object, prompts: tuple[bytes, ...]
) -> None:
    assert parse(COMPLETIONS, {"prompt": value}).prompts == prompts
    assert parse("/v1/embeddings", {"input": value}).prompts == prompts


def test_the_content_type_of_a_response_chooses_its_reader() -> None:
    parser, body = OpenAIParser(), parse(COMPLETIONS, {"prompt": "x"})
    document = b'{"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}'
    for content_type, data in (
        ("application/json", document),
        ("text/event-stream; charset=utf-8", b"data: " + document + b"\n\ndata: [DONE]\n\n"),
    ):
        reader = parser.response_reader(body, content_type)
        reader.feed(data, True)
        assert reader.usage == Usage(5, 10, 15)


def test_the_last_of_repeated_members_counts() -> None:
    assert parse(COMPLETIONS, b'{"prompt":"a","model":"x","model":"y"}').model == "y"


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ({"max_completion_tokens": 0, "max_tokens": 5}, 0),
        ({"max_completion_tokens": -1, "max_tokens": 5}, 5),
        ({"max_completion_tokens": "9", "max_tokens": 5.0}, 5),
        ({"max_tokens": 5.5}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": None}, None),
        ({}, None),
    ],
)
def test_the_output_cap_is_the_first_whole_number(
    caps: dict[str, Any], expected: int | None
) -> None:
    assert parse(CHAT, {"messages": MESSAGES, **caps}).max_output_tokens == expected


@pytest.mark.parametrize("stream", ["true", 1, None, False])
def test_only_a_true_boolean_asks_for_streaming(stream: object) -> None:
    assert parse(CHAT, {"messages": MESSAGES, "stream": stream}).stream is False


def test_a_model_that_is_no_string_counts_as_none() -> None:
    assert parse(CHAT, {"messages": MESSAGES, "model": 3}).model == ""


def test_a_cache_salt_of_another_type_is_a_salt() -> None:
    """Ignoring it would share cached prefixes between tenants that asked not to."""
    assert parse(CHAT, {"messages": MESSAGES, "cache_salt": 3}).cache_salt == "3"
    assert parse(CHAT, {"messages": MESSAGES, "cache_salt": None}).cache_salt == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "prompt", "content", "model"]), inner)
    ),
    max_leaves=10,
)


@examples(200)
@given(st.sampled_from([CHAT, COMPLETIONS, "/v1/embeddings"]), json_values | st.binary())
def test_a_refusal_is_the_only_error(path: str, body: object) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "replace")
    try:
        status = OpenAIParser().parse(path, {}, data) and 200
    except RefusedError as error:
        status = error.status
    assert status in (200, 400)
