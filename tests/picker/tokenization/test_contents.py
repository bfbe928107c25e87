"""Content blocks of both chat APIs become texts and media of a prompt."""

from typing import Any

import pytest
import xxhash

from picker.tokenization.contents import (
    AnthropicBlocks,
    OpenAIBlocks,
    system_text,
    tool_result_images,
    tool_result_text,
)
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.tokenization.prompt_stream import Prompt, PromptStream

MEDIA = MediaTokens(EstimateParameters())


def openai(*blocks: dict[str, Any]) -> Prompt:
    stream = PromptStream()
    adder = OpenAIBlocks(stream, MEDIA, {"x-llm-d-video-duration-seconds": "1"})
    for block in blocks:
        adder.add(block)
    return stream.finish()


def anthropic(*blocks: dict[str, Any]) -> Prompt:
    stream = PromptStream()
    adder = AnthropicBlocks(stream, MEDIA)
    for block in blocks:
        adder.add(block)
    return stream.finish()


@pytest.mark.parametrize(
    ("block", "modality", "content", "length"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/i"}}, "image", "http://x/i", 225),
        ({"type": "image_url", "image_url": "http://x/i"}, "image", "http://x/i", 225),
        ({"type": "video_url", "video_url": {"url": "http://x/v"}}, "video", "http://x/v", 450),
        ({"type": "audio_url", "audio_url": {"url": "http://x/a"}}, "audio", "http://x/a", 3),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            "audio",
            "QUJDwav",
            2,
        ),
        ({"type": "image_url"}, "image", "", 225),
    ],
)
def test_openai_media_are_items(
    block: dict[str, Any], modality: str, content: str, length: int
) -> None:
    (feature,) = openai({"type": "text", "text": "12345678"}, block).features
    assert (feature.modality, feature.offset, feature.length) == (modality, 2, length)
    assert feature.content_hash == xxhash.xxh64_hexdigest(content.encode())


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal", "thinking"])
def test_each_openai_text_block_adds_its_text(kind: str) -> None:
    name = "text" if kind.endswith("text") else kind
    assert openai({"type": kind, name: "12345678"}) == Prompt(b"12345678")


@pytest.mark.parametrize(
    "block", [{}, {"type": "odd"}, {"type": 1}, {"type": "text", "text": 1}, {"type": []}]
)
def test_unknown_blocks_add_nothing(block: dict[str, Any]) -> None:
    assert openai(block) == anthropic(block) == Prompt(b"")


def test_anthropic_blocks_add_their_texts() -> None:
    prompt = anthropic(
        {"type": "text", "text": "t."},
        {"type": "thinking", "thinking": "th.", "signature": "s"},
        {"type": "tool_use", "id": "i.", "name": "n.", "input": {"b": 1, "a": 2}},
        {
            "type": "tool_result",
            "tool_use_id": "i",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
        {"type": "tool_result", "content": "3"},
        {"type": "tool_result"},
        {"type": "tool_use"},
    )
    assert prompt.tokens.rstrip(b"\0") == b't.th.i.n.{"a":2,"b":1}1\n23'


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "QUJD"}, "QUJD"),
        ({"type": "url", "url": "http://x/i"}, "http://x/i"),
    ],
)
def test_anthropic_images_are_items(source: dict[str, Any], content: str) -> None:
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "content": [{"type": "text", "text": "abcd"}, image]}
    (alone,) = anthropic(image).features
    (within,) = anthropic(result).features
    assert alone.content_hash == within.content_hash == xxhash.xxh64_hexdigest(content.encode())
    assert (alone.offset, alone.length, within.offset) == (0, 225, 1)


@pytest.mark.parametrize("source", [None, {}, {"data": 1}, "http://x"])
def test_images_without_a_source_add_nothing(source: object) -> None:
    assert anthropic({"type": "image", "source": source}) == Prompt(b"")


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be kind.", "Be kind."),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "odd", "text": "x"},
                {"type": "text", "text": "b"},
            ],
            "ab",
        ),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "b"},
            ],
            "b",
        ),
        ([1, {"type": "text"}], ""),
        (None, ""),
        (5, ""),
    ],
)
def test_the_system_text_leaves_billing_headers_out(system: object, expected: str) -> None:
    """The headers differ from request to request and would end every common prefix."""
    assert system_text(system) == expected


def test_a_tool_result_has_lines_and_images() -> None:
    image = {"type": "image"}
    block = {"content": [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}, 1]}
    assert (tool_result_text(block), tool_result_images(block)) == ("a\nb", [image])
    assert (tool_result_text({"content": "a"}), tool_result_images({"content": "a"})) == ("a", [])
