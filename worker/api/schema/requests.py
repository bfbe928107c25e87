"""The bodies of OpenAI's API, as this worker takes them. Pure.

An unsupported field that would change the answer is refused; the server warns of one that would not
(`hint`), or that the API does not have, and leaves it out. Ranges are checked in `params`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from worker.api.schema.parse import Whole, hint

MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_SEQUENCES = 16  # n, and beams
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CACHE_SALT_CHARS = 128
MAX_REQUEST_ID_CHARS = 128
MAX_ABORTED_IDS = 1024
MAX_ADAPTER_CHARS = 4096  # of a name, or of a path
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_DOCUMENTS = 1024
MAX_GRAMMAR_BYTES = 1 << 16  # of a schema, a regular expression, a grammar, choices
MAX_CHOICES = 4096
MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20  # all of them together, as JSON
MAX_TOOL_CALLS = 512  # of one message
MAX_XARGS_BYTES = 1 << 16  # as JSON
MAX_PROMPT_LOGPROBS = 1 << 20  # in one answer, which is some 70 MiB

TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
TOOL_CHOICES = ["none", "auto", "required"]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# field → (default, least, most)
RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0.0, 2.0),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
}


def says(**keywords: object) -> Meta:
    """Return keywords of JSON Schema that msgspec does not check but `params` and others do."""
    return Meta(extra_json_schema=keywords)


def only(*neutral: object) -> Meta:
    """Mark a field that is not supported; null and these values ask for nothing, and pass."""
    # The fix also keeps `only(1)` and `only(True)` apart: `Annotated` caches what compares equal.
    values = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    fix = f"leave it out or send {values}" if values else "leave it out"
    return Meta(extra_json_schema={"enum": [None, *neutral]}, extra={"only": neutral, "fix": fix})


def ranged(name: str) -> Meta:
    _, least, most = RANGES[name]
    return says(minimum=least, maximum=most)


# Not of `Whole`, which costs a call an element: a body may hold millions. `params` checks their
# number first, then each.
TokenId = Annotated[int, says(minimum=0)]
TokenIds = list[Annotated[int | float, says(minimum=0)]]


CacheSalt = Annotated[
    str | None, says(minLength=1, maxLength=MAX_CACHE_SALT_CHARS, pattern=r"^[^@/\\\u0000]*$")
]
RequestId = Annotated[str | None, says(minLength=1, maxLength=MAX_REQUEST_ID_CHARS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, hint(False)] = None  # by padding


class RepetitionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`repetition_detection`: ends an answer that repeats a pattern of tokens."""

    max_pattern_size: Whole
    min_pattern_size: Whole | None = None  # 1
    min_count: Whole | None = None  # 2


