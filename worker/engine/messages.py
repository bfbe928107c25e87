"""What crosses between the HTTP process and the engine process: msgpack arrays, tagged by kind,
never pickle.
"""

from __future__ import annotations

import msgspec

from worker.types import FinishReason, SamplingParams


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Admit a request. `arrival_seconds` is on the sender's monotonic clock (same machine, same
    clock).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_seconds: float
    priority: int = 0
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these requests; unknown ids are ignored (they ended already)."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine process at once; whatever still runs is aborted."""


ToEngine = AddRequest | AbortRequests | Shutdown


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once, when the model is loaded and the KV cache allocated."""

    num_blocks: int
    block_size: int
    max_model_len: int
    startup_seconds: float


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Sent instead of `EngineReady` when start-up fails; `message` is meant for the user."""

    message: str


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request since its last output; the last one carries `finish_reason`.

    `stop_token_id` is the token that ended it, when one did (it is also the last of `token_ids`).
    `num_cached_tokens` counts prompt tokens served from the prefix cache at first admission.
    The three times are on the engine's monotonic clock; None until they have happened.
    `error` says why, for the user, when `finish_reason` is `ERROR`.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    num_preemptions: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges of the moment and counters since start; the source of `/metrics`."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything one engine step has to tell, in one message. `num_scheduled_tokens` is 0 for an
    idle notice.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    num_scheduled_tokens: int = 0


FromEngine = EngineReady | EngineFailed | StepOutputs
