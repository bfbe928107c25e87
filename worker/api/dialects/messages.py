"""Anthropic's `POST /v1/messages`: its body, the chat that it stands for, and its errors."""

import json
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET

from worker.api.dialects.message_frames import Message, MessageFrames
from worker.api.dialects.named_events import answered_by, head_of
from worker.api.dialects.system_turns import takes_system_turns
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival
from worker.api.http.exchange import ErrorForm, Exchange
from worker.api.http.field_errors import fields_named, malformed, needed, refused
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.answers import Count
from worker.api.schema.parse import Whole, decode_supported, hint, refuse_unsupported, shown
from worker.api.schema.requests import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    TOOL_NAME,
    CacheSalt,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    FunctionName,
    JsonSchemaFormat,
    NamedSchema,
    NamedTool,
    SentCall,
    Tool,
    only,
    says,
)
from worker.api.schema.routes import Handler, generation_route, text_route
from worker.errors import RequestError

Json = dict[str, Any]
# The chat's fields, as they are called here.
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
}
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "adaptive", "disabled")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Claude Code begins its system prompt with a line of its own, which differs from request to
# request, so that no prefix would be found again. vLLM drops it too.
_BILLING_HEADER = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_AS_THEY_ARE = ("stream", "temperature", "top_p", "top_k", "cache_salt", "vllm_xargs")


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One block of content, which may be of an earlier answer; `cache_control` has no effect."""

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
    """One message. Claude Code adds instructions as messages with the role `system`."""

    role: Annotated[str, says(enum=list(_ROLES))]
    content: str | list[str | Block]


class SystemBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of `system`."""

    text: str
    type: Annotated[str, says(enum=["text"])] = "text"
    cache_control: Any = None
    citations: Any = None


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may use; only tools that the client runs are supported."""

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
    """The choice of tools: any, one or none."""

    type: Annotated[str, says(enum=["auto", "any", "tool", "none"])]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking`: whether the model thinks first, if its template can control that."""

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
    cache_salt: CacheSalt = None
    kv_transfer_params: Annotated[Json | None, only({})] = None


def chat_of(request: CountTokensRequest, *, system_turns: bool) -> ChatRequest:
    """Return the chat of a request. With `system_turns`, system messages stay in their places."""
    messages = _messages(request)
    chat = ChatRequest(
        model=request.model,
        messages=messages if system_turns else _folded(messages),
        tools=[_chat_tool(n, tool) for n, tool in enumerate(request.tools or ())] or None,
    )
    choice = request.tool_choice
    if choice is not None:
        chat.tool_choice = _chosen(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    variables = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        if request.thinking.type not in _THINKING:
            reason = f"must be one of {', '.join(_THINKING)}, got '{shown(request.thinking.type)}'"
            raise refused("thinking.type", reason)
        variables.setdefault("enable_thinking", request.thinking.type != "disabled")
    chat.chat_template_kwargs = variables or None
    config = request.output_config or OutputConfig()
    # Other efforts are hints, which are left out of the body before.
    chat.reasoning_effort = config.effort  # type: ignore[assignment]
    chat.response_format = _response_format(config.format, request.output_format)
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        for name in _AS_THEY_ARE:
            setattr(chat, name, getattr(request, name))
    return chat


def _response_format(
    form: OutputFormat | None, older: OutputFormat | None
) -> JsonSchemaFormat | None:
    name = "output_config.format" if older is None else "output_format"
    asked = form or older
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise refused(f"{name}.type", f"must be 'json_schema', got '{shown(asked.type)}'")
    return JsonSchemaFormat(NamedSchema(name="output", schema=asked.schema))


def _chat_tool(n: int, tool: MessagesTool) -> Tool:
    refuse_unsupported(tool, f"tools[{n}].")
    if tool.type not in (None, "custom"):
        raise refused(f"tools[{n}].type", f"must be 'custom', got '{shown(tool.type)}'")
    if tool.input_schema is None:
        place = f"tools[{n}].input_schema"
        raise malformed(f"Missing required field `{place}`", place)
    function = Function(tool.name, parameters=tool.input_schema)
    if tool.description is not None:
        function.description = tool.description
    return Tool(function=function)


def _chosen(choice: MessagesToolChoice) -> str | NamedTool:
    if choice.type == "tool":
        if choice.name is None:
            raise malformed("tool_choice.name is missing: it names the tool", "tool_choice.name")
        return NamedTool(function=FunctionName(choice.name))
    if choice.type not in _CHOICES:
        known = ", ".join([*_CHOICES, "tool"])
        raise refused("tool_choice.type", f"must be one of {known}, got '{shown(choice.type)}'")
    return _CHOICES[choice.type]


def _messages(request: CountTokensRequest) -> list[ChatMessage]:
    if not request.messages:
        raise RequestError("messages is empty: a conversation has at least one message.")
    if len(request.messages) > MAX_MESSAGES:
        raise refused("messages", f"takes at most {MAX_MESSAGES} messages")
    system = _system(request.system)
    messages: list[ChatMessage] = []
    for n, turn in enumerate(request.messages):
        place = f"messages[{n}]"
        if turn.role not in _ROLES:
            reason = f"{place}.role must be user, assistant or system, got '{shown(turn.role)}'"
            raise malformed(reason, f"{place}.role")
        if isinstance(turn.content, str):
            turns = [ChatMessage(role=turn.role, content=turn.content)]
        else:
            turns = _turns(turn.role, turn.content, f"{place}.content")
        if turn.role == "system":
            text = "".join(map(_without_billing, _texts(turns[0])))
            turns = [ChatMessage(role="system", content=text)] if text else []
            if not messages:
                system, turns = _joined(system, text), []
        messages += turns
    return [ChatMessage(role="system", content=system), *messages] if system else messages


def _system(system: str | list[SystemBlock] | None) -> str:
    if isinstance(system, str | None):
        return _without_billing(system or "")
    for n, part in enumerate(system):
        if part.type != "text":
            raise refused(f"system[{n}].type", f"must be 'text', got '{shown(part.type)}'")
    return "".join(_without_billing(part.text) for part in system)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_HEADER) else text


