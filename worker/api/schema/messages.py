"""Anthropic's `POST /v1/messages`: its body, the chat that it stands for, answer, errors. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from worker.api.http.exchange import ErrorForm
from worker.api.http.limits import malformed
from worker.api.schema.answers import Count
from worker.api.schema.parse import Whole, hint, shown
from worker.api.schema.requests import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    TOOL_NAME,
    only,
    refuse_unsupported,
    says,
)
from worker.errors import RequestError

Json = dict[str, Any]
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "adaptive", "disabled")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Claude Code begins its system prompt with a line of its own, which differs from request to
# request, so that no prefix would be found again. vLLM drops it too.
_BILLING_HEADER = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One block of content: text, a call of a tool, what it gave, or thinking (the model's own of
    an earlier answer). `cache_control` and `citations` have no effect.
    """

    type: Annotated[str, says(enum=list(_BLOCKS))]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | list[str | Json] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    source: Annotated[Any, only()] = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One message. Claude Code adds instructions as messages of the system."""

    role: Annotated[str, says(enum=list(_ROLES))]
    content: str | list[str | Block]


class SystemBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of `system`."""

    text: str
    type: Annotated[str, says(enum=["text"])] = "text"
    cache_control: Any = None
    citations: Any = None


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may use; only those of the client."""

    name: Annotated[str, says(pattern=TOOL_NAME)]
    input_schema: Json | None = None  # a tool of the server's has none, and is refused by its type
    description: str | None = None
    type: Annotated[str | None, says(enum=["custom", None])] = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Annotated[Any, hint([])] = None
    defer_loading: Annotated[Any, hint(False)] = None
    allowed_callers: Annotated[Any, hint(["direct"])] = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether and which tools are used."""

    type: Annotated[str, says(enum=["auto", "any", "tool", "none"])]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking`: the model thinks first or not, if its template can say so."""

    type: Annotated[str, says(enum=list(_THINKING))]
    budget_tokens: Annotated[Whole | None, hint()] = None
    display: Annotated[Any, hint("summarized")] = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of an answer: JSON that validates against a schema."""

    type: Annotated[str, says(enum=["json_schema"])]
    schema: Json


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config`. The template gets the effort as `reasoning_effort`."""

    effort: Annotated[str | None, hint(*_EFFORTS)] = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, hint()] = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[Turn], says(minItems=1, maxItems=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[MessagesTool] | None, says(maxItems=MAX_TOOLS)] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`
    chat_template_kwargs: Json | None = None
    cache_control: Any = None  # every prefix is cached
    context_management: Annotated[Any, hint({}, {"edits": []})] = None
    mcp_servers: Annotated[Any, only([])] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[Whole, says(minimum=1)]
    stop_sequences: Annotated[
        list[Annotated[str, says(minLength=1)]] | None, says(maxItems=MAX_STOP_STRINGS)
    ] = None
    stream: bool | None = None
    temperature: Annotated[float | None, says(minimum=0, maximum=2)] = None
    top_p: Annotated[float | None, says(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Whole | None, says(minimum=-1)] = None
    metadata: Annotated[Any, hint({})] = None
    service_tier: Annotated[Any, hint("auto", "standard_only")] = None
    speed: Annotated[Any, hint("standard")] = None
    inference_geo: Annotated[Any, hint()] = None
    container: Annotated[Any, only()] = None
    vllm_xargs: Json | None = None
    cache_salt: Annotated[
        str | None, says(minLength=1, maxLength=MAX_CACHE_SALT_CHARS, pattern=r"^[^@/\\\u0000]*$")
    ] = None
    kv_transfer_params: Annotated[Json | None, only({})] = None


def chat_of(request: CountTokensRequest, *, system_turns: bool) -> Json:
    """The body of the chat that a message stands for. `system_turns`: the chat template takes
    messages of the system within a conversation. Raises `RequestError`.
    """
    refuse_unsupported(request)
    messages = _messages(request)
    chat: Json = {
        "model": request.model,
        "messages": messages if system_turns else _folded(messages),
        "tools": [_chat_tool(n, tool) for n, tool in enumerate(request.tools or ())] or None,
    }
    choice = request.tool_choice
    if choice is not None:
        chat["tool_choice"] = _chosen(choice)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    variables = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        _check_thinking(request.thinking)
        variables.setdefault("enable_thinking", request.thinking.type != "disabled")
    chat["chat_template_kwargs"] = variables or None
    config = request.output_config or OutputConfig()
    chat["reasoning_effort"] = config.effort
    chat["response_format"] = _response_format(config.format, request.output_format)
    if isinstance(request, MessagesRequest):
        chat["max_completion_tokens"] = request.max_tokens
        chat["stop"] = request.stop_sequences
        for name in ("stream", "temperature", "top_p", "top_k", "cache_salt", "vllm_xargs"):
            chat[name] = getattr(request, name)
    return chat


def _response_format(form: OutputFormat | None, older: OutputFormat | None) -> Json | None:
    name = "output_config.format" if older is None else "output_format"
    asked = form or older
    if asked is None:
        return None
    if asked.type != "json_schema":
        reason = f"{name}.type must be 'json_schema', got '{shown(asked.type)}'"
        raise RequestError(reason, param=f"{name}.type")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.schema}}


def _check_thinking(thinking: Thinking) -> None:
    if thinking.type not in _THINKING:
        known = ", ".join(_THINKING)
        reason = f"thinking.type must be one of {known}, got '{shown(thinking.type)}'"
        raise RequestError(reason, param="thinking.type")


def _chat_tool(n: int, tool: MessagesTool) -> Json:
    refuse_unsupported(tool, f"tools[{n}].")
    if tool.type not in (None, "custom"):
        place = f"tools[{n}].type"
        raise RequestError(f"{place} must be 'custom', got '{shown(tool.type)}'", param=place)
    if tool.input_schema is None:
        place = f"tools[{n}].input_schema"
        raise malformed(f"Missing required field `{place}`", place)
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _chosen(choice: MessagesToolChoice) -> str | Json:
    if choice.type == "tool":
        if choice.name is None:
            raise malformed("tool_choice.name is missing: it names the tool", "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        known = ", ".join([*_CHOICES, "tool"])
        reason = f"tool_choice.type must be one of {known}, got '{shown(choice.type)}'"
        raise RequestError(reason, param="tool_choice.type")
    return _CHOICES[choice.type]


def _messages(request: CountTokensRequest) -> list[Json]:
    if not request.messages:
        raise RequestError("messages is empty: a conversation has at least one message.")
    if len(request.messages) > MAX_MESSAGES:
        raise RequestError(f"messages takes at most {MAX_MESSAGES} messages", param="messages")
    system = _system(request.system)
    messages: list[Json] = []
    for n, turn in enumerate(request.messages):
        place = f"messages[{n}]"
        if turn.role not in _ROLES:
            reason = f"{place}.role must be user, assistant or system, got '{shown(turn.role)}'"
            raise malformed(reason, f"{place}.role")
        if isinstance(turn.content, str):
            turns: list[Json] = [{"role": turn.role, "content": turn.content}]
        else:
            turns = _turns(turn.role, turn.content, f"{place}.content")
        if turn.role == "system":
            text = "".join(map(_without_billing, _texts(turns[0]["content"])))
            turns = [{"role": "system", "content": text}] if text else []
            if not messages:
                system, turns = _joined(system, text), []
        messages += turns
    return [{"role": "system", "content": system}, *messages] if system else messages


def _system(system: str | list[SystemBlock] | None) -> str:
    if isinstance(system, str | None):
        return _without_billing(system or "")
    for n, part in enumerate(system):
        if part.type != "text":
            place = f"system[{n}].type"
            raise RequestError(f"{place} must be 'text', got '{shown(part.type)}'", param=place)
    return "".join(_without_billing(part.text) for part in system)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_HEADER) else text


def _folded(messages: list[Json]) -> list[Json]:
    """The conversation with messages of the system as texts of the turns beside them, for templates
    that take none. As in vLLM, what was folded in the last request is folded likewise in the next
    one, so that its prefix is found again.
    """
    folded: list[Json] = []
    pending = ""  # behind a turn of the assistant's
    for n, message in enumerate(messages):
        listens = message["role"] in ("user", "tool")
        if n and message["role"] == "system":
            if folded[-1]["role"] != "assistant" and not pending:
                before = "\n".join(_texts(folded[-1]["content"]))
                folded[-1] = {**folded[-1], "content": _joined(before, message["content"])}
            else:
                pending = _joined(pending, message["content"])
            continue
        if pending and listens:
            content = _joined(pending, "\n".join(_texts(message["content"])))
            message, pending = {**message, "content": content}, ""
        elif pending:
            folded.append({"role": "user", "content": pending})
            pending = ""
        folded.append(message)
    return [*folded, {"role": "user", "content": pending}] if pending else folded


def _texts(content: str | list[Json]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _joined(before: str, behind: str) -> str:
    return "\n\n".join(filter(None, (before, behind)))


def _turns(role: str, blocks: list[str | Block], place: str) -> list[Json]:
    """What one message is in a chat: results of tools are turns of their own, before its text."""
    results: list[Json] = []
    turn: Json = {"role": role}
    texts: list[Json] = []
    for n, given in enumerate(blocks):
        where = f"{place}[{n}]"
        block = Block(type="text", text=given) if isinstance(given, str) else given
        _check_block(block, role, where)
        if block.type == "text":
            texts.append({"type": "text", "text": _needed(block.text, f"{where}.text")})
        elif block.type == "thinking":
            thought = _needed(block.thinking, f"{where}.thinking")
            turn["reasoning"] = turn.get("reasoning", "") + thought
        elif block.type == "tool_use":
            call = {
                "name": _needed(block.name, f"{where}.name"),
                "arguments": json.dumps(block.input or {}),
            }
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": block.id, "type": "function", "function": call})
        elif block.type == "tool_result":
            call_id = _needed(block.tool_use_id, f"{where}.tool_use_id")
            content = _result(block.content, f"{where}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if texts:
        turn["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if len(turn) > 1:
        return [*results, turn]
    # An empty text is one; a message of nothing but results or hidden thoughts is not.
    return results if blocks else [{**turn, "content": ""}]


def _check_block(block: Block, role: str, where: str) -> None:
    if block.type not in _BLOCKS:
        known = ", ".join(_BLOCKS)
        reason = f"{where}.type must be one of {known}, got '{shown(block.type)}'"
        raise RequestError(reason, param=f"{where}.type")
    refuse_unsupported(block, f"{where}.")
    whose = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
    if whose.get(block.type, role) != role:
        reason = f"{where}: a {block.type} block is only of {whose[block.type]} messages"
        raise RequestError(reason, param=where)


def _result(content: str | list[str | Json] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for n, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        # The tool that a search has found; the model sees all of them from the beginning.
        text = part.get("tool_name" if part.get("type") == "tool_reference" else "text")
        if part.get("type") not in ("text", "tool_reference") or not isinstance(text, str):
            reason = f"only text blocks are supported yet, got '{shown(part.get('type'))}'"
            raise RequestError(f"{place}[{n}]: {reason}", param=f"{place}[{n}]")
        texts.append(text)
    return "\n".join(texts)


def _needed(value: str | None, place: str) -> str:
    if value is None:
        raise malformed(f"Missing required field `{place}`", place)
    return value


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of an answer. `citations` and `signature` are what clients expect to be there."""

    type: Literal["text", "tool_use", "thinking"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any | UnsetType = UNSET


class MessagesUsage(msgspec.Struct):
    """Token counts. As in Anthropic's API, `input_tokens` are those that came from no cache."""

    input_tokens: Count
    output_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count = 0


class Message(msgspec.Struct, kw_only=True):
    """Answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: Count


class MessagesErrorDetail(msgspec.Struct):
    """What was wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """Anthropic's error envelope."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"


_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _messages_error(error: RequestError) -> MessagesError:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    return MessagesError(MessagesErrorDetail(_ERROR_TYPES.get(error.status, kind), error.message))


MESSAGES_ERRORS = ErrorForm(
    _messages_error,
    MessagesError,
    MessagesError(MessagesErrorDetail("authentication_error", "Unauthorized")),
    event=b"event: error\n",
)
