"""The values that all rooms of the worker share: plain ints and tuples; no torch, I/O or clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec


class FinishReason(Enum):
    """Why a sequence ended; the value is the OpenAI `finish_reason` and the metric label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Pooling(Enum):
    """The hidden states of a prompt that become its embedding: the last one, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests may choose by its `name`, read from the directory `path`.
    `number` is unique among all that a worker ever loads. `version` counts earlier loads of the
    same name and path, which may have had other weights. `digest` covers its files.
    """

    name: str
    path: str
    number: int
    version: int = 0
    digest: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key in block hashes: vLLM's own key, until the same path is loaded again."""
        return ("lora", self.name, f"{self.path}#{self.version}" if self.version else self.path)


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends a sequence whose tail is one pattern of `min_pattern_size` to `max_pattern_size` tokens,
    repeated at least `min_count` times.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search with `width` beams, ranked by log probability over length ** `length_penalty`.
    `engine.beams` explains `early_stopping`. `num_shown` is `logprobs` as the client asked.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] | None = None
    num_shown: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The checked sampling parameters of a request: the API validates them, the engine trusts them.

    `temperature` 0 is greedy. `seed` is always set, so that the engine itself owns no randomness.
    Stop strings stay in the API process, which detokenizes. `logit_bias` pairs (token id, bias) are
    added to the logits. A token that would complete one of the `bad_words` (token sequences) cannot
    be drawn; `allowed_token_ids` None allows all. `grammar` is what the output must match, as
    `engine.grammar` compiles it. `logprobs` N asks for the log probabilities of the drawn token and
    of the N likeliest (None: none at all; -1: the whole vocabulary), `logprob_token_ids` for those
    of fixed tokens too; `prompt_logprobs` the same for each prompt token after the first.
    `logits_processors` pairs names of logits processors and their arguments as JSON. With `beam`
    nothing is drawn: the answers are the best that a beam search finds.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    logits_processors: tuple[tuple[str, str], ...] = ()
    beam: BeamParams | None = None

    @property
    def needs_history(self) -> bool:
        """True if a draw depends on earlier tokens other than through the model."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.logits_processors
        )


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Asks the executor for the next token after the last position of a chunk.

    The random numbers of a draw are a pure function of (`params.seed`, `position`, purpose), so
    that the same request gives the same tokens in any batch, chunking or after preemption.
    `position` is the index of the token being drawn. `banned_ids` cannot be drawn. `num_prompt` of
    the tokens before `position` are the prompt. `history` is every token before `position`, given
    only when `params.needs_history`.

    With `masks`, only tokens of the first mask can be drawn: token t if bit t % 8 of byte t // 8 is
    set. Mask i applies to the token after i drafts. The masks end at the first draft that its own
    mask excludes: later draws are discarded.
    """

    params: SamplingParams
    position: int
    banned_ids: tuple[int, ...] = ()
    history: Sequence[int] = ()
    num_prompt: int = 0
    masks: Sequence[bytes] = ()

    def after(self, drafts: Sequence[int]) -> SampleSpec:
        """Return the spec of the token after `drafts`, as if these had been drawn."""
        if not drafts:
            return self
        position = self.position + len(drafts)
        bans = position - self.num_prompt < self.params.min_tokens
        return SampleSpec(
            self.params,
            position,
            self.banned_ids if bans else (),
            [*self.history, *drafts] if self.params.needs_history else (),
            self.num_prompt,
            self.masks[len(drafts) :],
        )


