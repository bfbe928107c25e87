"""`POST /v1/responses`: its body, the chat that it stands for, and its answer. Pure.

Nothing is stored: what refers to an earlier response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from worker.api.http.limits import malformed
from worker.api.schema.answers import Count
from worker.api.schema.parse import Whole, hint, shown
from worker.api.schema.prompts import PART_TEXTS, Parts, texts_of, thoughts_of
from worker.api.schema.requests import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    TOOL_CHOICES,
    TOOL_NAME,
    ContentPart,
    StreamOptions,
    only,
    ranged,
    refuse_unsupported,
    says,
)
from worker.errors import RequestError

Json = dict[str, Any]
_OF_ASSISTANTS = {**PART_TEXTS, "summary_text": "text", "reasoning_text": "text"}
_OF_OTHERS = {kind: name for kind, name in _OF_ASSISTANTS.items() if name is not None}
_ROLES = ("system", "developer", "user", "assistant")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
INCLUDED_LOGPROBS = "message.output_text.logprobs"
# The others add nothing: reasoning is not encrypted, and no tools run here.
_INCLUDABLE = (
    INCLUDED_LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of `input`: a message, a call of a function, what it gave, or reasoning; items of an
    earlier answer may be sent back as they are.
    """

    type: Annotated[str | None, says(enum=[*_ITEMS, None])] = None  # a message
    role: Annotated[str | None, says(enum=[*_ROLES, None])] = None
    content: str | list[str | ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | Json | None = None
    output: str | list[str | ContentPart] | None = None
    summary: list[str | ContentPart] | None = None
    encrypted_content: str | None = None
    namespace: Annotated[Any, only()] = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, says(pattern=TOOL_NAME)]
    type: Annotated[str, says(enum=["function"])] = "function"
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A `tool_choice` that names the function to call."""

    name: str
    type: Annotated[str, says(enum=["function"])] = "function"


class ResponseTextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """`text.format`: anything."""


class ResponseJsonObject(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """`text.format`: any JSON object."""


class ResponseJsonSchema(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema", kw_only=True
):
    """`text.format`: JSON that validates against a schema, whatever `strict` says."""

    name: str
    schema: Json
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`text` of a response."""

    format: ResponseTextFormat | ResponseJsonObject | ResponseJsonSchema | None = None
    verbosity: Annotated[Any, hint("medium")] = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`reasoning` of a response; there are no summaries."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[str | None, hint()] = None
    generate_summary: Annotated[str | None, hint()] = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/responses`. `metadata` and `user` are repeated in the answer."""

    input: Annotated[str | list[InputItem], says(minItems=1, maxItems=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Whole | None, says(minimum=1)] = None
    temperature: Annotated[float | None, ranged("temperature")] = None
    top_p: Annotated[float | None, says(exclusiveMinimum=0, maximum=1)] = None
    tools: Annotated[list[FunctionTool] | None, says(maxItems=MAX_TOOLS)] = None
    tool_choice: Annotated[str, says(enum=TOOL_CHOICES)] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Annotated[str, says(enum=list(_INCLUDABLE))]] | None = None
    top_logprobs: Annotated[Whole | None, says(minimum=0)] = None
    metadata: Any = None
    user: str | None = None
    truncation: Annotated[Any, hint("disabled")] = None  # of prompts that do not fit
    store: Annotated[bool | None, hint(False)] = None
    safety_identifier: Annotated[Any, hint()] = None
    prompt_cache_key: Annotated[Any, hint()] = None
    prompt_cache_retention: Annotated[Any, hint()] = None
    client_metadata: Annotated[Any, hint({})] = None
    service_tier: Annotated[Any, hint("auto", "default")] = None
    max_tool_calls: Annotated[Any, hint()] = None  # of tools that run at the server
    context_management: Annotated[Any, hint([])] = None
    background: Annotated[Any, only(False)] = None
    previous_response_id: Annotated[Any, only()] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    # As in chats.
    top_k: Annotated[Whole | None, says(minimum=-1)] = None
    min_p: Annotated[float | None, ranged("min_p")] = None
    presence_penalty: Annotated[float | None, ranged("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, ranged("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, says(exclusiveMinimum=0)] = None
    seed: Whole | None = None
    stop: Annotated[
        str | list[Annotated[str, says(minLength=1)]] | None,
        says(minLength=1, maxItems=MAX_STOP_STRINGS),
    ] = None
    ignore_eos: bool | None = None
    chat_template_kwargs: Json | None = None
    priority: Whole | None = None
    cache_salt: Annotated[
        str | None, says(minLength=1, maxLength=MAX_CACHE_SALT_CHARS, pattern=r"^[^@/\\\u0000]*$")
    ] = None
    request_id: Annotated[str | None, says(minLength=1, maxLength=MAX_REQUEST_ID_CHARS)] = None
    kv_transfer_params: Annotated[Json | None, only({})] = None


_AS_THEY_ARE = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "stream"),
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "ignore_eos", "chat_template_kwargs", "priority", "cache_salt", "request_id"),
)


def chat_of(request: ResponsesRequest) -> Json:
    """The body of the chat that a response stands for. Raises `RequestError`."""
    refuse_unsupported(request)
    for value in request.include or ():
        if value not in _INCLUDABLE:
            known = ", ".join(_INCLUDABLE)
            raise RequestError(f"include takes {known}, got '{shown(value)}'", param="include")
    chat: Json = {name: getattr(request, name) for name in _AS_THEY_ARE}
    chat["messages"] = _messages(request)
    chat["max_completion_tokens"] = request.max_output_tokens
    chat["tools"] = [_chat_tool(n, tool) for n, tool in enumerate(request.tools or ())] or None
    choice = request.tool_choice
    if isinstance(choice, ChosenFunction):
        choice = {"type": choice.type, "function": {"name": choice.name}}  # type: ignore[assignment]
    chat["tool_choice"] = choice
    form = None if request.text is None else request.text.format
    if isinstance(form, ResponseJsonSchema):
        schema = {"name": form.name, "schema": form.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(form, ResponseJsonObject):
        chat["response_format"] = {"type": "json_object"}
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.top_logprobs or INCLUDED_LOGPROBS in (request.include or ()):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return chat


def _chat_tool(n: int, tool: FunctionTool) -> Json:
    if tool.type != "function":
        place = f"tools[{n}].type"
        raise RequestError(f"{place} must be 'function', got '{shown(tool.type)}'", param=place)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _messages(request: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise RequestError("input is empty: it has at least one item", param="input")
    if len(request.input) > MAX_MESSAGES:
        raise RequestError(f"input takes at most {MAX_MESSAGES} items", param="input")
    turn: Json | None = None  # of the assistant, that further items belong to
    for n, item in enumerate(request.input):
        place = f"input[{n}]"
        refuse_unsupported(item, f"{place}.")
        kind = item.type or "message"
        if kind not in _ITEMS:
            reason = f"{place}.type must be one of {', '.join(_ITEMS)}, got '{shown(kind)}'"
            raise RequestError(reason, param=f"{place}.type")
        if kind == "function_call_output":
            output = "" if item.output is None else _text(item.output, f"{place}.output")
            call_id = _needed(item.call_id, f"{place}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            turn = None
        elif kind == "message" and item.role != "assistant":
            role, content = _needed(item.role, f"{place}.role"), item.content
            if role not in _ROLES:
                reason = f"{place}.role must be one of {', '.join(_ROLES)}, got '{shown(role)}'"
                raise malformed(reason, f"{place}.role")
            if content is None:
                raise malformed(f"{place}.content is missing", f"{place}.content")
            messages.append({"role": role, "content": _text(content, f"{place}.content")})
            turn = None
        else:
            turn = _assistant(turn, messages, kind)
            _extend(turn, item, kind, place)
    return messages


def _assistant(turn: Json | None, messages: list[Json], kind: str) -> Json:
    """The turn that an item of the assistant's belongs to; reasoning comes before all else."""
    if turn is None or (kind != "function_call" and ("content" in turn or "tool_calls" in turn)):
        turn = {"role": "assistant"}
        messages.append(turn)
    return turn


def _extend(turn: Json, item: InputItem, kind: str, place: str) -> None:
    if kind == "reasoning":
        parts = item.content or item.summary or ""
        turn["reasoning"] = turn.get("reasoning", "") + _text(parts, f"{place}.content")
    elif kind == "message":
        turn["content"] = _text(item.content or "", f"{place}.content", _OF_ASSISTANTS)
        if isinstance(item.content, list):
            turn["reasoning"] = turn.get("reasoning", "") + thoughts_of(item.content)
    else:
        name = _needed(item.name, f"{place}.name")
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _needed(value: str | None, place: str) -> str:
    if value is None:
        raise malformed(f"Missing required field `{place}`", place)
    return value


def _text(content: str | Parts, place: str, kinds: Mapping[str, str | None] = _OF_OTHERS) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for n, part in enumerate(content):
        try:
            texts += texts_of(part, kinds)
        except ValueError as error:
            raise RequestError(f"{place}[{n}]: {error}", param=f"{place}[{n}]") from error
    return "\n".join(texts)


class ResponsePart(msgspec.Struct, kw_only=True):
    """Part of `OutputItem`."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType | None = UNSET


class OutputItem(msgspec.Struct, kw_only=True):
    """A message, reasoning or the call of a function."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ResponsePart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`."""

    cached_tokens: Count


class OutputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`. Tokens of reasoning are not counted apart: 0."""

    reasoning_tokens: Count = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """Answer of `/v1/responses`; what the request said is repeated as it was."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tools: list[Any]
    tool_choice: Any
    text: Any
    reasoning: Any
    metadata: Any
    user: str | None
    top_logprobs: int | None
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    service_tier: None = None
    metrics: Any = None


def response_facts(request: ResponsesRequest) -> Json:
    """What a response repeats of its request."""
    whole = (request.max_output_tokens, request.top_logprobs)
    most, likeliest = (None if n is None else int(n) for n in whole)
    return {
        "instructions": request.instructions,
        "max_output_tokens": most,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": [_shown_tool(tool) for tool in request.tools or ()],
        "tool_choice": request.tool_choice or "auto",
        "text": request.text or {"format": {"type": "text"}},
        "reasoning": request.reasoning,
        "metadata": request.metadata,
        "user": request.user,
        "top_logprobs": likeliest,
    }


def _shown_tool(tool: FunctionTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
