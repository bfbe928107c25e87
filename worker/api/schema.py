"""The bodies of the OpenAI API as this worker takes them. Pure: bytes → checked values.

What is not supported is refused, never ignored: an unknown field is a 400 that names it, and a
known field that is not built yet is accepted only with a value that asks for nothing (`n: 1`,
`logprobs: false`, …).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from worker.errors import RequestError

MAX_MESSAGES = 4096
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CACHE_SALT_CHARS = 128

# field → the values besides null that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "truncate_prompt_tokens": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "stream_interval": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "priority": (0,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; false is all we do


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share. Every field may be null, which means its default.

    The fields typed `Any` are those of `_NEUTRAL`, and a few that carry no instruction for the
    answer (`user`, `metadata`, …).
    """

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    session_id: Any = None

    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    echo: Any = None
    truncate_prompt_tokens: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    repetition_detection: Any = None
    stream_interval: Any = None
    service_tier: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text parts are supported. Open, so that the error for
    an image names its type rather than its fields.
    """

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. The `Any` fields are what servers put into assistant turns that clients send back;
    only null or empty ones are taken.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Any = None

    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    include_reasoning: Any = None
    mm_processor_kwargs: Any = None
    thinking_token_budget: Any = None


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    suffix: Any = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)
_Generation = TypeVar("_Generation", bound=GenerationFields)

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_LOCATION = re.compile(r" - at `\$\.?([^`]*)`")


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body strictly. Raises `RequestError` naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise RequestError("The body is not valid UTF-8") from error


def decode_generation(body: bytes, kind: type[_Generation]) -> _Generation:
    """`decode`, then refuse every field that is known but not built yet."""
    request = decode(body, kind)
    _refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    return request


def _explained(message: str) -> RequestError:
    """msgspec's message, with the field it speaks of as `param`."""
    location = _LOCATION.search(message)
    path = location.group(1) if location else ""
    for pattern, text in (
        (_UNKNOWN_FIELD, "Unknown field `{0}`: it is not part of this API"),
        (_MISSING_FIELD, "Missing required field `{0}`"),
    ):
        found = pattern.search(message)
        if found:
            field = f"{path}.{found.group(1)}" if path else found.group(1)
            return RequestError(text.format(field), param=field)
    reason = message if location is None else message[: location.start()]
    return RequestError(f"{path}: {reason}" if path else reason, param=path or None)


def _refuse_unsupported(request: msgspec.Struct) -> None:
    for name in request.__struct_fields__:
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            continue
        value = getattr(request, name)
        if value is not None and not _is_one_of(value, neutral):
            hint = " or ".join(msgspec.json.encode(v).decode() for v in neutral)
            fix = f"leave it out or send {hint}" if hint else "leave it out"
            raise RequestError(f"`{name}` is not supported yet; {fix}", param=name)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Equality that does not take true for 1."""
    return any(v == value and isinstance(v, bool) is isinstance(value, bool) for v in neutral)