class BlockTable(tuple[int, ...]):
    """A copy of a sequence's block table: the same object in every step until the table changes.
    Its first `num_same` blocks are those of `before`, the copy that was made before it. `before` is
    None when a later copy exists: its reader compares the tables.
    """

    before: BlockTable | None = None
    num_same = 0


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: run `token_ids` at positions `start`, `start`+1, …

    The KV of position p is in block `block_table[p // block_size]`, slot `p % block_size`; every
    position below `start` has its KV there already. `samples` asks for one draw each from the
    logits after the last token (several for a request with n > 1, at its first token); it is empty
    for a chunk that does not reach the sequence's last token. With `takes_pending` the token that
    the step before this one draws follows `token_ids`; the pipeline fills it in before executors
    see it.

    `prompt_targets` asks for the log probabilities of prompt tokens: of the token
    `prompt_targets[i]` after position `start` + i, with `num_prompt_logprobs` of the likeliest.

    The last `num_drafts` of `token_ids` are drafts, after exactly one token that is known, to be
    verified in this step. `samples` then holds the one spec of the token after the known one (those
    of the later rows: `SampleSpec.after`), and the result has a run of draws: the accepted drafts,
    and one token more. The KV of rejected drafts is overwritten later. `num_to_draft` asks the
    executor's own drafter for up to this number of drafts of the tokens after this step's draws,
    for which the block table has room.

    With `limit` it follows a step whose drafts were not verified when it was scheduled: `start`,
    and the positions of `samples`, are those for the case that none is accepted, and each accepted
    one moves them up by one. All drafts of that step's own drafter at positions below `limit` are
    verified. It has no `token_ids`, and `takes_pending` is the last token drawn.

    `adapter_slot` is the slot of the adapter that all its tokens run with (None: the model alone).
    `num_pooled` asks for the sum of the hidden states of this number of the last `token_ids`.
    """

    seq_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    takes_pending: bool = False
    prompt_targets: Sequence[int] = ()
    num_prompt_logprobs: int = 0
    num_drafts: int = 0
    num_to_draft: int = 0
    adapter_slot: int | None = None
    num_pooled: int = 0
    limit: int = 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.takes_pending


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """The source of the KV of the first `num_tokens` tokens of a prompt, which can be fetched once:
    engine `engine_id` (None: whichever exports it first) at `host`:`port` exports it as
    `transfer_id`.
    """

    host: str
    port: int
    engine_id: str | None
    transfer_id: str
    num_tokens: int


class KvPeer(msgspec.Struct, frozen=True, array_like=True):
    """An engine at `host`:`port` whose caches may hold KV of a request. `promise` names a sequence
    that it handed over; it waits for its fetch before it exits ("": none).
    """

    host: str
    port: int
    promise: str = ""


class KvOffer(msgspec.Struct, frozen=True, array_like=True):
    """KV that an engine exports, until `expires_seconds` (Unix time), computed in `block_ids`."""

    source: KvSource
    block_ids: tuple[int, ...]
    expires_seconds: float


# A memoryview, a tensor of bytes on the device or in pinned memory, or, for peers, `PooledKv`.
KvBytes = Any


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PooledKv:
    """KV in `nbytes` of a device's memory, which other processes open by `handle`, from `start` on.
    Nothing is written there while this exists. `host`, for any thread, copies it to the host.
    """

    handle: bytes
    start: int
    nbytes: int
    host: Callable[[], memoryview]


@dataclass(frozen=True, slots=True)
class KvPart:
    """KV that has arrived, of the tokens `start` to `end` − 1 of a sequence: bytes [tokens, layers,
    2 (K, V), kv_heads, head_dim]. `arrived_seconds` is monotonic; None: from a disk.
    """

    start: int
    end: int
    data: KvBytes
    arrived_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class KvLoad:
    """KV for consecutive tokens from the beginning of the first of `blocks`, as `KvPart` has it: in
    one part, where the last block may be filled in part, or in one for each block. `token_ids` are
    the tokens, for a drafter on the device.
    """

    blocks: tuple[int, ...]
    parts: tuple[KvBytes, ...]
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KvSave:
    """Full blocks, and for each the host memory that takes its KV, as `KvPart` has it."""

    blocks: tuple[int, ...]
    into: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. Of `block_copies` (source, destination) every source is read before any
    destination is written. `adapters` (a slot and the result of `Executor.read_adapter`) are put
    first; `kv_saves` are read before anything is written; `kv_loads` are written after the copies,
    and before anything else.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    adapters: tuple[tuple[int, Any], ...] = ()
    kv_loads: tuple[KvLoad, ...] = ()
    kv_saves: tuple[KvSave, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def follows(self) -> bool:
        """True if positions depend on the drafts that the previous step accepts."""
        return any(s.limit for s in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: first of the token at that position, then of the likeliest
    ones in descending order (ties: the lower id first), then of the fixed ones asked for. `rank` is
    how many tokens are at least as likely as the first. Computed from the raw logits: before bias,
    penalties and temperature.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class Draw(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None


class Drafts(msgspec.Struct, frozen=True, gc=False):
    """Guesses of the next tokens of a sequence whose next token has index `position`.
    `confidences[i]`, in (0, 1], is the drafter's confidence in `token_ids[i]`, given that the
    drafts before it are accepted, on the drafter's own scale (`engine.speculation` calibrates it).
    """

    position: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results of one step, by sequence id.

    `sampled` holds a `Draw` for each `SampleSpec`, in order; for a sequence with drafts, the
    accepted ones and one token more. `prompt_logprobs` holds one entry for each of
    `prompt_targets`. `failed` names sequences that could not be answered (logits that are not
    numbers) and why; they are in none of the others. `drafts` are those of the executor's own
    drafter; they may be missing or fewer than asked for. Drafting took `drafting_seconds` of the
    step's time, and `catch_up_seconds` more went into one-time reading by the drafter (a prompt,
    say). `pooled` holds, for sequences with `num_pooled`, the sum [hidden_size] of hidden states
    after the final norm. With `may_be_followed`, the executor expects no wait if the next step is
    followed by one that verifies its drafts.
    """

    sampled: dict[int, tuple[Draw, ...]]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, Drafts] = field(default_factory=dict)
    drafting_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    pooled: dict[int, list[float]] = field(default_factory=dict)
    may_be_followed: bool = False


