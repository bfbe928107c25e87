"""Frozen configuration of a worker, resolved from flags once by `cli.flags`."""

from dataclasses import dataclass, field
from typing import Any, Literal

HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
# By name: the core must not import the shelf. Only `--engine sim` has no checkpoint.
SIM_TOKENIZER = "worker.sim.tokenizer"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: `num_blocks` blocks of `block_size` tokens (a power of two)."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    watermark: float = 0.0  # fraction of blocks to leave free when admitting
    # Re-use the matching head of a block whose tail differs, by copying it.
    enable_partial_hits: bool = True
    # Evict first from tenants that hold more than an equal share.
    enable_fair_eviction: bool = True
    hash_algo: str = "sha256"  # one of HASH_ALGOS
    hash_seed: str | None = None  # None: the algorithm's default (see engine.block_hash)
    record_events: bool = False  # of the prefix cache, for subscribers that mirror it
    record_evictions: bool = False  # for the tier below


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, in tokens and sequences, and the policies.

    `policy` "priority" orders by priority, then arrival; "fcfs" by arrival alone. `waiting_order`
    "lpm" puts the longest cached prefix first within a priority. `victim` is a key of
    `engine.policies.VICTIM_POLICIES`. A waiting sequence that does not fit is overtaken at most
    `max_bypasses` times.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0  # 0: off
    enable_chunked_prefill: bool = True
    policy: str = "priority"  # the same as "fcfs" for equal priorities
    waiting_order: str = "fcfs"
    victim: str = "recompute-cost"  # the cheapest to compute again
    max_bypasses: int = 8
    # Hold a request back while another computes at least this much of its prompt; None: never.
    in_batch_prefix_tokens: int | None = 32
    # Reserve blocks for a whole prompt before its first chunk runs; False: chunk by chunk.
    reserve_full_prompt: bool = True


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters of rank `max_lora_rank` or less: at most `max_loras` of them in a step, and
    `max_cpu_loras` in the host's memory.
    """

    max_loras: int = 1
    max_cpu_loras: int = 1
    max_lora_rank: int = 16


MODEL_METHODS = ("draft_model", "eagle", "eagle3")  # of speculation: they draft with a network
SPECULATIVE_METHODS = ("ngram", "suffix", *MODEL_METHODS)
REJECTION_SAMPLE_METHODS = ("standard", "block")
DRAFT_SAMPLE_METHODS = ("greedy", "gumbel", "probabilistic")
MAX_SPECULATIVE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`--speculative-config`, with vLLM's field names and defaults where vLLM has the field.

    `method` is one of SPECULATIVE_METHODS. `num_speculative_tokens` is the maximum per sequence and
    step. `model` is the draft model, or a trained head (None: the head for the target).

    `draft_sample_method` is how a draft model or head chooses when the request samples: its
    likeliest token ("greedy"), the token it draws with the request's own noise ("gumbel"), or a
    draw from its own distribution ("probabilistic"). With the first two, the output is identical to
    the output without speculation. `rejection_sample_method` verifies drafts that were drawn from a
    distribution.

    `num_speculative_tokens_per_batch_size` holds (first, last, max drafts) by the number of
    decoding sequences; it overrides the adaptive length. With `enable_adaptive_verification` False
    every sequence always verifies all its drafts.
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
    """`--kv-events-config`, with vLLM's fields and defaults, and `format` ("map" or "array").
    `endpoint` binds when it has `*` or `::` or is ipc or inproc, else it connects.
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
    # Identify blocks by 64 bits of their hash; False: by the whole hash, as bytes.
    int_block_hashes: bool = True


KV_CONNECTORS = ("TcpConnector", "NixlConnector")
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """`--kv-transfer-config`, with vLLM's field names and defaults where vLLM has the field.

    Other engines must be able to reach `kv_ip`:`kv_port` (0: any free port). Exported KV is held
    for `kv_lease_duration` seconds, in at most `kv_buffer_size` bytes; the same limit applies to KV
    in flight to this engine. A transfer fails after `kv_transfer_timeout` seconds. `key_file` has
    the key that engines share (None: see `worker.kv.access`). `backends` are NIXL's. Only peers in
    `kv_peer_networks` (None: private networks) are queried. A peer known by its HTTP address
    listens on `kv_peer_port` (None: as far from its HTTP port as this worker).
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
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        return self.kv_role != "kv_producer"


@dataclass(frozen=True, slots=True)
class KvAddress:
    """This worker's address for KV, and its HTTP port; `peer_port` as in `KvTransferConfig`."""

    host: str
    port: int
    http_port: int
    peer_port: int | None = None

    def port_of(self, http_port: int) -> int:
        return http_port + self.port - self.http_port if self.peer_port is None else self.peer_port


OFFLOADING_POLICIES = ("lru", "lfu", "slru", "tenant")


