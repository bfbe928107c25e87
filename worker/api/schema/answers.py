"""The shapes of answers, for the OpenAPI document. Answers on the hot path are not built from
these, but a test holds every answer to its shape here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[0, 1, 2]
WakeTag = Literal["weights", "kv_cache"]
ConfigFormat = Literal["text", "json"]
_Finish = Literal["stop", "length", "abort", "repetition", "error"]
_Object = dict[str, Any]


class ErrorDetail(msgspec.Struct):
    """What was wrong; `code` is the HTTP status, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: int


class Error(msgspec.Struct):
    """OpenAI's error envelope."""

    error: ErrorDetail


class Unauthorized(msgspec.Struct):
    """The 401, as vLLM words it."""

    error: Literal["Unauthorized"]


class PromptDetails(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: Count


class Usage(msgspec.Struct):
    """Token counts; every prompt counts once."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: _Object | None = None


class ChatMessageOut(msgspec.Struct):
    """The assistant's turn."""

    role: str
    content: str
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: None


class ChatChoice(msgspec.Struct):
    """One answer to a conversation."""

    index: Count
    message: ChatMessageOut
    logprobs: _Object | None
    finish_reason: _Finish
    stop_reason: str | int | None
    token_ids: list[Count] | None


class ChatCompletion(msgspec.Struct):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: list[_Object | None] | None
    prompt_token_ids: list[Count] | None
    prompt_text: str | None


class TextChoice(msgspec.Struct):
    """One continuation."""

    index: Count
    text: str
    logprobs: _Object | None
    finish_reason: _Finish
    stop_reason: str | int | None
    token_ids: list[Count] | None
    prompt_logprobs: list[_Object | None] | None
    prompt_token_ids: list[Count] | None


class TextCompletion(msgspec.Struct):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[TextChoice]
    system_fingerprint: str | None
    usage: Usage


class TokenChoice(msgspec.Struct):
    """One continuation, in token ids; with `text` when `output_mode` is "text"."""

    index: Count
    token_ids: list[Count]
    logprobs: _Object | None
    finish_reason: _Finish
    stop_reason: str | int | None
    text: str | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct):
    """Answer of `/inference/v1/generate`."""

    request_id: str
    model: str
    created: Count
    choices: list[TokenChoice]
    usage: Usage
    prompt_logprobs: list[_Object | None] | None
    output_mode: Literal["tokens", "text"]


class Rendered(msgspec.Struct):
    """What a request asks of the engine; `/inference/v1/generate` takes it as it is."""

    request_id: str
    token_ids: list[Count]
    token_offsets: list[Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)]] | None
    features: None
    content_parts: None
    sampling_params: _Object
    model: str
    stream: bool
    stream_options: _Object | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None
    output_mode: Literal["tokens"]
    return_token_ids: bool | None


class Tokenized(msgspec.Struct):
    """Answer of `/tokenize`."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Answer of `/tokenizer_info`."""

    tokenizer_class: str
    vocab_size: Count
    model_max_length: Count
    special_tokens: dict[str, Count]
    chat_template: str | None


class Version(msgspec.Struct):
    """Answer of `/version`."""

    version: str


class Load(msgspec.Struct):
    """Answer of `/load`."""

    server_load: Count


class ModelCard(msgspec.Struct):
    """One served name."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count
    permission: list[_Object]


class ModelList(msgspec.Struct):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class KvEventSource(msgspec.Struct):
    """A publisher of KV events, as `--kv-events-config` has it."""

    enable_kv_cache_events: bool
    publisher: str | None
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: Count
    hwm: Count
    max_queue_size: Count
    topic: str


class Success(msgspec.Struct):
    """Answer of `/reset_prefix_cache`."""

    success: bool


class Status(msgspec.Struct):
    """Answer of `/pause` and `/resume`."""

    status: Literal["paused", "resumed"]


class IsPaused(msgspec.Struct):
    """Answer of `/is_paused`."""

    is_paused: bool


class Sleeping(msgspec.Struct):
    """Answer of `/sleep`."""

    status: Literal["sleeping"]
    level: SleepLevel


class Awake(msgspec.Struct):
    """Answer of `/wake_up`."""

    status: Literal["awake", "sleeping"]
    tags: list[WakeTag] | None


class IsSleeping(msgspec.Struct):
    """Answer of `/is_sleeping`."""

    is_sleeping: bool


class ServerInfo(msgspec.Struct):
    """Answer of `/server_info`: `vllm_config` is text, or an object with `config_format=json`."""

    version: str
    vllm_config: str | _Object


class DumpedBlock(msgspec.Struct):
    """One full block of the prefix cache; hashes are hexadecimal, as KV events name them."""

    block_hash: str
    parent_block_hash: str | None
    token_ids: list[Count]
    cache_salt: str | None


class CacheDump(msgspec.Struct):
    """Answer of `/kv_events/dump`. What it tells includes every batch of KV events up to
    `event_sequence` (null: none has been sent).
    """

    block_size: Count
    event_sequence: int | None
    blocks: list[DumpedBlock]