class _Format(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"): ...


class TextFormat(_Format, tag="text"):
    """`response_format` without a constraint."""


class JsonObjectFormat(_Format, tag="json_object"):
    """`response_format`: any JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema. It is always enforced to the letter, whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema"):
    """`response_format`: JSON that validates against a schema."""

    json_schema: NamedSchema


class TagStructure(msgspec.Struct, forbid_unknown_fields=True):
    """The text after a trigger: `begin` (which starts with it), JSON of `schema`, `end`."""

    begin: str
    schema: dict[str, Any]
    end: str


class StructuralTagFormat(_Format, tag="structural_tag"):
    """`response_format`: text with JSON of a schema after each of the `triggers`."""

    structures: Annotated[list[TagStructure], says(minItems=1)]
    triggers: Annotated[list[str], says(minItems=1)]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs`: exactly one of the first six. `json` may be JSON in a string,
    `structural_tag` is the `response_format` of that name in a string, `grammar` is GBNF or Lark.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, says(minItems=1, maxItems=MAX_CHOICES)] = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[bool | None, only(False)] = None


class DrawFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a draw that have the same names in several APIs; null: the default."""

    temperature: Annotated[float | None, ranged("temperature")] = None
    top_p: Annotated[float | None, says(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Whole | None, says(minimum=-1)] = None
    min_p: Annotated[float | None, ranged("min_p")] = None
    presence_penalty: Annotated[float | None, ranged("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, ranged("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, says(exclusiveMinimum=0)] = None
    ignore_eos: bool | None = None


class SamplingFields(DrawFields, kw_only=True):
    """The fields that control the drawing of tokens and the end of a sequence."""

    max_tokens: Annotated[Whole | None, says(minimum=0)] = None
    min_tokens: Annotated[Whole | None, says(minimum=0)] = None
    n: Annotated[Whole | None, says(minimum=1, maximum=MAX_SEQUENCES)] = None
    logit_bias: Annotated[dict[str, float] | None, says(maxProperties=MAX_LOGIT_BIASES)] = None
    bad_words: Annotated[list[str] | None, says(maxItems=MAX_BAD_WORDS)] = None
    allowed_token_ids: Annotated[TokenIds | None, says(minItems=1)] = None
    seed: Whole | None = None
    stop: Annotated[
        str | list[Annotated[str, says(minLength=1)]] | None,
        says(minLength=1, maxItems=MAX_STOP_STRINGS),
    ] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[Whole | None, says(minimum=-1)] = None
    logprob_token_ids: Annotated[TokenIds | None, says(maxItems=MAX_LOGPROB_TOKEN_IDS)] = None
    use_beam_search: bool | None = None
    best_of: Annotated[Whole | None, says(minimum=1, maximum=MAX_SEQUENCES)] = None  # beams
    length_penalty: Annotated[
        float | None, says(minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY)
    ] = None
    early_stopping: bool | Literal["never"] | None = None
    repetition_detection: RepetitionFields | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    # Our text is the exact bytes of the tokens, which has no such spaces to add or leave out.
    spaces_between_special_tokens: bool | None = None


class KvPeerFields(msgspec.Struct, kw_only=True):
    """An engine whose caches may have KV of the request, as llm-d names it."""

    remote_host: str | None = None
    remote_port: Whole | None = None
    kv_request_id: str | None = None


class ResumeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`resume`. Empty, it asks for the response header `x-pointsman-resume`, which holds an object,
    and for comments with the ids of the stream's tokens. That object, sent here with `token_ids`,
    makes the stream continue after these; without them it begins anew, under the same id.
    """

    id: str | None = None
    created: Whole | None = None
    seed: Whole | None = None
    prompt: Whole | None = None  # a checksum of its tokens
    token_ids: list[TokenId] | None = None
    kv: KvPeerFields | None = None  # whose caches may have KV of the answer so far


class GenerationFields(SamplingFields, kw_only=True):
    """The fields that chats and text completions share."""

    model: str | None = None
    echo: bool | None = None
    truncate_prompt_tokens: Annotated[Whole | None, says(minimum=-1)] = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[Whole | None, says(minimum=1)] = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    priority: Whole | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    resume: ResumeFields | None = None

    user: Annotated[str | None, hint()] = None
    metadata: Annotated[Any, hint({})] = None
    safety_identifier: Annotated[Any, hint()] = None
    prompt_cache_key: Annotated[Any, hint()] = None
    prompt_cache_retention: Annotated[Any, hint()] = None
    prompt_cache_options: Annotated[Any, hint({})] = None
    session_id: Annotated[Any, hint()] = None
    service_tier: Annotated[Any, hint("auto", "default")] = None

    response_format: (
        TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | None
    ) = None
    # Older names of what `structured_outputs` has.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, says(minItems=1, maxItems=MAX_CHOICES)] = None
    guided_grammar: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # SGLang's: both workers have the same body, and find each other in the room.
    bootstrap_host: str | None = None
    bootstrap_port: Whole | None = None
    bootstrap_room: Whole | None = None
    ec_transfer_params: Annotated[dict[str, Any] | None, hint({})] = None  # of images
    vllm_xargs: dict[str, Any] | None = None  # arguments of logits processors
    # Only the render routes take it; the others refuse it.
    return_token_offsets: Annotated[bool | None, Meta(extra=only(False).extra)] = None


class ContentPart(msgspec.Struct):
    """One part of a message's content. Unknown fields pass, so that an error can name its type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, says(pattern=TOOL_NAME)]
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of `tools`: a function of the client."""

    type: Annotated[str, says(enum=["function"])] = "function"
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Part of `NamedTool`: the function to call."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A `tool_choice` that names the function to call."""

    type: Annotated[str, says(enum=["function"])] = "function"
    function: FunctionName


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Part of `SentCall`. `arguments` are JSON as the model wrote it, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class SentCall(msgspec.Struct, forbid_unknown_fields=True):
    """One tool call of an earlier answer. Clients that collected it from a stream keep `index`."""

    function: CalledFunction
    id: str | None = None
    type: Annotated[str | None, says(enum=["function", None])] = None
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. Clients send the `Any` fields back in assistant turns; these must be null or empty,
    except for those that mean nothing to the model, `annotations` and `provider_specific_fields`.
    """

    role: Annotated[str, says(enum=sorted(ROLES))]
    content: str | list[str | ContentPart] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: Annotated[list[SentCall] | None, says(maxItems=MAX_TOOL_CALLS)] = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, only([], {})] = None
    refusal: str | None = None
    annotations: Any = None
    provider_specific_fields: Any = None
    audio: Annotated[Any, only([], {})] = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], says(minItems=1, maxItems=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Whole | None, says(minimum=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole | None, says(minimum=-1)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]] | None, says(maxItems=MAX_DOCUMENTS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    return_prompt_text: bool | None = None
    verbosity: Annotated[Any, hint("medium")] = None

    tools: Annotated[list[Tool] | None, says(maxItems=MAX_TOOLS)] = None
    tool_choice: Annotated[str, says(enum=TOOL_CHOICES)] | NamedTool | None = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, hint()] = None
    web_search_options: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    store: Annotated[Any, hint(False)] = None
    chat_template: Annotated[str | None, only()] = None
    include_reasoning: bool | None = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, hint({})] = None
    thinking_token_budget: Annotated[Any, only()] = None


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[str | list[str | int | list[int]], says(minItems=1)]
    logprobs: Annotated[Whole | None, says(minimum=-1)] = None
    suffix: Annotated[Any, only("")] = None
    prompt_embeds: Annotated[Any, only()] = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, says(minItems=1, maxItems=MAX_MESSAGES)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    documents: Annotated[list[dict[str, Any]] | None, says(maxItems=MAX_DOCUMENTS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool] | None, says(maxItems=MAX_TOOLS)] = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params`: vLLM's flat `SamplingParams`; its internals have no meaning here."""

    logprobs: Annotated[Whole | None, says(minimum=-1)] = None
    truncate_prompt_tokens: Annotated[Whole | None, says(minimum=-1)] = None
    extra_args: dict[str, Any] | None = None  # `vllm_xargs`
    thinking_token_budget: Annotated[Any, only()] = None
    skip_reading_prefix_cache: Annotated[Any, hint(False)] = None

    detokenize: bool | None = None
    flat_logprobs: bool | None = None
    skip_clone: bool | None = None
    output_kind: Any = None
    output_text_buffer_length: Any = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/generate`. The answer of a render route is such a body."""

    token_ids: list[TokenId]
    sampling_params: TokenSampling | None = None
    model: str | None = None
    request_id: RequestId = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt = None
    priority: Whole | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    token_offsets: list[list[int]] | None = None
    content_parts: Annotated[Any, only({}, [])] = None
    features: Annotated[Any, only({}, [])] = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: Whole | None = None
    bootstrap_room: Whole | None = None
    ec_transfer_params: Annotated[Any, hint({}, [])] = None


def fields_shared(source: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        name: value
        for name in kind.__struct_fields__
        if (value := getattr(source, name, None)) is not None
    }


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)]
    lora_path: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)]
    load_inplace: bool | None = None
    is_3d_lora_weight: Annotated[Any, only(False)] = None


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`; vLLM's `lora_int_id` has no meaning here."""

    lora_name: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)]
    lora_int_id: int | None = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/abort_requests`."""

    request_ids: Annotated[list[str], Meta(max_length=MAX_ABORTED_IDS)]
