"""The types of answers, which handlers encode and the OpenAPI document describes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from worker.types import FinishReason

Count = Annotated[int, Meta(ge=0)]
Counts = Sequence[Count]
PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[0, 1, 2]
WakeTag = Literal["weights", "kv_cache"]
ConfigFormat = Literal["text", "json"]
# Encoded beforehand, or plain values.
JsonObject = Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})]
JsonArray = Annotated[Any, Meta(extra_json_schema={"type": ["array", "null"]})]
TOOL_CALLS_ENDED = "tool_calls"  # the reason of an answer that stopped after calls
_Finish = Annotated[
    str,
    Meta(
        extra_json_schema={
            "enum": sorted({TOOL_CALLS_ENDED, *(reason.value for reason in FinishReason)})
        }
    ),
]


class PromptDetails(msgspec.Struct):
    """Part of `Usage`: the number of prompt tokens that came from a cache."""

    cached_tokens: Count


class Usage(msgspec.Struct):
    """Token counts; every prompt counts once. Frames leave out fields that are null in bodies."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: PromptDetails | UnsetType | None = UNSET
    completion_tokens_details: UnsetType | None = UNSET


class FunctionOut(msgspec.Struct):
    """Part of `ToolCallOut`. The arguments are JSON of an object, unless the answer was cut."""

    name: str
    arguments: str


class ToolCallOut(msgspec.Struct):
    """One call of a tool."""

    id: str
    function: FunctionOut
    type: Literal["function"] = "function"


class ChatMessageOut(msgspec.Struct):
    """The assistant's turn; `content` is null if there are only calls or reasoning."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a conversation."""

    index: Count
    message: ChatMessageOut
    logprobs: JsonObject
    finish_reason: _Finish
    stop_reason: str | int | None
    token_ids: Counts | None
    routed_experts: None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/chat/completions`, not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: JsonArray
    prompt_token_ids: Counts | None
    prompt_text: str | None
    kv_transfer_params: JsonObject = None
    ec_transfer_params: None = None
    metrics: JsonObject


class TextChoice(msgspec.Struct, kw_only=True):
    """One continuation of a prompt."""

    index: Count
    text: str
    logprobs: JsonObject
    finish_reason: _Finish
    stop_reason: str | int | None
    token_ids: Counts | None
    prompt_logprobs: JsonArray
    prompt_token_ids: Counts | None
    routed_experts: None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/completions`, not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    choices: list[TextChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: JsonObject = None
    ec_transfer_params: None = None
    metrics: JsonObject


class TokenChoice(msgspec.Struct):
    """One continuation, in token ids; in a frame, `finish_reason` is null until the last one."""

    index: Count
    token_ids: Counts
    logprobs: JsonObject
    finish_reason: _Finish | None
    stop_reason: str | int | None
    text: str | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """Answer of `/inference/v1/generate`, in token ids."""

    request_id: str
    model: str
    created: Count
    choices: list[TokenChoice]
    usage: Usage
    prompt_logprobs: JsonArray
    kv_transfer_params: JsonObject = None
    ec_transfer_params: None = None
    output_mode: Literal["tokens", "text"]
    metrics: JsonObject


class Tokenized(msgspec.Struct):
    """Answer of `/tokenize`: token ids."""

    count: Count
    max_model_len: Count
    tokens: Counts
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Answer of `/detokenize`: a text."""

    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Answer of `/tokenizer_info`: facts for clients that tokenize themselves."""

    tokenizer_class: str
    vocab_size: Count
    model_max_length: Count
    special_tokens: dict[str, Count]
    chat_template: str | None


class Version(msgspec.Struct):
    """Answer of `/version`: the version of this package."""

    version: str


class Load(msgspec.Struct):
    """Answer of `/load`: the number of sequences being served."""

    server_load: Count


class ModelPermission(msgspec.Struct):
    """Part of `ModelCard`: fields that OpenAI's API once had and that clients may still read."""

    id: str
    object: Literal["model_permission"]
    created: Count
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name; `parent` is the model that an adapter belongs to."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "vllm"  # what clients of these series of servers expect
    root: str
    parent: str | None = None
    max_model_len: Count
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    """Answer of `/v1/models`: the model's names, then its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class KvEventSource(msgspec.Struct):
    """A publisher of KV events: the settings that `--kv-events-config` shares with vLLM's."""

    enable_kv_cache_events: bool
    publisher: str | None
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: Count
    hwm: Count
    max_queue_size: Count
    topic: str


class Success(msgspec.Struct):
    """Answer of `/reset_prefix_cache`: false while blocks are in use."""

    success: bool


class Status(msgspec.Struct):
    """Answer of `/pause`, `/resume` and `/healthz`."""

    status: Literal["paused", "resumed", "ok"]


class IsPaused(msgspec.Struct):
    """Answer of `/is_paused`: whether scheduling is stopped."""

    is_paused: bool


class Sleeping(msgspec.Struct):
    """Answer of `/sleep`, once the memory has been released."""

    status: Literal["sleeping"]
    level: SleepLevel


class Awake(msgspec.Struct):
    """Answer of `/wake_up`: still asleep if it was asked to wake only a part."""

    status: Literal["awake", "sleeping"]
    tags: list[WakeTag] | None


class IsSleeping(msgspec.Struct):
    """Answer of `/is_sleeping`: whether memory has been released."""

    is_sleeping: bool


class ServerInfo(msgspec.Struct):
    """Answer of `/server_info`: `vllm_config` is text, or an object with `config_format=json`."""

    version: str
    vllm_config: str | dict[str, Any]


class DumpedBlock(msgspec.Struct):
    """One full block of the prefix cache; its hashes are those of KV events, in hexadecimal."""

    block_hash: str
    parent_block_hash: str | None
    token_ids: Counts
    cache_salt: str | None
    lora_name: str | None


class CacheDump(msgspec.Struct):
    """Answer of `/kv_events/dump`, with every batch of KV events up to `event_sequence`, if any."""

    block_size: Count
    event_sequence: int | None
    blocks: list[DumpedBlock]