def _folded(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Fold system messages into adjacent turns, the same way in every request of a conversation."""
    folded: list[ChatMessage] = []
    pending = ""  # behind a turn of the assistant
    for n, message in enumerate(messages):
        if n and message.role == "system":
            said = "\n".join(_texts(message))
            if folded[-1].role != "assistant" and not pending:
                before = "\n".join(_texts(folded[-1]))
                content = _joined(before, said)
                folded[-1] = msgspec.structs.replace(folded[-1], content=content)
            else:
                pending = _joined(pending, said)
            continue
        if pending and message.role in ("user", "tool"):
            content = _joined(pending, "\n".join(_texts(message)))
            message, pending = msgspec.structs.replace(message, content=content), ""
        elif pending:
            folded.append(ChatMessage(role="user", content=pending))
            pending = ""
        folded.append(message)
    return [*folded, ChatMessage(role="user", content=pending)] if pending else folded


def _texts(message: ChatMessage) -> list[str]:
    content = message.content or []
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else part.text or "" for part in content]


def _joined(before: str, behind: str) -> str:
    return "\n\n".join(filter(None, (before, behind)))


def _turns(role: str, blocks: list[str | Block], place: str) -> list[ChatMessage]:
    """Return a message's turns: one for each tool result, then one for the message's own text."""
    results: list[ChatMessage] = []
    turn = ChatMessage(role=role)
    texts: list[str | ContentPart] = []
    calls: list[SentCall] = []
    for n, given in enumerate(blocks):
        where = f"{place}[{n}]"
        block = Block(type="text", text=given) if isinstance(given, str) else given
        _check_block(block, role, where)
        if block.type == "text":
            texts.append(ContentPart("text", needed(block.text, f"{where}.text")))
        elif block.type == "thinking":
            thought = needed(block.thinking, f"{where}.thinking")
            turn.reasoning = (turn.reasoning or "") + thought
        elif block.type == "tool_use":
            name = needed(block.name, f"{where}.name")
            function = CalledFunction(name, json.dumps(block.input or {}))
            calls.append(SentCall(function, id=block.id, type="function"))
        elif block.type == "tool_result":
            call_id = needed(block.tool_use_id, f"{where}.tool_use_id")
            content = _result(block.content, f"{where}.content")
            results.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))
    turn.tool_calls = calls or None
    if texts:
        turn.content = texts
        if len(texts) == 1:
            turn.content = _texts(turn)[0]
    if turn.content is not UNSET or turn.reasoning is not None or calls:
        return [*results, turn]
    # An empty text is one; a message of nothing but results or hidden thoughts is not.
    if not blocks:
        turn.content = ""
        return [turn]
    return results


def _check_block(block: Block, role: str, where: str) -> None:
    if block.type not in _BLOCKS:
        known = ", ".join(_BLOCKS)
        raise refused(f"{where}.type", f"must be one of {known}, got '{shown(block.type)}'")
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


class CountedTokens(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`: the tokens of the prompt."""

    input_tokens: Count


class MessagesErrorDetail(msgspec.Struct):
    """The fault and its kind."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """The envelope of errors in Anthropic's API."""

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


async def _prepared(generation: GenerationRoutes, body: bytes, arrival: Arrival) -> Prepared:
    request = decode_supported(body, MessagesRequest)
    with fields_named(_NAMES):
        turns = takes_system_turns(generation.checks.text.template)
        chat = chat_of(request, system_turns=turns)
        prepared = await generation.chat.prepared(chat, arrival)
    return answered_by(MessageFrames(head_of(generation, "msg", prepared)), prepared)


async def _count(generation: GenerationRoutes, exchange: Exchange) -> None:
    checks = generation.checks
    body = await exchange.json_body(checks.config.max_body_bytes)
    request = decode_supported(body, CountTokensRequest)
    with fields_named(_NAMES):
        chat = chat_of(request, system_turns=takes_system_turns(checks.text.template))
    checks.adapters.adapter_of(chat.model)
    prompt = await checks.text.chat_prompt(chat.messages, chat)
    await exchange.reply(msgspec.json.encode(CountedTokens(len(prompt.ids))))


ROUTES = (
    replace(
        generation_route(
            "/v1/messages",
            "messages",
            "Answer a conversation as Anthropic's API does",
            MessagesRequest,
            Message,
        ),
        errors=MESSAGES_ERRORS,
    ),
    replace(
        text_route(
            "/v1/messages/count_tokens",
            "count_tokens",
            "How many tokens the prompt of a message has",
            CountTokensRequest,
            CountedTokens,
        ),
        errors=MESSAGES_ERRORS,
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    return {
        "messages": generation.handler(partial(_prepared, generation)),
        "count_tokens": partial(_count, generation),
    }
