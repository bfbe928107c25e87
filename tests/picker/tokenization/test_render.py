"""Bodies become requests to render routes, Anthropic's as OpenAI's chat, and answers prompts."""

from struct import pack
from typing import Any

import pytest

from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.render import RenderQuestion, chat_of, prompts_of, question_of
from picker.types import Api, MultiModalFeature, ParsedBody

HI = {"role": "user", "content": "hi"}
NO_BLOCKS: dict[str, Any] = {"role": "user", "content": []}
BLOCKS = {
    "role": "user",
    "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "x"}],
}


@pytest.mark.parametrize(
    ("api", "payload", "route", "expected", "has_blocks"),
    [
        (
            *(Api.COMPLETIONS, {"model": "alias", "prompt": ["a"], "x": 1}),
            *("completions", {"prompt": ["a"], "x": 1}, False),
        ),
        (Api.VLLM_GRPC, {"prompt": "a"}, "completions", {"prompt": "a"}, False),
        (
            *(Api.CHAT_COMPLETIONS, {"messages": [HI, NO_BLOCKS], "tools": []}),
            *("chat/completions", {"messages": [HI, NO_BLOCKS], "tools": []}, False),
        ),
        (
            *(Api.CHAT_COMPLETIONS, {"messages": [HI, BLOCKS]}),
            *("chat/completions", {"messages": [HI, BLOCKS]}, True),
        ),
        (
            *(Api.MESSAGES, {"messages": [HI], "system": "s", "max_tokens": 5}),
            "chat/completions",
            {"messages": [{"role": "system", "content": "s"}, HI]},
            False,
        ),
    ],
)
def test_the_question_is_the_body_with_the_base_model(
    api: Api, payload: dict[str, Any], route: str, expected: dict[str, Any], has_blocks: bool
) -> None:
    question = RenderQuestion(f"/v1/{route}/render", {"model": "m", **expected}, has_blocks)
    assert question_of(ParsedBody(api, "alias", payload=payload), "m") == question


@pytest.mark.parametrize(
    ("api", "payload"),
    [
        (Api.EMBEDDINGS, {"input": "a"}),
        (Api.RESPONSES, {"input": "a"}),
        (Api.CONVERSATIONS, {"items": [1]}),
        (Api.IMAGES, {"prompt": "a"}),
        (Api.RAW, None),
    ],
)
def test_other_apis_have_no_question(api: Api, payload: dict[str, Any] | None) -> None:
    assert question_of(ParsedBody(api, "alias", payload=payload), "m") is None


def test_answers_become_prompts_with_their_items() -> None:
    features = {
        "mm_hashes": {"image": ["h"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    }
    entry = {"token_ids": [1, 2], "features": features, "request_id": "x"}
    prompt = Prompt(pack("<2I", 1, 2), (MultiModalFeature("image", "h", 0, 1),))
    assert prompts_of(entry) == (prompt,)
    assert prompts_of([entry, {"token_ids": [3]}]) == (prompt, Prompt(pack("<I", 3)))


@pytest.mark.parametrize(
    "answer",
    [
        [],
        None,
        "x",
        [1],
        {},
        {"token_ids": []},
        {"token_ids": ["a"]},
        {"token_ids": [1], "features": 1},
    ],
)
def test_other_answers_are_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"route returned|features"):
        prompts_of(answer)


TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def messages_of(role: str, content: Any) -> list[dict[str, Any]]:
    return chat_of({"messages": [{"role": role, "content": content}]})["messages"]


def test_the_system_comes_first_and_tools_become_functions() -> None:
    schema = {"type": "object"}
    payload = {
        "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [
            {"name": "t", "input_schema": schema},
            {"name": "u", "description": "d", "strict": False, "defer_loading": True},
        ],
    }
    assert chat_of(payload) == {
        "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": "hi"}],
        "tools": [
            {"type": "function", "function": {"name": "t", "parameters": schema}},
            {
                "type": "function",
                "function": {
                    "name": "u",
                    "parameters": None,
                    "description": "d",
                    "strict": False,
                    "defer_loading": True,
                },
            },
        ],
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        (None, None),
        ([TEXT], "hi"),
        ([TEXT, TEXT], [TEXT, TEXT]),
        ([IMAGE], [IMAGE_URL]),
        ([TEXT, IMAGE], [TEXT, IMAGE_URL]),
        ([{"type": "text", "text": "hi", "cache_control": {}}, {"type": "text", "text": ""}], "hi"),
        ([{"type": "odd"}, TEXT], "hi"),
        (
            [{"type": "image", "source": {"data": "QUJD"}}],
            [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJD"}}],
        ),
        (
            [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
            [{"type": "image_url", "image_url": {"url": "http://x"}}],
        ),
        ([{"type": "image"}, TEXT], "hi"),
    ],
)
def test_texts_and_images_are_converted(content: Any, expected: Any) -> None:
    assert messages_of("user", content) == [{"role": "user", "content": expected}]


def test_thinking_becomes_reasoning_and_tool_uses_become_calls() -> None:
    content = [
        {"type": "thinking", "thinking": "h", "signature": "s"},
        {"type": "thinking", "thinking": "m"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "i", "name": "n", "input": {"b": "é", "a": [1, 2]}},
        {"type": "tool_use", "id": "j", "name": "o"},
    ]
    assert messages_of("assistant", content) == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "i",
                    "type": "function",
                    "function": {"name": "n", "arguments": '{"b": "\\u00e9", "a": [1, 2]}'},
                },
                {"id": "j", "type": "function", "function": {"name": "o", "arguments": "{}"}},
            ],
        }
    ]


def test_tool_results_precede_the_users_message() -> None:
    """Images stay in the user's message, because the role `tool` has texts only."""
    result = {"type": "tool_result", "tool_use_id": "i", "content": [TEXT, IMAGE, TEXT]}
    assert messages_of("user", [TEXT, result]) == [
        {"role": "tool", "tool_call_id": "i", "content": "hi\nhi"},
        {"role": "user", "content": [TEXT, IMAGE_URL]},
    ]
    assert messages_of("user", [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]) == [
        {"role": "tool", "tool_call_id": "i", "content": "r"}
    ]
    assert messages_of("assistant", [{"type": "tool_result", "content": "r"}]) == [
        {"role": "assistant", "content": "Tool result: r"}
    ]


def test_an_empty_message_is_left_out() -> None:
    assert messages_of("user", []) == []
    assert messages_of("user", [{"type": "odd"}]) == []
