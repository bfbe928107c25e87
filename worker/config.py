"""Frozen configuration of a worker. `app` resolves flags into it once; nobody changes it after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: `num_blocks` blocks of `block_size` tokens (a power of two)."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    watermark: float = 0.0  # fraction of blocks kept free when admitting
    # Re-use the matching head of a block whose tail differs, by copying it.
    enable_partial_hits: bool = True
    # Evict from tenants that hold more than an equal share first.
    enable_fair_eviction: bool = True
    hash_algo: str = "sha256"  # one of HASH_ALGOS
    hash_seed: str | None = None  # None: the algorithm's default (see engine.block_hash)
    record_events: bool = False  # keep what changes in the prefix cache for whoever mirrors it
    record_evictions: bool = False  # keep what is evicted for a tier below


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, in tokens and sequences, and the policies.

    `policy` "priority" goes by priority, then arrival; "fcfs" by arrival alone. `waiting_order`
    "lpm" puts the longest cached prefix first within a priority, "fcfs" does not. `victim` is who
    loses its blocks when there are too few: see `engine.policies.VICTIM_POLICIES`. At most
    `max_bypasses` times may others be admitted before a waiting sequence that does not fit yet.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0  # 0: off
    enable_chunked_prefill: bool = True
    policy: str = "priority"
    waiting_order: str = "fcfs"
    victim: str = "recompute-cost"
    max_bypasses: int = 8
    # Hold a request back while another computes at least this much of its prompt; None: never.
    in_batch_prefix_tokens: int | None = 32
    # Room for a whole prompt before its first chunk runs; off admits by the chunk.
    reserve_full_prompt: bool = True


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters of rank `max_lora_rank` or less: of how many different ones a step may have
    sequences, and how many the host's memory keeps.
    """

    max_loras: int = 1
    max_cpu_loras: int = 1
    max_lora_rank: int = 16


@dataclass(frozen=True, slots=True)
class SimConfig:
    """`--engine sim`: how long steps take and what is answered. Seconds and tokens throughout.

    `latency_model` is one of `sim.latency.MODELS`, which documents their formulas; each
    reads only its own fields. `time_scale` multiplies every step; 0 does not wait at all.
    """

    latency_model: str = "linear"
    time_scale: float = 1.0
    seed: int = 0
    # linear: by what a step contains.
    step_overhead_seconds: float = 0.0
    prefill_tokens_per_second: float = 20_000.0
    prefill_context_seconds: float = 0.0  # per prompt token and token of its context
    decode_base_seconds: float = 0.010  # when anything decodes
    decode_per_sequence_seconds: float = 0.0002
    kv_read_seconds: float = 0.0  # per token of a decoding sequence's context
    # constant and llm-d: by the request. A std is at most 30 % of its mean.
    time_to_first_token_seconds: float = 0.0
    time_to_first_token_std_seconds: float = 0.0
    inter_token_latency_seconds: float = 0.0
    inter_token_latency_std_seconds: float = 0.0
    prefill_overhead_seconds: float = 0.0
    prefill_per_token_seconds: float = 0.0
    prefill_std_seconds: float = 0.0
    time_factor_under_load: float = 1.0  # of a full batch
    # dynamo: polynomials; the ratios divide times.
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    # KV from another worker: the first if it is set, else the second.
    kv_transfer_seconds: float = 0.0
    kv_transfer_per_token_seconds: float = 0.0
    # "random" answers with words, "echo" with the prompt.
    mode: str = "random"
    # Answers are drawn from the ids [first_word_id, first_word_id + num_words), so that they are
    # words of whatever tokenizer stands in front.
    first_word_id: int = 256
    num_words: int = 1024
    vocab_size: int = 1282
    # What ends an answer before the request's own limit does; None: only the limit.
    end_token_id: int | None = None
    # The beginning of a turn of a conversation in ChatML; None: an echo is of the whole prompt.
    turn_token_id: int | None = None
    # How long answers are, this token included: one of `sim.tokens.OUTPUT_LENGTHS`.
    output_length: str = "geometric"
    mean_output_tokens: float = 128.0
    output_tokens_std: float = 0.0


SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "eagle")
REJECTION_SAMPLE_METHODS = ("standard", "block")
DRAFT_SAMPLE_METHODS = ("greedy", "gumbel", "probabilistic")
MAX_SPECULATIVE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`--speculative-config`, field names and defaults those of vLLM where it has them.

    `method` is one of SPECULATIVE_METHODS. `num_speculative_tokens` is the most drafts that a step
    verifies of one sequence. `model` is the draft model, or the file of a trained head (None: the
    one that fits the target, shipped or trained before).

    n-gram: prompt lookup of the last `prompt_lookup_min` to `prompt_lookup_max` tokens.
    Suffix: `suffix_decoding_*`, over the sequence itself and recently finished outputs.

    `draft_sample_method` is how a draft model or head chooses when the request samples: its
    likeliest token ("greedy"), the one that the request's own noise would make it draw ("gumbel"),
    or a draw from its own distribution ("probabilistic"). With the first two, output is token for
    token what it is without speculation. `rejection_sample_method` is how drafts are verified that
    were drawn from a distribution.

    `num_speculative_tokens_per_batch_size` holds (first, last, most drafts) by the number of
    sequences that decode; it overrides the adaptive length, which `enable_adaptive_verification`
    turns off for good: then every sequence verifies as many drafts as there are.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    enable_adaptive_verification: bool = True


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """`--kv-events-config`, field names and defaults those of vLLM; `format` "map" or "array" is
    ours. `endpoint` binds when it has `*` or `::` or is ipc or inproc, else it connects.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "map"
    # Name blocks by 64 bits of their hash; False: by the whole hash, as bytes.
    int_block_hashes: bool = True


KV_CONNECTORS = ("TcpConnector", "NixlConnector")
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """`--kv-transfer-config`, field names and defaults those of vLLM where it has them.

    The engine listens on `kv_ip`:`kv_port` (0: a free one), and tells others this address; so it is
    one that they can reach. KV for others is kept for `kv_lease_duration` seconds, and is of
    `kv_buffer_size` bytes at most; as many may be on their way here. A transfer that takes longer
    than `kv_transfer_timeout` seconds is given up. `key_file` has the key that engines share
    (None: that in the environment, see `worker.kv.access`). `backends` are NIXL's.

    Caches of other engines are asked only in `kv_peer_networks` (None: private ones). A worker that
    is named by its HTTP address listens on `kv_peer_port`, or as far from its HTTP port as here.
    """

    kv_connector: str = "TcpConnector"
    kv_role: str = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    engine_id: str = ""
    kv_buffer_size: float = 1e9
    kv_lease_duration: float = 30.0
    kv_transfer_timeout: float = 10.0
    key_file: str | None = None
    backends: tuple[str, ...] = ("UCX",)
    kv_peer_port: int | None = None
    kv_peer_networks: tuple[str, ...] | None = None

    @property
    def gives(self) -> bool:
        """Whether KV may be computed here for others."""
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Whether KV may be taken from others."""
        return self.kv_role != "kv_producer"


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where others ask this worker for KV, beside the port of its HTTP API; and where it asks those
    that are named by their HTTP address, see `KvTransferConfig`.
    """

    host: str
    port: int
    http_port: int
    peer_port: int | None = None

    def port_of(self, http_port: int) -> int:
        """Where the worker with this HTTP port is asked."""
        return http_port + self.port - self.http_port if self.peer_port is None else self.peer_port


OFFLOADING_POLICIES = ("lru", "lfu", "slru", "tenant")


@dataclass(frozen=True, slots=True)
class KvOffloadingConfig:
    """Where evicted blocks of the prefix cache go: `kv_offloading_size` GiB of the host's memory,
    and from there to `kv_offloading_disk_size` GiB in the directory `kv_offloading_path` (None: no
    further). `kv_offloading_policy`, one of OFFLOADING_POLICIES, says what gives way.
    """

    kv_offloading_size: float
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 32.0
    kv_offloading_policy: str = "lru"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs; sent to it as msgpack on its command line's pipe.

    `engine` is "torch" or "sim", `device` "auto", "cpu" or "cuda", `attention_backend` "auto",
    "torch", "triton" or "flash-attn". `dtype` is "auto", "float32", "bfloat16" or "float16";
    `kv_cache_dtype` is "auto" (that of activations), "float32", "bfloat16", "fp8" or "fp8_e4m3"
    (the same); `quantization` is "none", "q8_0" or "q4_1".
    `num_blocks_override` None: sized from memory (torch) or the default of the simulator.
    """

    engine: str
    model_path: str | None
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    # Nobody asked for the scheduler's `max_model_len`: it may be cut to what the KV cache holds.
    fits_max_model_len: bool = False
    # The part of a GPU's memory that the worker may take for weights and KV cache together; on a
    # CPU the part of the available memory that the KV cache may take, though never over a quarter.
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    enable_partial_hits: bool = True
    enable_fair_eviction: bool = True
    watermark: float = 0.0
    prefix_caching_hash_algo: str = "sha256"
    prefix_caching_hash_seed: str | None = None
    # Schedule a step while the one before it still runs.
    async_scheduling: bool = True
    # Multiple of the expected time of a step after which it counts as stalled, and its least value.
    step_budget_factor: float = 4.0
    step_budget_seconds: float = 2.5
    num_threads: int | None = None
    cpu_activations: str = "float32"
    device: str = "auto"
    # Processes that share the model, each with a device of its own.
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    # Launch every step anew on a GPU; else decode steps of these numbers of sequences are captured
    # as graphs (none: small ones, every eighth, and the most that run at once).
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    kv_events: KvEventsConfig = field(default_factory=lambda: KvEventsConfig())
    eos_token_ids: tuple[int, ...] = ()
    speculative: SpeculativeConfig | None = None  # None: one token a step
    vocab_size: int | None = None  # of the model; None: not known here
    lora: LoraConfig | None = None  # None: no adapters
    logits_processors: tuple[str, ...] = ()
    kv_transfer: KvTransferConfig | None = None  # None: KV stays here
    kv_offloading: KvOffloadingConfig | None = None  # None: what is evicted is lost


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """What embeddings are made of, and whether their length is made 1 where a request does not say;
    the names are vLLM's.
    """

    pooling_type: Literal["LAST", "MEAN"] = "LAST"
    use_activation: bool = True


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The HTTP front end. `served_model_names` is what `/v1/models` lists, the first one being the
    name answers carry; `accepted_model_names` may be asked for without being listed (the path).

    `api_keys` empty: everybody is let in. `seed` None: requests without a seed get a random one.
    """

    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    accepted_model_names: tuple[str, ...] = ()
    model_root: str = ""
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_num_seqs: int = 128
    max_num_queued_reqs: int | None = None
    write_stall_seconds: float = 30.0
    seed: int | None = None
    max_num_queued_tokens: int | None = None
    max_logprobs: int = 20
    enable_priority: bool = True  # False: a priority other than 0 is refused
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = True
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    enable_per_request_metrics: bool = False
    sse_keep_alive_seconds: float | None = None
    stream_interval: int = 1  # tokens per frame of a stream, where a request does not say
    # Names what answers depend on (version, model, engine); None: answers do not tell.
    system_fingerprint: str | None = None
    # Memory of this process above which new requests are refused (503); None: no limit.
    max_rss_bytes: int | None = None
    # Routes that change or reveal the state of the whole worker: sleep, pause, reset, server info.
    enable_admin_routes: bool = False
    # Routes that load and unload LoRA adapters.
    enable_adapter_routes: bool = False
    enable_tokenizer_info: bool = False
    # CORS, as vLLM's: the origins, methods and headers that browsers let other sites' pages use.
    allowed_origins: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    # From a request's first byte to the end of its headers, and from there to the end of its body.
    header_timeout_seconds: float = 10.0
    body_timeout_seconds: float = 30.0
    # Open connections above which new ones are answered 503; None: what the file limit allows.
    max_connections: int | None = None
    # What sampling fields are when a request does not say, by field name; of numbers.
    default_sampling: tuple[tuple[str, float], ...] = ()
    # How the model writes tool calls and reasoning (`api.tools.answer`); None: calls as its chat
    # template shows, reasoning not at all.
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    strict_fields: bool = False  # refuse fields of requests that are not part of the API
    enable_auto_tool_choice: bool = True  # False: calls are parsed only where they must be
    # The most drafts that a step verifies of one sequence; None: there is no speculation.
    num_speculative_tokens: int | None = None
    # How prompts are embedded, and in how many dimensions (None: unknown).
    pooler: PoolerConfig = PoolerConfig()
    embedding_size: int | None = None
    logits_processors: tuple[str, ...] = ()  # names of those that requests may ask for
    kv_role: str | None = None  # one of KV_ROLES; None: KV stays here
    kv_address: KvAddress | None = None  # of its engine, once that is up
    # Have prompts run by the prefill worker that a request's header names: in these networks (None:
    # private ones), for so long at most.
    pd_proxy: bool = False
    prefiller_networks: tuple[str, ...] | None = None
    prefill_timeout_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at start; it is listed under `base_model_name` (None: the served name)."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Serve HTTPS with this certificate; with `ca_certs` clients must show one signed by these."""

    certfile: str
    keyfile: str
    ca_certs: str | None = None


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Faults on purpose (`worker.sim`). `startup_seconds` is how long the worker says that it is
    not ready; `reply_headers` go with every generation's answer.
    """

    startup_seconds: float = 0.0
    reply_headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `app` needs to come up. `port` 0 picks a free one; `uds` is the path of a unix
    socket to listen on instead. `chat_template` None: the model's own.
    """

    host: str
    port: int
    api: ApiConfig
    engine: EngineConfig
    shutdown_timeout_seconds: float = 30.0
    # What to do when the engine process dies or hangs: "restart" or "exit".
    engine_failure_policy: str = "restart"
    # Restarts within ten minutes; one more and the worker exits.
    max_engine_restarts: int = 5
    # Silence of the engine process after which it counts as hung, and is killed.
    heartbeat_timeout_seconds: float = 2.0
    uds: str | None = None
    tls: TlsConfig | None = None
    chat_template: str | None = None
    faults: FaultConfig | None = None  # None: none can be injected
    lora_modules: tuple[LoraModule, ...] = ()
