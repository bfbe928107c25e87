"""What a request says → the prompts to run: conversations, texts, token ids, and their limits.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from worker.api.http.limits import MAX_JSON_CONTAINERS, malformed, num_containers
from worker.api.schema.params import ModelLimits, invalid
from worker.api.schema.parse import shown
from worker.api.schema.requests import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOL_CALLS,
    ROLES,
    ChatMessage,
    ContentPart,
)
from worker.errors import RequestError

_INT64 = 1 << 63
# Of a message; only null and empty ones are taken.
UNSUPPORTED_PARTS = ("function_call", "audio")
_THINKING = "thinking"
# The field with the text of a part, by the part's type; None: it has no text.
PART_TEXTS: Mapping[str, str | None] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    _THINKING: None,
}
Parts = Sequence[str | ContentPart]


def check_prompt_chars(text: str, limits: ModelLimits) -> None:
    """Refuse a hopelessly long text before it is tokenized: no tokenizer averages 16 bytes a
    token over a whole context.
    """
    if len(text) > 16 * limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {len(text)} characters, which is more than that.",
            param="input_text",
        )


def room_for_output(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Tokens that can follow a prompt; a prompt that leaves none is refused."""
    if num_prompt_tokens == 0:
        raise RequestError("The decoder prompt cannot be empty")
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {num_prompt_tokens} input tokens, which leaves no room for an"
            " answer. Please reduce the length of the prompt.",
            # As vLLM, to which a prompt of just the context leaves max_tokens of 0.
            param="input_tokens" if room else "max_tokens",
        )
    return room


def check_input_length(num_tokens: int, limits: ModelLimits) -> None:
    """Refuse an input without an answer that is longer than the context, or empty."""
    if num_tokens == 0:
        raise RequestError("The input cannot be empty", param="input")
    if num_tokens > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" input contains {num_tokens} input tokens. Please reduce its length, or send"
            " truncate_prompt_tokens.",
            param="input_tokens",
        )


def truncated(
    token_ids: list[int], asked: int | None, side: str | None, max_tokens: int, limits: ModelLimits
) -> list[int]:
    """The prompt, cut to `truncate_prompt_tokens`: its end is kept, or with the side "right" its
    beginning. -1 cuts to what leaves room for `max_tokens` in the context.
    """
    if asked is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if asked < -1:
        raise malformed(f"{name} must be at least 1, or -1, got {asked}.", name)
    if asked == 0:
        raise RequestError(f"{name} must be at least 1, or -1, got 0: the prompt would be empty.")
    if asked > limits.max_model_len:
        reason = f"{name}={asked} cannot be greater than max_model_len = {limits.max_model_len}."
        raise invalid(name, asked, f"{reason} Please request a smaller truncation size.")
    size = max(1, limits.max_model_len - max_tokens) if asked == -1 else asked
    return token_ids[:size] if side == "right" else token_ids[-size:]


def template_messages(
    messages: Sequence[ChatMessage], *, argument_objects: bool = True
) -> list[dict[str, Any]]:
    """Messages as the chat template sees them: content is always one string (text parts joined by
    line breaks). `argument_objects`: it wants the arguments of tool calls as objects, not as JSON.
    """
    if not messages:
        raise RequestError("messages is empty: a conversation has at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages takes at most {MAX_MESSAGES} messages", param="messages")
    if argument_objects:
        _check_arguments(messages)
    rendered = []
    for n, message in enumerate(messages):
        place = f"messages[{n}]"
        if message.role not in ROLES:
            raise malformed(
                f"{place}.role must be one of {', '.join(sorted(ROLES))},"
                f" got '{shown(message.role)}'",
                f"{place}.role",
            )
        _refuse_unsupported_parts(message, place)
        reasoning = _reasoning(message, place)
        calls = _tool_calls(message, place, argument_objects=argument_objects)
        content = _content(message, place, may_be_missing=bool(reasoning or calls))
        entry: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            entry["name"] = message.name
        if calls:
            entry["tool_calls"] = calls
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if reasoning:
            # Templates read one or the other.
            entry |= {"reasoning": reasoning, "reasoning_content": reasoning}
        rendered.append(entry)
    return rendered


def _refuse_unsupported_parts(message: ChatMessage, place: str) -> None:
    for name in UNSUPPORTED_PARTS:
        if getattr(message, name) not in (None, [], {}):
            raise RequestError(f"{place}.{name} is not supported yet", param=f"{place}.{name}")
    if message.tool_call_id is not None and message.role != "tool":
        name = f"{place}.tool_call_id"
        raise RequestError(f"{name} is only of tools, not of {message.role}", param=name)


def _tool_calls(
    message: ChatMessage, place: str, *, argument_objects: bool
) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    name = f"{place}.tool_calls"
    if calls and message.role != "assistant":
        raise RequestError(f"{name} is only of assistants, not of {message.role}", param=name)
    if len(calls) > MAX_TOOL_CALLS:
        raise RequestError(f"{name} takes at most {MAX_TOOL_CALLS} calls", param=name)
    rendered = []
    for n, call in enumerate(calls):
        if call.type not in (None, "function"):
            where = f"{name}[{n}].type"
            raise RequestError(f"{where} must be 'function', got '{shown(call.type)}'", param=where)
        arguments = call.function.arguments or "{}"
        as_wanted = _as_object if argument_objects else _as_text
        function = {"name": call.function.name, "arguments": as_wanted(arguments)}
        rendered.append({"id": call.id, "type": "function", "function": function})
    return rendered


