"""Asks a vLLM server for the tokens of a prompt: its render routes, which only apply templates and
tokenize.

`POST /v1/completions/render` answers a list of `{token_ids}`, one for each prompt,
`POST /v1/chat/completions/render` one `{token_ids, features}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from picker.tokenization.anthropic_chat import chat_of
from picker.tokenization.multimodal import read_features
from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, ParsedBody

COMPLETIONS_PATH = "/v1/completions/render"
CHAT_PATH = "/v1/chat/completions/render"


@dataclass(frozen=True, slots=True)
class RenderQuestion:
    """What to post where; `has_blocks` says that a content is a list, so there may be media."""

    path: str
    body: dict[str, Any]
    has_blocks: bool


def question_of(body: ParsedBody, model: str) -> RenderQuestion | None:
    """What to ask about `body`; None for an API that no server renders."""
    if body.payload is None:
        return None
    if body.api is Api.COMPLETIONS or body.api is Api.VLLM_GRPC:
        return RenderQuestion(COMPLETIONS_PATH, {**body.payload, "model": model}, has_blocks=False)
    if body.api is Api.CHAT_COMPLETIONS:
        chat: dict[str, Any] = {**body.payload, "model": model}
    elif body.api is Api.MESSAGES:
        chat = {**chat_of(body.payload), "model": model}
    else:
        return None
    has_blocks = any(
        isinstance(content := message.get("content"), list) and content
        for message in chat["messages"]
    )
    return RenderQuestion(CHAT_PATH, chat, has_blocks)


def prompts_of(answer: Any) -> tuple[Prompt, ...]:
    """The prompts that a server has rendered. Raises `ValueError` for what is no such answer."""
    entries = answer if isinstance(answer, list) else [answer]
    if not entries:
        raise ValueError("a render route answered no prompt")
    return tuple(map(_prompt, entries))


def _prompt(entry: object) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError("a render route answered something other than an object")
    tokens = pack_token_ids(entry.get("token_ids"))
    if tokens is None:
        raise ValueError("a render route answered no token_ids")
    return Prompt(tokens, read_features(entry.get("features"), tokens))
