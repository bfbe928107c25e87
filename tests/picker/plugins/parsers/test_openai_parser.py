"""The bodies of the OpenAI APIs: what is accepted, what is read, what is refused and how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.plugins.parsers.openai_parser import OpenAIParser, api_of
from picker.types import Api, ParsedBody, Usage
from tests.depth import examples

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(path: str, body: object) -> ParsedBody:
    """Parse a JSON value, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return OpenAIParser().parse(path, {}, data)


def refusal(path: str, body: object) -> str:
    """The message of the 400 that `body` gets."""
    with pytest.raises(RefusedError) as error:
        parse(path, body)
    assert error.value.status == 400
    return error.value.message


def test_a_chat_request_is_read() -> None:
    """Model, streaming, output cap and cache salt are found; the payload is whole."""
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
    """Rendering variants belong to their API; what is unknown is the oldest API."""
    assert api_of(path) is api


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        (CHAT, {"messages": [{"role": "assistant"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": ["x", ""]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
        (COMPLETIONS, {"prompt": [0, 2**32 - 1]}),
        ("/v1/embeddings", {"input": ["x"]}),
        ("/v1/responses", {"input": [{"role": "user"}]}),
        ("/v1/conversations", {"items": [{"type": "message"}]}),
        ("/v1/images/generations", {"prompt": "a cat"}),
    ],
)
def test_valid_bodies_pass(path: str, body: dict[str, Any]) -> None:
    """Whatever an endpoint may understand is let through; a missing model is not judged here."""
    parsed = parse(path, body)
    assert parsed.payload == body
    assert parsed.model == ""
    assert parsed.can_rewrite


@pytest.mark.parametrize(
    ("path", "bodies", "message"),
    [
        (
            CHAT,
            [
                {},
                {"messages": []},
                {"messages": "hi"},
                {"messages": ["hi"]},
                {"messages": [{"content": {"type": "text"}}]},
                {"messages": [{"content": 3}]},
                {"messages": [{"content": ["text"]}]},
            ],
            "invalid chat completions request: must have valid messages field",
        ),
        (
            COMPLETIONS,
            [
                {},
                {"prompt": ""},
                {"prompt": []},
                {"prompt": ["x", 1]},
                {"prompt": [1, "x"]},
                {"prompt": [[1, 2], []]},
                {"prompt": [[1, 2], "x"]},
                {"prompt": [[1, [2]]]},
                {"prompt": [-1]},
                {"prompt": [2**32]},
                {"prompt": [1.5]},
                {"prompt": [True]},
                {"prompt": 3},
            ],
            "invalid completions request: must have prompt field",
        ),
        ("/v1/embeddings", [{}, {"input": []}], "invalid embeddings request: must have input"),
        ("/v1/responses", [{}, {"input": None}], "invalid responses request: must have input"),
        ("/v1/conversations", [{}, {"items": []}], "invalid conversations request: must have it"),
        ("/v1/images/generations", [{"prompt": ["a"]}], "invalid images generations request: mu"),
    ],
)
def test_bodies_without_their_prompt_are_refused_by_name(
    path: str, bodies: list[dict[str, Any]], message: str
) -> None:
    """Each API names the field that it cannot do without."""
    for body in bodies:
        assert refusal(path, body).startswith(message)


def chat(**members: object) -> dict[str, Any]:
    """A chat request with one good message."""
    return {"messages": MESSAGES, **members}


def blocks(*blocks: object) -> dict[str, Any]:
    """A chat request with a good message and one of these blocks."""
    return {"messages": [*MESSAGES, {"role": "user", "content": list(blocks)}]}


IN_BLOCK = "valid messages field: messages[1].content[0]"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {"messages": [{"role": 123}]}, "messages[0].role must be a string, not a number"),
        (CHAT, {"messages": [*MESSAGES, None]}, "messages[1] must be an object, not null"),
        (CHAT, {"messages": [{"tool_calls": {}}]}, "tool_calls must be a list, not an object"),
        (CHAT, {"messages": [{"content": {}}]}, "content must be a string or a list, not an obj"),
        (CHAT, blocks(None), f"{IN_BLOCK} must be an object, not null"),
        (CHAT, blocks({"type": 1}), f"{IN_BLOCK}.type must be a string, not a number"),
        (CHAT, blocks({"text": ["x"]}), f"{IN_BLOCK}.text must be a string, not a list"),
        (CHAT, blocks({"image_url": 1}), f"{IN_BLOCK}.image_url must be a string or an object"),
        (CHAT, blocks({"image_url": {"url": 1}}), f"{IN_BLOCK}.image_url.url must be a string"),
        (CHAT, blocks({"video_url": {"url": {}}}), f"{IN_BLOCK}.video_url.url must be a string"),
        (CHAT, blocks({"input_audio": "x"}), f"{IN_BLOCK}.input_audio must be an object"),
        (CHAT, blocks({"input_audio": {"data": 1}}), f"{IN_BLOCK}.input_audio.data must be a str"),
        (CHAT, chat(tools={}), "request: tools must be a list, not an object"),
        (CHAT, chat(tools="x"), "request: tools must be a list, not a string"),
        (CHAT, chat(documents="x"), "request: documents must be a list, not a string"),
        (CHAT, chat(chat_template=[]), "request: chat_template must be a string, not a list"),
        (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs must be an object, not a list"),
        (CHAT, chat(return_assistant_tokens_mask=1), "mask must be a boolean, not a number"),
        (CHAT, chat(continue_final_message="true"), "message must be a boolean, not a string"),
        (CHAT, chat(add_generation_prompt=0), "generation_prompt must be a boolean, not a number"),
        ("/v1/conversations", {"items": ["x"]}, "items[0] must be an object, not a string"),
        ("/v1/conversations", {"items": [{"role": 1}]}, "items[0].role must be a string"),
        ("/v1/conversations", {"items": [{}], "metadata": 1}, "metadata must be an object"),
        ("/v1/images/generations", {"prompt": "x", "n": 1.5}, "n must be a number"),
        ("/v1/images/generations", {"prompt": "x", "n": True}, "n must be a number"),
        ("/v1/images/generations", {"prompt": "x", "size": 1}, "size must be a string"),
    ],
)
def test_members_of_the_wrong_type_are_refused_by_name(
    path: str, body: dict[str, Any], reason: str
) -> None:
    """Those that the reference refuses, behind the beginning of its own words."""
    text = refusal(path, body)
    assert text.startswith("invalid ")
    assert reason in text


