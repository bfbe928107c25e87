"""Builds requests to vLLM's render routes, which tokenize, and reads their answers.

`POST /v1/completions/render` returns a list of `{token_ids}`, one per prompt; `POST
/v1/chat/completions/render` returns one `{token_ids, features}`.

Anthropic's Messages are converted to OpenAI's chat exactly as vLLM converts them, because both must
render to the same tokens. `system` comes first; tool results become messages with the role `tool`
ahead of the user's message; `thinking` becomes `reasoning`; a single text block becomes a string.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from picker.tokenization.contents import objects, system_text, tool_result_images, tool_result_text
from picker.tokenization.json_text import string
from picker.tokenization.multimodal import read_features
from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, ParsedBody

COMPLETIONS_PATH = "/v1/completions/render"
CHAT_PATH = "/v1/chat/completions/render"
DEFAULT_MEDIA_TYPE = "image/jpeg"  # that of vLLM's conversion
_TOOL_OPTIONS = ("strict", "defer_loading")


@dataclass(frozen=True, slots=True)
class RenderQuestion:
    """A POST to a render route; `has_blocks`: some content is a list, so it may contain media."""

    path: str
    body: dict[str, Any]
    has_blocks: bool


def question_of(body: ParsedBody, model: str) -> RenderQuestion | None:
    """Build the question that renders `body`; None if there is no route or no prompt for it."""
    if body.payload is None:
        return None
    if body.api is Api.COMPLETIONS or body.api is Api.VLLM_GRPC:
        if not body.payload.get("prompt"):
            return None
        return RenderQuestion(COMPLETIONS_PATH, {**body.payload, "model": model}, has_blocks=False)
    if body.api is Api.CHAT_COMPLETIONS:
        chat: dict[str, Any] = {**body.payload, "model": model}
    elif body.api is Api.MESSAGES:
        chat = {**chat_of(body.payload), "model": model}
    else:
        return None
    messages = chat.get("messages")
    if not messages or not isinstance(messages, list) or len(objects(messages)) < len(messages):
        return None
    has_blocks = any(
        isinstance(content := message.get("content"), list) and content for message in messages
    )
    return RenderQuestion(CHAT_PATH, chat, has_blocks)


def prompts_of(answer: Any) -> tuple[Prompt, ...]:
    """Read the prompts of an answer. Raises `ValueError` for any other shape."""
    entries = answer if isinstance(answer, list) else [answer]
    if not entries:
        raise ValueError("a render route returned no prompt")
    return tuple(map(_prompt, entries))


def _prompt(entry: object) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError("a render route returned something other than an object")
    tokens = pack_token_ids(entry.get("token_ids"))
    if tokens is None:
        raise ValueError("a render route returned no token_ids")
    return Prompt(tokens, read_features(entry.get("features"), tokens))


def chat_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an Anthropic body to the `messages` and `tools` of the equivalent chat completion."""
    messages: list[dict[str, Any]] = []
    if system := payload.get("system"):
        messages.append({"role": "system", "content": system_text(system)})
    for message in objects(payload.get("messages")):
        messages += _converted(message)
    chat: dict[str, Any] = {"messages": messages}
    if tools := objects(payload.get("tools")):
        chat["tools"] = [_tool(tool) for tool in tools]
    return chat


@dataclass(slots=True)
class _Parts:
    role: str
    content: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def take(self, block: dict[str, Any]) -> None:
        kind = block.get("type")
        if kind == "text":
            if text := string(block.get("text")):
                self.content.append({"type": "text", "text": text})
        elif kind == "image":
            self._take_image(block)
        elif kind == "thinking":
            self.reasoning.append(string(block.get("thinking")))
        elif kind == "tool_use":
            self.tool_calls.append(_tool_call(block))
        elif kind == "tool_result":
            self._take_result(block)

    def messages(self) -> list[dict[str, Any]]:
        """Return the tool results, then the message unless it is empty."""
        message: dict[str, Any] = {"role": self.role}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if len(self.content) == 1 and self.content[0]["type"] == "text":
            message["content"] = self.content[0]["text"]
        elif self.content:
            message["content"] = self.content
        return [*self.results, message] if len(message) > 1 else self.results

    def _take_image(self, block: dict[str, Any]) -> None:
        if url := _image_url(block.get("source")):
            self.content.append({"type": "image_url", "image_url": {"url": url}})

    def _take_result(self, block: dict[str, Any]) -> None:
        text = tool_result_text(block)
        if self.role != "user":
            # The words of vLLM: both must render to the same tokens.
            self.content.append({"type": "text", "text": f"Tool result: {text}"})
            return
        call_id = string(block.get("tool_use_id"))
        self.results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        for image in tool_result_images(block):
            self._take_image(image)


def _converted(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = string(message.get("role")), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    parts = _Parts(role)
    for block in objects(content):
        parts.take(block)
    return parts.messages()


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    # With the spaces of vLLM's conversion: both must render to the same tokens.
    arguments = json.dumps(block.get("input") or {})
    function = {"name": string(block.get("name")), "arguments": arguments}
    return {"id": string(block.get("id")), "type": "function", "function": function}


def _image_url(source: object) -> str:
    if not isinstance(source, dict):
        return ""
    if data := string(source.get("data")):
        media_type = string(source.get("media_type")) or DEFAULT_MEDIA_TYPE
        return f"data:{media_type};base64,{data}"
    return string(source.get("url"))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if description := tool.get("description"):
        function["description"] = description
    for option in _TOOL_OPTIONS:
        if tool.get(option) is not None:
            function[option] = tool[option]
    return {"type": "function", "function": function}
