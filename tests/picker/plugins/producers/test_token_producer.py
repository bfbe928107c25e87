"""token-producer: prompts become pseudo-tokens that share what prompts share."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any

import pytest
import xxhash

from picker.framework.attributes import Attributes
from picker.plugins.producers.token_producer import TokenProducer
from picker.types import Api, InferenceRequest

Prompts = Callable[[Api, dict[str, Any] | None], tuple[bytes, ...]]


@pytest.fixture
def prompts(request_for: Callable[..., InferenceRequest]) -> Prompts:
    def produce(api: Api, payload: dict[str, Any] | None) -> tuple[bytes, ...]:
        request = request_for(api, payload)
        return TokenProducer().produce(request, [], Attributes()).prompts

    return produce


def test_text_is_packed_four_bytes_a_token(prompts: Prompts) -> None:
    """Little endian, zero-padded: `hello world` is [1819043176, 1870078063, 6581362]."""
    packed = pack("<3I", 1819043176, 1870078063, 6581362)
    assert prompts(Api.COMPLETIONS, {"prompt": "hello world"}) == (packed,)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["one", "two!!"], (b"one\0", b"two!!\0\0\0")),
        ([1, 2, 4294967295], (pack("<3I", 1, 2, 4294967295),)),
        ([[1], [2, 3]], (pack("<I", 1), pack("<2I", 2, 3))),
        ([], ()),
        ("", ()),
        (None, ()),
        ([True, 5], ()),
        ([-1], ()),
        ([{"a": 1}], ()),
    ],
)
def test_a_completion_has_a_prompt_for_each_string_or_token_list(
    prompts: Prompts, prompt: object, expected: tuple[bytes, ...]
) -> None:
    """Token ids pass through; what is neither is no prompt."""
    assert prompts(Api.COMPLETIONS, {"prompt": prompt}) == expected
    assert prompts(Api.EMBEDDINGS, {"input": prompt}) == expected


def test_a_chat_is_tools_then_roles_and_contents(prompts: Prompts) -> None:
    """No separators, keys of tools sorted, tool calls ignored."""
    payload = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "odd"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
        ],
    }
    tools = b'[{"function":{"name":"f"},"type":"function"}]'
    (prompt,) = prompts(Api.CHAT_COMPLETIONS, payload)
    assert prompt.rstrip(b"\0") == tools + b"systemBe kind.userHiassistant"
    assert len(prompt) % 4 == 0


def test_a_longer_chat_begins_with_the_shorter_one(prompts: Prompts) -> None:
    """That is what a prefix cache lives on."""
    first = [{"role": "user", "content": "a" * 400}]
    (short,) = prompts(Api.CHAT_COMPLETIONS, {"messages": first})
    more = [*first, {"role": "assistant", "content": "b"}]
    (long,) = prompts(Api.CHAT_COMPLETIONS, {"messages": more})
    assert long.startswith(short.rstrip(b"\0"))


@pytest.mark.parametrize(
    ("block", "content", "count"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/i.png"}}, b"http://x/i.png", 225),
        ({"type": "video_url", "video_url": {"url": "http://x/v"}}, b"http://x/v", 4500),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}, b"QUJDwav", 2),
    ],
)
def test_media_are_tokens_made_from_their_content(
    prompts: Prompts, block: dict[str, Any], content: bytes, count: int
) -> None:
    """Aligned to a token, as many as the medium is estimated to take."""
    message = {"role": "user", "content": [{"type": "text", "text": "s"}, block]}
    (prompt,) = prompts(Api.CHAT_COMPLETIONS, {"messages": [message]})
    token = pack("<I", xxhash.xxh64_intdigest(content) & 0xFFFFFFFF)
    assert prompt == b"users\0\0\0" + token * count


def test_responses_and_conversations_are_their_json(prompts: Prompts) -> None:
    """Instructions, tools and input in this order, those that are there."""
    (prompt,) = prompts(Api.RESPONSES, {"input": "hi", "instructions": "x", "model": "m"})
    assert prompt.rstrip(b"\0") == b'[{"instructions":"x"},{"input":"hi"}]'
    (prompt,) = prompts(Api.CONVERSATIONS, {"items": [1]})
    assert prompt == b"[1]\0"


def test_what_has_no_prompt_stays_as_it_is(
    prompts: Prompts, request_for: Callable[..., InferenceRequest]
) -> None:
    """Raw bodies, images, and requests that come with tokens."""
    assert prompts(Api.RAW, None) == ()
    assert prompts(Api.IMAGES, {"prompt": "a cat"}) == ()
    assert prompts(Api.CHAT_COMPLETIONS, {"messages": "nonsense"}) == ()
    request = request_for(Api.COMPLETIONS, {"prompt": "x"}, prompts=(b"abcd",))
    assert TokenProducer().produce(request, [], Attributes()) is request