@pytest.mark.parametrize(
    "body",
    [
        chat(**dict.fromkeys(["tools", "documents", "chat_template", "chat_template_kwargs"])),
        chat(tools=[1, "x"], documents=[], chat_template="", chat_template_kwargs={"a": [1]}),
        chat(continue_final_message=False, add_generation_prompt=True, temperature="hot"),
        blocks({"type": "text"}, {"type": "image_url", "image_url": "https://x/y.png"}),
        blocks({"type": None, "text": None, "image_url": None, "input_audio": None}),
        blocks({"type": "odd", "odd": 1}),
        {"messages": [{"role": None, "content": None, "tool_calls": [1]}]},
    ],
)
def test_null_is_absent_and_other_members_are_not_judged(body: dict[str, Any]) -> None:
    """What is not read here is the endpoint's business; engines take the address of an image."""
    assert parse(CHAT, body).payload == body


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
def test_what_is_no_json_object_is_refused_whatever_is_wrong(body: bytes) -> None:
    """Broken text, wrong types and absurd depth all end in the same 400."""
    assert refusal(COMPLETIONS, body).startswith("error unmarshaling request bodyMap: ")


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
    """Packed once, while they are checked."""
    assert parse(COMPLETIONS, {"prompt": value}).prompts == prompts
    assert parse("/v1/embeddings", {"input": value}).prompts == prompts


def test_responses_are_read_as_their_content_type_says() -> None:
    """A document or events; both tell the same."""
    parser, body = OpenAIParser(), parse(COMPLETIONS, {"prompt": "x"})
    document = b'{"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}'
    for content_type, data in (
        ("application/json", document),
        ("text/event-stream; charset=utf-8", b"data: " + document + b"\n\ndata: [DONE]\n\n"),
    ):
        reader = parser.response_reader(body, content_type)
        reader.feed(data, True)
        assert reader.usage == Usage(5, 10, 15)


def test_of_a_repeated_member_the_last_counts() -> None:
    """The endpoints behind us read JSON the same way."""
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
    """An explicit zero counts; what is no such number is as good as absent."""
    assert parse(CHAT, {"messages": MESSAGES, **caps}).max_output_tokens == expected


@pytest.mark.parametrize("stream", ["true", 1, None, False])
def test_only_a_true_boolean_asks_for_streaming(stream: object) -> None:
    """A string or a number does not."""
    assert parse(CHAT, {"messages": MESSAGES, "stream": stream}).stream is False


def test_a_model_that_is_no_string_counts_as_none() -> None:
    """The director then refuses unless a header names one."""
    assert parse(CHAT, {"messages": MESSAGES, "model": 3}).model == ""


def test_a_cache_salt_that_is_no_string_is_refused() -> None:
    """Ignoring it would share cached prefixes between tenants that asked not to."""
    assert "cache_salt" in refusal(CHAT, {"messages": MESSAGES, "cache_salt": 3})
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
def test_nothing_but_a_refusal_ever_escapes(path: str, body: object) -> None:
    """Any JSON value and any bytes are parsed or refused with 400."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "replace")
    try:
        status = OpenAIParser().parse(path, {}, data) and 200
    except RefusedError as error:
        status = error.status
    assert status in (200, 400)
