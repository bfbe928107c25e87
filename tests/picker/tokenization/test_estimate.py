"""The estimator turns the body of each API into the bytes of its prompts."""

from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.estimate import PromptEstimator
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.tokenization.prompt_stream import Prompt
from picker.types import Api

ESTIMATOR = PromptEstimator(MediaTokens(EstimateParameters()))


def prompts(api: Api, payload: dict[str, Any]) -> tuple[Prompt, ...]:
    return ESTIMATOR.prompts(api, payload, {})


def text_of(api: Api, payload: dict[str, Any]) -> bytes:
    (prompt,) = prompts(api, payload)
    assert len(prompt.tokens) % 4 == 0
    return prompt.tokens.rstrip(b"\0")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hello", (b"hello\0\0\0",)),
        (["one", "two!!"], (b"one\0", b"two!!\0\0\0")),
        (["one", ""], (b"one\0",)),
        ([1, 2, 2**32 - 1], (pack("<3I", 1, 2, 2**32 - 1),)),
        ([[1], [2, 3]], (pack("<I", 1), pack("<2I", 2, 3))),
        ([], ()),
        ("", ()),
        (None, ()),
        ([True, 5], ()),
        ([{"a": 1}], ()),
    ],
)
def test_completions_and_embeddings_have_one_prompt_per_text(
    value: object, expected: tuple[bytes, ...]
) -> None:
    for api, member in (
        (Api.COMPLETIONS, "prompt"),
        (Api.VLLM_GRPC, "prompt"),
        (Api.EMBEDDINGS, "input"),
        (Api.POOLING, "input"),
        (Api.GENERATE, "prompt"),
    ):
        assert tuple(one.tokens for one in prompts(api, {member: value})) == expected


def test_a_chat_prompt_is_tools_then_roles_and_contents() -> None:
    payload = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, " you", 1]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            {"role": 1},
            "odd",
        ],
    }
    tools = b'[{"function":{"name":"f"},"type":"function"}]'
    assert text_of(Api.CHAT_COMPLETIONS, payload) == tools + b"systemBe kind.userHi youassistant"


def test_batches_have_one_prompt_per_chat_and_embeddings_accept_a_chat() -> None:
    one, two = ([{"role": "user", "content": text}] for text in ("Hi", "You"))
    found = prompts(Api.CHAT_BATCH, {"tools": [1], "messages": [one, two]})
    assert [prompt.tokens.rstrip(b"\0") for prompt in found] == [b"[1]userHi", b"[1]userYou"]
    for api in (Api.EMBEDDINGS, Api.POOLING):
        assert text_of(api, {"messages": one}) == b"userHi"


def test_an_anthropic_prompt_is_tools_then_system_then_messages() -> None:
    payload = {
        "tools": [{"name": "t", "input_schema": {"type": "object"}}],
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
        ],
    }
    tools = b'[{"input_schema":{"type":"object"},"name":"t"}]'
    assert text_of(Api.MESSAGES, payload) == tools + b"Be kind.userHiassistanthm"


def test_responses_and_conversations_are_their_json() -> None:
    payload = {"input": "hi", "instructions": "x", "tools": [], "model": "m"}
    assert text_of(Api.RESPONSES, payload) == b'[{"instructions":"x"},{"input":"hi"}]'
    assert text_of(Api.CONVERSATIONS, {"items": [{"b": 1, "a": 2}]}) == b'[{"a":2,"b":1}]'


@pytest.mark.parametrize(
    ("api", "payload"),
    [
        (Api.IMAGES, {"prompt": "a cat"}),
        (Api.GENERATE, {"token_ids": [1]}),
        (Api.RAW, {}),
        (Api.CHAT_COMPLETIONS, {"messages": "odd"}),
        (Api.CHAT_COMPLETIONS, {}),
        (Api.CHAT_BATCH, {"messages": "odd"}),
        (Api.POOLING, {}),
        (Api.MESSAGES, {"messages": [], "system": 1}),
    ],
)
def test_other_bodies_have_no_prompt(api: Api, payload: dict[str, Any]) -> None:
    assert prompts(api, payload) == ()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6), st.text(min_size=1))
def test_a_longer_chat_begins_with_the_shorter_one(turns: list[str], more: str) -> None:
    """Prefix caches depend on it, for both chat APIs."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    for api in (Api.CHAT_COMPLETIONS, Api.MESSAGES):
        (short,) = prompts(api, {"messages": messages})
        (long,) = prompts(api, {"messages": [*messages, {"role": "user", "content": more}]})
        assert long.tokens.startswith(short.tokens.rstrip(b"\0"))
        assert len(long.tokens) >= len(short.tokens)


def test_media_of_a_chat_are_listed_with_their_offsets() -> None:
    block = {"type": "image_url", "image_url": {"url": "http://x/i.png"}}
    (prompt,) = prompts(
        Api.CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": [block, block]}]}
    )
    assert [(one.modality, one.offset, one.length) for one in prompt.features] == [
        ("image", 1, 225),
        ("image", 226, 225),
    ]
    assert len(prompt.tokens) == 4 * 451
