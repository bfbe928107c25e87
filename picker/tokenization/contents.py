"""Adds the content blocks of messages to a prompt; blocks of unknown types add nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from picker.tokenization.json_text import json_text, string
from picker.tokenization.media import MediaTokens
from picker.tokenization.prompt_stream import PromptStream

BILLING_HEADER = "x-anthropic-billing-header"
# OpenAI block type → the field that holds its text.
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}


class BlockAdder(Protocol):
    def add(self, block: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class OpenAIBlocks:
    """OpenAI's texts, refusals, images, videos and sounds; `headers` are about videos."""

    stream: PromptStream
    media: MediaTokens
    headers: Mapping[str, str]
    _video_tokens: int | None = None

    def add(self, block: dict[str, Any]) -> None:
        kind = block.get("type")
        if isinstance(kind, str) and kind in _TEXTS:
            self.stream.texts.append(string(block.get(_TEXTS[kind])))
            return
        asset = block.get(kind) if isinstance(kind, str) else None
        members = asset if isinstance(asset, dict) else {"url": asset}
        content = string(members.get("url")) or string(members.get("data"))
        if kind == "image_url":
            self.stream.add_media("image", content, self.media.of_image_url(content))
        elif kind == "video_url":
            # The headers are the request's, so they apply to all of its videos.
            if self._video_tokens is None:
                self._video_tokens = self.media.of_video(self.headers)
            self.stream.add_media("video", content, self._video_tokens)
        elif kind in ("input_audio", "audio_url"):
            content += string(members.get("format"))
            self.stream.add_media("audio", content, self.media.of_sound(len(content)))


@dataclass(frozen=True, slots=True)
class AnthropicBlocks:
    """`text`, `thinking`, `image`, `tool_use` and `tool_result`."""

    stream: PromptStream
    media: MediaTokens

    def add(self, block: dict[str, Any]) -> None:
        texts = self.stream.texts
        kind = block.get("type")
        if kind in ("text", "thinking"):
            texts.append(string(block.get(kind)))
        elif kind == "image":
            self._image(block)
        elif kind == "tool_use":
            texts += (string(block.get("id")), string(block.get("name")))
            if (value := block.get("input")) is not None:
                texts.append(json_text(value))
        elif kind == "tool_result":
            texts.append(tool_result_text(block))
            for image in tool_result_images(block):
                self._image(image)

    def _image(self, block: dict[str, Any]) -> None:
        source = block.get("source")
        if not isinstance(source, dict):
            return
        if data := string(source.get("data")):
            self.stream.add_media("image", data, self.media.of_image_base64(data))
        elif url := string(source.get("url")):
            self.stream.add_media("image", url, self.media.of_image_url(url))


def system_text(system: object) -> str:
    """Return the text of Anthropic's `system`, without billing headers, which differ every time."""
    if isinstance(system, str):
        return system
    texts = (string(block.get("text")) for block in objects(system) if _is(block, "text"))
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def tool_result_text(block: dict[str, Any]) -> str:
    """Return the text of a `tool_result`, one line per text block."""
    content = block.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(string(one.get("text")) for one in objects(content) if _is(one, "text"))


def tool_result_images(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in objects(block.get("content")) if _is(one, "image")]


def objects(value: object) -> list[dict[str, Any]]:
    elements = value if isinstance(value, list) else []
    return [one for one in elements if isinstance(one, dict)]


def _is(block: dict[str, Any], kind: str) -> bool:
    return block.get("type") == kind
