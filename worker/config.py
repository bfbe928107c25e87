"""Frozen configuration of a worker. `app` resolves flags into it once; nobody changes it after."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: `num_blocks` blocks of `block_size` tokens (a power of two)."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    watermark: float = 0.0  # fraction of blocks kept free when admitting


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, in tokens and sequences. `max_num_queued_reqs` None: unbounded."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0  # 0: off
    max_num_queued_reqs: int | None = None


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Latency model of `--engine sim`, in seconds and tokens.

    step time = `step_overhead_seconds` + prefill tokens / `prefill_tokens_per_second`
    + (`decode_base_seconds` + `decode_per_sequence_seconds` × decoding sequences, when any decode).
    `time_scale` multiplies it; 0 does not wait at all.
    """

    prefill_tokens_per_second: float = 20_000.0
    decode_base_seconds: float = 0.010
    decode_per_sequence_seconds: float = 0.0002
    step_overhead_seconds: float = 0.0
    time_scale: float = 1.0
    seed: int = 0
    # The answers are drawn from the ids [first_word_id, first_word_id + num_words), so that they
    # are words of whatever tokenizer stands in front.
    first_word_id: int = 256
    num_words: int = 1024
    # An answer ends with this token after `mean_output_tokens` tokens on average (a geometric
    # distribution), unless the request's own limit comes first. None: only the limit ends it.
    end_token_id: int | None = None
    mean_output_tokens: float = 128.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs; sent to it as msgpack on its command line's pipe.

    `engine` is "torch" or "sim". `dtype` is "auto", "float32", "bfloat16" or "float16".
    `num_blocks_override` None: sized from memory (torch) or the default of the simulator.
    """

    engine: str
    model_path: str | None
    dtype: str = "auto"
    block_size: int = 16
    num_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    eos_token_ids: tuple[int, ...] = ()


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


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `app` needs to come up. `port` 0 picks a free one; `model_path` None is only
    possible with the simulator.
    """

    host: str
    port: int
    api: ApiConfig
    engine: EngineConfig
    shutdown_timeout_seconds: float = 30.0
