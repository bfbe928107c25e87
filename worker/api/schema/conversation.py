"""The messages of a conversation, checked, in the form that chat templates take. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from worker.api.http.field_errors import Field, FieldError, malformed, refused
from worker.api.http.limits import MAX_JSON_CONTAINERS, num_containers
from worker.api.schema.parse import shown
from worker.api.schema.requests import MAX_MESSAGES, MAX_TOOL_CALLS, ROLES, ChatMessage, ContentPart
from worker.errors import RequestError

# Fields of a message; only null and empty ones are taken.
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


def template_messages(
    messages: Sequence[ChatMessage], *, argument_objects: bool = True
) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; the text parts of a turn become one string."""
    if not messages:
        raise FieldError(Field("messages"), " is empty: a conversation has at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise refused("messages", f"takes at most {MAX_MESSAGES} messages")
    # Arguments as JSON text are decoded only for such templates.
    if argument_objects:
        _check_arguments(messages)
    rendered = []
    for n, message in enumerate(messages):
        place = f"messages[{n}]"
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            reason = f" must be one of {known}, got '{shown(message.role)}'"
            raise malformed((Field(f"{place}.role"), reason), f"{place}.role")
        _refuse_unsupported_parts(message, place)
        reasoning = _reasoning(message, place)
        calls = _tool_calls(message, place, argument_objects=argument_objects)
        content = _content(message, place, may_be_missing=bool(reasoning or calls))
        entry: dict[str, Any] = {"role": message.role, "content": content}
        # Templates test for presence, so absent fields stay absent.
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
            raise refused(f"{place}.{name}", "is not supported yet")
    if message.tool_call_id is not None and message.role != "tool":
        raise refused(f"{place}.tool_call_id", f"is only of tools, not of {message.role}")


def _tool_calls(
    message: ChatMessage, place: str, *, argument_objects: bool
) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    name = f"{place}.tool_calls"
    if calls and message.role != "assistant":
        raise refused(name, f"is only of assistants, not of {message.role}")
    if len(calls) > MAX_TOOL_CALLS:
        raise refused(name, f"takes at most {MAX_TOOL_CALLS} calls")
    rendered = []
    for n, call in enumerate(calls):
        if call.type not in (None, "function"):
            raise refused(f"{name}[{n}].type", f"must be 'function', got '{shown(call.type)}'")
        arguments = call.function.arguments or "{}"
        as_wanted = _as_object if argument_objects else _as_text
        function = {"name": call.function.name, "arguments": as_wanted(arguments)}
        rendered.append({"id": call.id, "type": "function", "function": function})
    return rendered


def _check_arguments(messages: Sequence[ChatMessage]) -> None:
    calls = [call for message in messages for call in message.tool_calls or []]
    texts = [call.function.arguments for call in calls]
    if sum(num_containers(t) for t in texts if isinstance(t, str)) > MAX_JSON_CONTAINERS:
        reason = f"more than {MAX_JSON_CONTAINERS} objects and arrays"
        raise RequestError(f"the arguments of tool calls have {reason}", param="messages")


def _as_object(arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    """Return arguments as an object; text that is not JSON of an object stays text."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return arguments


def _as_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reasoning(message: ChatMessage, place: str) -> str | None:
    """Return a turn's reasoning, if any; the template decides whether the model sees it."""
    given = {name: getattr(message, name) for name in ("reasoning", "reasoning_content")}
    if isinstance(message.content, list):
        given["content"] = thoughts_of(message.content)
    names = [name for name, text in given.items() if text]
    if not names:
        return None
    if message.role != "assistant":
        path = f"{place}.{names[0]}"
        what = "thinking" if names[0] == "content" else Field(path)
        raise FieldError(what, f" is only of assistants, not of {message.role}", param=path)
    texts: set[str] = {given[name] for name in names}
    if len(texts) > 1:
        places: list[str] = []
        for name in names:
            places += (" and ", Field(f"{place}.{name}"))
        reason = f" have the same by {len(names)} names, and must not differ"
        raise FieldError(*places[1:], reason, param=f"{place}.{names[0]}")
    return texts.pop()


def _content(message: ChatMessage, place: str, *, may_be_missing: bool) -> str:
    """Return a message's text. Null is a mistake, unless an assistant only called tools."""
    content = message.content
    if content is None or content is UNSET:
        may_be_missing = may_be_missing or message.refusal is not None
        if not may_be_missing and (content is UNSET or message.role != "assistant"):
            reason = "is null" if content is None else "is missing"
            path = f"{place}.content"
            raise malformed((Field(path), f" {reason}: it must be a text or parts"), path)
        return message.refusal or ""
    texts = [content] if isinstance(content, str) else _texts(content, f"{place}.content")
    return "\n".join(texts if message.refusal is None else (*texts, message.refusal))


def _texts(parts: Parts, place: str) -> list[str]:
    texts: list[str] = []
    for n, part in enumerate(parts):
        try:
            texts += texts_of(part)
        except ValueError as error:
            raise FieldError(Field(f"{place}[{n}]"), f": {error}") from error
    return texts


def texts_of(
    part: str | ContentPart, kinds: Mapping[str, str | None] = PART_TEXTS
) -> tuple[str, ...]:
    """Return the text of a part, if it has one. Raises `ValueError` for a kind not in `kinds`."""
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
    structs = (part for part in parts if isinstance(part, ContentPart))
    return "".join(part.thinking or "" for part in structs if part.type == _THINKING)


def content_of(message: ChatMessage) -> str:
    return _content(message, "", may_be_missing=True)
