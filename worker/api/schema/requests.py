"""The bodies of the OpenAI API as this worker takes them. Pure.

What is not supported is refused, never ignored: an unknown field is a 400 that names it, and a
known field that is not built yet is accepted only with a value that asks for nothing (`tools: []`,
`response_format: {"type": "text"}`, …). Ranges are checked in `params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET as UNSET
from msgspec import UnsetType

from worker.api.schema.parse import Whole
from worker.api.schema.parse import decode as decode
from worker.errors import RequestError

MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_SEQUENCES = 16  # n
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CACHE_SALT_CHARS = 128
MAX_REQUEST_ID_CHARS = 128
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_DOCUMENTS = 1024
MAX_PROMPT_LOGPROBS = 1 << 20  # in one answer, which is some 70 MiB

# Not of `Whole`, which costs a call an element: there may be as many as a body holds. `params`
# checks how many there are, then what they are.
TokenIds = Annotated[
    list[int | float], msgspec.Meta(extra_json_schema={"items": {"type": "integer"}})
]

# field → the values besides null that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
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
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "chat_template": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "skip_reading_prefix_cache": (False,),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "thinking_token_budget": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; false is all we do


class RepetitionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`repetition_detection`: see `types.RepetitionDetection`."""

    max_pattern_size: Whole
    min_pattern_size: Whole | None = None  # 1
    min_count: Whole | None = None  # 2


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are drawn, and when a sequence ends. Every field may be null: its default."""

    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Whole | None = None
    logprob_token_ids: TokenIds | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    repetition_detection: RepetitionFields | None = None
    skip_special_tokens: bool | None = None
    # Our text is the exact bytes of the tokens, which has no such spaces to add or leave out.
    spaces_between_special_tokens: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """What chat and text completions share.

    The fields typed `Any` are those of `NEUTRAL`, and a few that carry no instruction for the
    answer (`user`, `metadata`, …).
    """

    model: str | None = None
    echo: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Whole | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: Whole | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    user: str | None = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    session_id: Any = None

    best_of: Any = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_offsets: bool | None = None  # of the render routes
    service_tier: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text parts are supported. Open, so that the error for
    an image names its type rather than its fields.
    """

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. The `Any` fields are what servers put into assistant turns that clients send back;
    only null or empty ones are taken, but for `annotations`, which say nothing to the model.
    """

    role: str
    content: str | list[ContentPart] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    return_prompt_text: bool | None = None
    verbosity: Any = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
    chat_template: str | None = None
    include_reasoning: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Any = None


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: Whole | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


_Generation = TypeVar("_Generation", bound=GenerationFields)


def decode_generation(body: bytes, kind: type[_Generation]) -> _Generation:
    """`decode`, then refuse every field that is known but not built yet."""
    request = decode(body, kind)
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    return request


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Refuse (400) a known field with a value that asks for something which is not built."""
    for name in request.__struct_fields__:
        neutral = NEUTRAL.get(name)
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
