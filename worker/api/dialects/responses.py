"""`POST /v1/responses`: its body, the chat that it stands for, and its answer."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET

from worker.api.dialects.named_events import answered_by, head_of
from worker.api.dialects.response_frames import Response, ResponseFrames
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import fields_named, malformed, needed, refused
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.conversation import PART_TEXTS, Parts, texts_of, thoughts_of
from worker.api.schema.parse import Whole, decode_supported, hint, refuse_unsupported, shown
from worker.api.schema.requests import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    TOOL_CHOICES,
    TOOL_NAME,
    CacheSalt,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    DrawFields,
    Function,
    FunctionName,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    NamedTool,
    RequestId,
    SentCall,
    StreamOptions,
    Tool,
    only,
    says,
)
from worker.api.schema.routes import Handler, generation_route
from worker.errors import RequestError

Json = dict[str, Any]
# The chat's fields, as they are called here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
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
    """One item of `input`, or of an earlier answer: a message, a call, its result, or reasoning."""

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
    """`text.format` without a constraint."""


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
    """The `reasoning` settings of a response; summaries are not written."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[str | None, hint()] = None
    generate_summary: Annotated[str | None, hint()] = None


class ResponsesRequest(DrawFields, kw_only=True):
    """Body of `POST /v1/responses`. `metadata` and `user` are repeated in the answer."""

    input: Annotated[str | list[InputItem], says(minItems=1, maxItems=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Whole | None, says(minimum=1)] = None
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
    seed: Whole | None = None
    stop: Annotated[
        str | list[Annotated[str, says(minLength=1)]] | None,
        says(minLength=1, maxItems=MAX_STOP_STRINGS),
    ] = None
    chat_template_kwargs: Json | None = None
    priority: Whole | None = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    kv_transfer_params: Annotated[Json | None, only({})] = None


async def _prepared(generation: GenerationRoutes, body: bytes, arrival: Arrival) -> Prepared:
    request = decode_supported(body, ResponsesRequest)
    with fields_named(_NAMES):
        prepared = await generation.chat.prepared(chat_of(request), arrival)
    head = head_of(generation, "resp", prepared)
    return answered_by(ResponseFrames(head, response_facts(request)), prepared)


ROUTES = (
    generation_route(
        "/v1/responses",
        "responses",
        "Answer as the Responses API does, without keeping anything",
        ResponsesRequest,
        Response,
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    return {"responses": generation.handler(partial(_prepared, generation))}


_AS_THEY_ARE = (
    *DrawFields.__struct_fields__,
    *("model", "parallel_tool_calls", "stream", "seed", "stop"),
    *("chat_template_kwargs", "priority", "cache_salt", "request_id"),
)


def chat_of(request: ResponsesRequest) -> ChatRequest:
    """Return the chat that a response stands for. Raises `RequestError`."""
    for value in request.include or ():
        if value not in _INCLUDABLE:
            known = ", ".join(_INCLUDABLE)
            raise refused("include", f"takes {known}, got '{shown(value)}'")
    chat = ChatRequest(
        messages=_messages(request), **{name: getattr(request, name) for name in _AS_THEY_ARE}
    )
    chat.max_completion_tokens = request.max_output_tokens
    chat.tools = [_chat_tool(tool) for tool in request.tools or ()] or None
    choice = request.tool_choice
    if isinstance(choice, ChosenFunction):
        chat.tool_choice = NamedTool(type=choice.type, function=FunctionName(choice.name))
    else:
        chat.tool_choice = choice
    form = None if request.text is None else request.text.format
    if isinstance(form, ResponseJsonSchema):
        chat.response_format = JsonSchemaFormat(NamedSchema(name=form.name, schema=form.schema))
    elif isinstance(form, ResponseJsonObject):
        chat.response_format = JsonObjectFormat()
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.top_logprobs or INCLUDED_LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or Whole(0)
    return chat


def _chat_tool(tool: FunctionTool) -> Tool:
    function = Function(tool.name)
    if tool.description is not None:
        function.description = tool.description
    if tool.parameters is not None:
        function.parameters = tool.parameters
    return Tool(type=tool.type, function=function)


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if request.instructions is not None:
        messages.append(ChatMessage(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, ChatMessage(role="user", content=request.input)]
    if not request.input:
        raise RequestError("input is empty: it has at least one item", param="input")
    if len(request.input) > MAX_MESSAGES:
        raise refused("input", f"takes at most {MAX_MESSAGES} items")
    turn: ChatMessage | None = None  # of the assistant, that further items belong to
    for n, item in enumerate(request.input):
        place = f"input[{n}]"
        refuse_unsupported(item, f"{place}.")
        kind = item.type or "message"
        if kind not in _ITEMS:
            reason = f"must be one of {', '.join(_ITEMS)}, got '{shown(kind)}'"
            raise refused(f"{place}.type", reason)
        if kind == "function_call_output":
            output = "" if item.output is None else _text(item.output, f"{place}.output")
            call_id = needed(item.call_id, f"{place}.call_id")
            messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=output))
            turn = None
        elif kind == "message" and item.role != "assistant":
            role, content = needed(item.role, f"{place}.role"), item.content
            if role not in _ROLES:
                reason = f"{place}.role must be one of {', '.join(_ROLES)}, got '{shown(role)}'"
                raise malformed(reason, f"{place}.role")
            if content is None:
                raise malformed(f"{place}.content is missing", f"{place}.content")
            messages.append(ChatMessage(role=role, content=_text(content, f"{place}.content")))
            turn = None
        else:
            begun = turn is not None and (turn.content is not UNSET or turn.tool_calls)
            # Reasoning comes first in a turn.
            if turn is None or (begun and kind != "function_call"):
                messages.append(turn := ChatMessage(role="assistant"))
            _extend(turn, item, kind, place)
    return messages


def _extend(turn: ChatMessage, item: InputItem, kind: str, place: str) -> None:
    if kind == "reasoning":
        parts = item.content or item.summary or ""
        turn.reasoning = (turn.reasoning or "") + _text(parts, f"{place}.content")
    elif kind == "message":
        turn.content = _text(item.content or "", f"{place}.content", _OF_ASSISTANTS)
        if isinstance(item.content, list):
            turn.reasoning = (turn.reasoning or "") + thoughts_of(item.content)
    else:
        function = CalledFunction(needed(item.name, f"{place}.name"), item.arguments)
        call = SentCall(function, id=item.call_id, type="function")
        turn.tool_calls = [*(turn.tool_calls or ()), call]


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


def response_facts(request: ResponsesRequest) -> Json:
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