def _check_arguments(messages: Sequence[ChatMessage]) -> None:
    """The JSON in them is bounded as that of the body is."""
    calls = [call for message in messages for call in message.tool_calls or []]
    texts = [call.function.arguments for call in calls]
    if sum(num_containers(t) for t in texts if isinstance(t, str)) > MAX_JSON_CONTAINERS:
        reason = f"more than {MAX_JSON_CONTAINERS} objects and arrays"
        raise RequestError(f"the arguments of tool calls have {reason}", param="messages")


def _as_object(arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    """The arguments of a call; those that a model got wrong stay text."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return arguments


def _as_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reasoning(message: ChatMessage, place: str) -> str | None:
    """What an assistant thought before it spoke; if the model sees it is up to the template."""
    given = {name: getattr(message, name) for name in ("reasoning", "reasoning_content")}
    if isinstance(message.content, list):
        given["content"] = thoughts_of(message.content)
    names = [name for name, text in given.items() if text]
    if not names:
        return None
    if message.role != "assistant":
        what = "thinking" if names[0] == "content" else f"{place}.{names[0]}"
        reason = f"{what} is only of assistants, not of {message.role}"
        raise RequestError(reason, param=f"{place}.{names[0]}")
    texts: set[str] = {given[name] for name in names}
    if len(texts) > 1:
        places = " and ".join(f"{place}.{name}" for name in names)
        reason = f"{places} have the same by {len(names)} names, and must not differ"
        raise RequestError(reason, param=f"{place}.{names[0]}")
    return texts.pop()


def _content(message: ChatMessage, place: str, *, may_be_missing: bool) -> str:
    """Text, which may be empty. Servers answer null where an assistant said nothing, and clients
    send it back; in any other turn null is a mistake, and so is no content at all.
    """
    content = message.content
    if content is None or content is UNSET:
        may_be_missing = may_be_missing or message.refusal is not None
        if not may_be_missing and (content is UNSET or message.role != "assistant"):
            reason = "is null" if content is None else "is missing"
            reason = f"{place}.content {reason}: it must be a text or parts"
            raise malformed(reason, f"{place}.content")
        return message.refusal or ""
    texts = [content] if isinstance(content, str) else _texts(content, f"{place}.content")
    return "\n".join(texts if message.refusal is None else (*texts, message.refusal))


def _texts(parts: Parts, place: str) -> list[str]:
    texts: list[str] = []
    for n, part in enumerate(parts):
        try:
            texts += texts_of(part)
        except ValueError as error:
            raise RequestError(f"{place}[{n}]: {error}") from error
    return texts


def texts_of(
    part: str | ContentPart, kinds: Mapping[str, str | None] = PART_TEXTS
) -> tuple[str, ...]:
    """The text of a part of a turn, which may be the part itself; empty where it has none. `kinds`
    are the parts that the turn may have. Raises `ValueError` for another one.
    """
    if isinstance(part, str):
        return (part,)
    if part.type not in kinds:
        raise ValueError(f"only text parts are supported yet, got '{shown(part.type)}'")
    name = kinds[part.type]
    if name is None:
        return ()
    text = getattr(part, name)
    if text is None:
        raise ValueError(f"a {part.type} part needs its {name}")
    return (text,)


def thoughts_of(parts: Parts) -> str:
    """The thinking among the parts of a turn."""
    structs = (part for part in parts if isinstance(part, ContentPart))
    return "".join(part.thinking or "" for part in structs if part.type == _THINKING)


def content_of(message: ChatMessage) -> str:
    """The text of a message that has been rendered."""
    return _content(message, "", may_be_missing=True)


def check_documents(documents: Sequence[Mapping[str, object]] | None) -> None:
    """There are at most so many documents for a template to show."""
    if len(documents or ()) > MAX_DOCUMENTS:
        raise RequestError(f"documents takes at most {MAX_DOCUMENTS}", param="documents")


def prompts_of(
    prompt: str | list[str | int | list[int]], limits: ModelLimits | None = None
) -> list[str | list[int]]:
    """The one or several prompts of a text completion: text or token ids each. With `limits`, too
    many token ids are refused by their number, before each is looked at: there may be millions.
    """
    if not prompt:
        raise RequestError("prompt cannot be empty", param="prompt" if prompt == "" else None)
    if isinstance(prompt, str):
        return [prompt]
    is_ids = isinstance(prompt[0], int)
    if not is_ids and len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    if limits is not None:
        for ids in [prompt] if is_ids else prompt:
            if isinstance(ids, list):
                room_for_output(len(ids), limits)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds not in ({str}, {list}):
        raise malformed(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such"
            " lists; not a mixture",
            f"prompt[{next(n for n, one in enumerate(prompt) if type(one) is not int)}]",
        )
    return cast(list[str | list[int]], prompt)


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, name: str = "prompt") -> None:
    """Ids a client gives, or its text stands for (in the field `name`), must be the model's; the
    engine trusts them.
    """
    if not token_ids:
        return
    least, most = min(token_ids), max(token_ids)
    if least < 0 or most >= _INT64:
        wrong = next(n for n, i in enumerate(token_ids) if not 0 <= i < _INT64)
        place = f"{name}[{wrong}]"
        raise malformed(f"{place}: Token ids must be in [0, {limits.vocab_size})", place)
    if most >= limits.vocab_size:
        raise RequestError(
            f"Token id {most} is out of vocabulary: ids must be in [0, {limits.vocab_size})",
            name if name.startswith("resume.") else None,  # vLLM names no field of its own
        )