@dataclass(frozen=True, slots=True)
class KvOffloadingConfig:
    """The tiers for evicted blocks of the prefix cache: `kv_offloading_size` GiB of host memory,
    then `kv_offloading_disk_size` GiB in the directory `kv_offloading_path` (None: no disk).
    `kv_offloading_policy` is one of OFFLOADING_POLICIES.
    """

    kv_offloading_size: float
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 32.0
    kv_offloading_policy: str = "lru"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of the engine process, which receives it as msgpack over a pipe.

    `engine` is "torch" or "sim", `device` "auto", "cpu" or "cuda", `attention_backend` "auto",
    "torch" or "triton". `dtype` is "auto", "float32", "bfloat16" or "float16";
    `kv_cache_dtype` is "auto" (the dtype of activations), "float32", "bfloat16", "fp8" or its
    synonym "fp8_e4m3"; `quantization` is "none", "q8_0" or "q4_1". `num_blocks_override` None:
    sized from memory (torch) or the default of the simulator.
    """

    engine: str
    model_path: str | None
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    # No flag gives the scheduler's `max_model_len`: it may shrink to the size of the KV cache.
    fits_max_model_len: bool = False
    # The fraction of a GPU's memory for weights and KV cache together; on a CPU, the fraction of
    # the available memory for the KV cache, a quarter at most.
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    enable_partial_hits: bool = True
    enable_fair_eviction: bool = True
    watermark: float = 0.0
    prefix_caching_hash_algo: str = "sha256"
    prefix_caching_hash_seed: str | None = None
    # Schedule a step while its predecessor runs.
    async_scheduling: bool = True
    # A step counts as stalled after this multiple of its expected time, and the seconds at least.
    step_budget_factor: float = 4.0
    step_budget_seconds: float = 2.5
    num_threads: int | None = None
    cpu_activations: str = "float32"
    device: str = "auto"
    # Processes that share the model, each with its own device.
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    # Launch every kernel of a step on a GPU. False: capture decode steps of these batch sizes as
    # graphs (empty: small sizes, every eighth, and `max_num_seqs`).
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: Any = None  # the simulator's settings (`worker.sim.config`)
    kv_events: KvEventsConfig = field(default_factory=lambda: KvEventsConfig())
    eos_token_ids: tuple[int, ...] = ()
    speculative: SpeculativeConfig | None = None  # None: one token a step
    vocab_size: int | None = None  # of the model; None: unknown
    lora: LoraConfig | None = None  # None: no adapters
    logits_processors: tuple[str, ...] = ()
    kv_transfer: KvTransferConfig | None = None  # None: no KV moves between engines
    kv_offloading: KvOffloadingConfig | None = None  # None: evicted blocks are lost


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """The hidden states that make an embedding, and whether it has length 1 by default."""

    pooling_type: Literal["LAST", "MEAN"] = "LAST"
    use_activation: bool = True


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The HTTP front end. `/v1/models` lists `served_model_names`, and answers carry the first of
    them; requests may also use `accepted_model_names`. Without `api_keys` no key is needed. `seed`
    None: requests without a seed get a random one.
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
    stream_interval: int = 1  # tokens per frame of a stream; a request may override it
    # Identifies version, model and engine in answers; None: answers carry no fingerprint.
    system_fingerprint: str | None = None
    # Above this memory of the process new requests are refused (503); None: no limit.
    max_rss_bytes: int | None = None
    # Routes that change or reveal the state of the whole worker: sleep, pause, reset, server info.
    enable_admin_routes: bool = False
    # Routes that load and unload LoRA adapters.
    enable_adapter_routes: bool = False  # they read any directory
    enable_tokenizer_info: bool = False
    # CORS, with vLLM's names: the origins, methods and headers that browsers allow other sites.
    allowed_origins: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    # From a request's first byte to the end of its headers, and from there to the end of the body.
    header_timeout_seconds: float = 10.0
    body_timeout_seconds: float = 30.0
    # With more open connections, new ones get a 503; None: as many as the file limit allows.
    max_connections: int | None = None
    # Defaults of numeric sampling fields, by field name.
    default_sampling: tuple[tuple[str, float], ...] = ()
    # The model's format of tool calls and reasoning (`api.tools.answer`); None: tool calls by the
    # chat template, no reasoning.
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    strict_fields: bool = False  # refuse fields of requests that are not part of the API
    enable_auto_tool_choice: bool = True  # False: parse only required calls
    # The maximum number of drafts per sequence and step; None: no speculation.
    num_speculative_tokens: int | None = None
    # The pooling of embeddings, and their dimension (None: unknown).
    pooler: PoolerConfig = PoolerConfig()
    embedding_size: int | None = None
    logits_processors: tuple[str, ...] = ()  # names that requests may use
    kv_role: str | None = None  # one of KV_ROLES; None: no KV moves between engines
    kv_address: KvAddress | None = None  # of the engine, once it is up
    # Send prompts to the prefill worker in a request's header, if it is in these networks (None:
    # private networks), and wait this long at most.
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
    """The certificate of HTTPS; with `ca_certs`, clients must present one signed by them."""

    certfile: str
    keyfile: str
    ca_certs: str | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The whole configuration of a worker. `port` 0 picks a free port; `uds` is the path of a unix
    socket to listen on instead. `chat_template` None: the model's own.
    """

    host: str
    port: int
    api: ApiConfig
    engine: EngineConfig
    shutdown_timeout_seconds: float = 30.0
    # The reaction to a dead or hung engine process: "restart" or "exit".
    engine_failure_policy: str = "restart"
    # The worker exits instead of restarting the engine more often than this within ten minutes.
    max_engine_restarts: int = 5
    # An engine process that is silent for this long counts as hung and is killed.
    heartbeat_timeout_seconds: float = 2.0
    uds: str | None = None
    tls: TlsConfig | None = None
    chat_template: str | None = None
    faults: Any = None  # injected faults (`worker.sim.config`); None: off
    lora_modules: tuple[LoraModule, ...] = ()
    tracing: bool = False
    otlp_traces_endpoint: str | None = None