class SchedulerCounters(msgspec.Struct, array_like=True):
    """The scheduler's totals since start, in tokens unless the name says otherwise."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_corrupted_requests: int = 0
    num_out_of_memory: int = 0  # steps rolled back for lack of memory
    external_cache_queries: int = 0  # prompt tokens looked up in other engines and in tiers
    external_cache_hits: int = 0  # prompt tokens whose KV was loaded from there
    prompt_tokens_external: int = 0  # the same, of prompts that have run
    prompt_tokens_host: int = 0  # of `prompt_tokens_external`
    prompt_tokens_disk: int = 0


class SpeculationStats(msgspec.Struct, frozen=True, array_like=True):
    """The verification of drafts, by the drafter's owner."""

    num_drafts: int = 0  # sequences' shares of steps that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    num_drafter_failures: int = 0  # a drafter raised, or proposed an invalid token
    # Drafts per decoding sequence in the last step, a gauge; 0 while nothing decodes.
    num_speculative_tokens: float = 0.0


class AdapterStats(msgspec.Struct, frozen=True, array_like=True):
    """Names of the adapters in slots of the device, and of those that requests wait for."""

    loaded: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()


class PullStats(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of waiting sequences whose KV is in flight, and whose KV has arrived."""

    num_fetching: int = 0
    num_fetched: int = 0


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """KV that moved between engines."""

    num_failed: int = 0
    num_expired: int = 0  # exported, but not fetched in time
    bytes_sent: int = 0
    bytes_received: int = 0


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """The tiers of the prefix cache below the device: the host's memory, and the disk."""

    host_blocks: int = 0
    host_usage: float = 0.0  # of its blocks, 0 to 1
    host_bytes_saved: int = 0
    host_bytes_loaded: int = 0
    num_host_saves_skipped: int = 0  # blocks for which there was no room
    disk_blocks: int = 0
    disk_bytes_written: int = 0
    disk_bytes_read: int = 0
    num_disk_failures: int = 0  # files not written, read or deleted, or damaged


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Current gauges and counters since start; the source of `/metrics`. Each nested struct has one
    writer.

    `num_deferred` waiting sequences could run but are held back on purpose. `sleep_level` None:
    awake. The client fills in `num_restarts` and `stalled_seconds`, and adds up the counters of
    engines that died.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_deferred: int = 0
    num_evictions: int = 0
    num_hash_collisions: int = 0
    scheduler: SchedulerCounters = msgspec.field(default_factory=SchedulerCounters)
    speculation: SpeculationStats = SpeculationStats()
    adapters: AdapterStats = AdapterStats()
    pulls: PullStats = PullStats()
    transfers: TransferStats = TransferStats()
    tiers: TierStats = TierStats()
    is_paused: bool = False  # `Pause` or `Sleep` holds
    sleep_level: int | None = None
    num_event_batches_dropped: int = 0
    num_restarts: int = 0
    stalled_seconds: float = 0.0
