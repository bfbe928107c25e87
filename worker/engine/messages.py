"""Messages between the HTTP process and the engine process: msgpack arrays, tagged by kind."""

from typing import Any

import msgspec

from worker.types import (
    Adapter,
    EngineStats,
    FinishReason,
    KvOffer,
    KvPeer,
    KvSource,
    Pooling,
    SamplingParams,
    TokenLogprobs,
)


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Admit a request. `arrival_seconds` is on the machine's monotonic clock.

    `branch_ids` names further sequences that continue the same prompt: the prompt is run once, then
    `request_id` draws with the seed of `params` and branch i with that seed + 1 + i. Each has its
    own outputs and is aborted by its own id. Cached blocks count for `tenant`; its text is used for
    drafts of that tenant's requests of the same `cache_salt` alone, so two clients must not be able
    to pass for one tenant.

    With `pooling` the prompt is embedded: one output has `pooled`, and no token is drawn. The
    prompt's KV may come from `kv_source`, or from the caches of `kv_peer`. With `keeps_kv` it is
    exported for another engine when the answer has ended: as `kv_name`, or (None) under a name that
    is reported with the answer. `output_token_ids` is the beginning of the answer, drawn by another
    engine; it counts as drawn here but is not in the outputs. Not possible with branches.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_seconds: float
    priority: int = 0
    cache_salt: str | None = None
    branch_ids: list[str] = []
    tenant: str = ""
    adapter: Adapter | None = None  # None: the model alone
    pooling: Pooling | None = None
    kv_source: KvSource | None = None
    keeps_kv: bool = False
    kv_name: str | None = None
    output_token_ids: list[int] = []
    kv_peer: KvPeer | None = None


class Vocabulary(msgspec.Struct, frozen=True, array_like=True, tag="vocabulary"):
    """The bytes of each token of the model (empty: none); sent once, before any request with a
    grammar. Control tokens are `special_ids`: their bytes are not text. `eos_token_ids` is not
    empty.
    """

    token_bytes: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these sequences, if known. With `hands_over` another engine will ask for their KV."""

    request_ids: list[str]
    hands_over: bool = False


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine process at once; whatever still runs is aborted."""


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget all cached contents; with `reset_running` preempt running sequences first. Without
    that, the command is refused while any sequence holds blocks.
    """

    command_id: int
    reset_running: bool = False


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Stop scheduling. `mode` "abort" ends what is in flight, "wait" lets it finish, "keep" freezes
    it. Answered when that state is reached.
    """

    command_id: int
    mode: str = "abort"


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    command_id: int


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """`Pause`, then give memory back: at level 0 none; at level 1 the KV cache, and the weights
    move to the host (if the device is not the host); at level 2 both. From level 1 on, the prefix
    cache is reset.
    """

    command_id: int
    level: int = 1
    mode: str = "abort"


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """Undo `Sleep`: `tags` of "weights" and "kv_cache", or None for both. Scheduling resumes when
    nothing is missing any more.
    """

    command_id: int
    tags: list[str] | None = None


class DumpCache(msgspec.Struct, frozen=True, array_like=True, tag="dump"):
    command_id: int


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """Change the executor's settings from the next step on, all or none; only the simulator takes
    any (see `SimExecutor.configure`). Answered at once.
    """

    command_id: int
    settings: dict[str, Any]


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Read an adapter into the host's memory; answered when it is there, or cannot be used."""

    command_id: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Give up the memory of an adapter as soon as no request uses it. Answered at once."""

    command_id: int
    adapter: Adapter


Setting = Configure | LoadAdapter | UnloadAdapter
Command = ResetPrefixCache | Pause | Resume | Sleep | WakeUp | DumpCache | Setting
ToEngine = AddRequest | AbortRequests | Vocabulary | Shutdown | Command


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    num_blocks: int
    block_size: int
    max_model_len: int
    startup_seconds: float
    kv_port: int | None = None  # None: KV stays here


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Start-up failed, or the engine ends because of an error; `message` is for the user."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The engine process is alive: sent several times a second by a thread of its own.
    `stalled_seconds` is how long the current step has run beyond `budget_seconds`. `sent_seconds`
    is the machine's monotonic clock, which the reader shares: it may have been delayed.
    """

    stalled_seconds: float = 0.0
    budget_seconds: float = 0.0
    sent_seconds: float = 0.0


class CachedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One full cached block, by whole digests; `parent` is None for the first of a chain."""

    block_hash: bytes
    parent: bytes | None
    token_ids: list[int]
    cache_salt: str | None = None
    lora_name: str | None = None


class CommandReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The answer to a `Command`. `error` says why `ok` is False, for the user. `event_sequence` is
    the number of the last batch of KV events sent before a dump.
    """

    command_id: int
    ok: bool = True
    error: str | None = None
    blocks: list[CachedBlock] = []
    event_sequence: int | None = None


class SpeculationFigures(msgspec.Struct, frozen=True, array_like=True):
    """The figures of speculation for one answer so far. `accepted_histogram[i]` counts the steps
    with drafts of which exactly i were accepted, up to the most drafts that a step verifies.
    """

    num_steps: int  # with drafts
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_histogram: list[int]


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence since its last output; the last one carries `finish_reason`.

    `stop_token_id` is the token that ended the sequence, also the last of `token_ids`.
    `num_cached_tokens` counts prompt tokens served from the prefix cache at first admission. All
    times are on the engine's monotonic clock, None until the event. `error` gives the user
    the reason if `finish_reason` is `ERROR`, or `ABORT` without a request for it. `logprobs` has
    one entry for each of `token_ids` if the request asks for them. `prompt_logprobs` comes with
    the outputs up to the first token, in order, one entry for each prompt token but the first, once
    per request: branches repeat none. `num_steps` is more than one only if a lagging consumer
    gets several as one. `pooled` [hidden_size] is the embedding of a prompt, before it is cut or
    normalised; it comes with `finish_reason`, as does `kv_offer` for a request that `keeps_kv`.
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
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    speculation: SpeculationFigures | None = None  # once there were any drafts
    num_steps: int = 1
    pooled: list[float] = []
    kv_offer: KvOffer | None = None
    kv_arrived_seconds: float | None = None


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The report of one engine step. `num_scheduled_tokens` is 0 for an idle notice."""

    outputs: list[RequestOutput]
    stats: EngineStats
    num_scheduled_tokens: int = 0


FromEngine = EngineReady | EngineFailed | StepOutputs | Heartbeat | CommandReply
