"""The engine's part of the worker's command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from worker.config import (
    HASH_ALGOS,
    EngineConfig,
    KvEventsConfig,
    SchedulerConfig,
    ServeConfig,
    SimConfig,
)
from worker.engine.policies import POLICIES, VICTIM_POLICIES, WAITING_ORDERS
from worker.errors import ConfigError
from worker.flag_types import (
    at_least,
    byte_count,
    fraction,
    positive,
    power_of_two,
    seconds_at_least,
)
from worker.tokenizer.checkpoint import Checkpoint

# There are five heartbeats in a second; a busy machine delays some.
LEAST_HEARTBEAT_TIMEOUT_SECONDS = 1.0
DTYPES = ("auto", "float32", "bfloat16", "float16")
_MOST_BATCHES = (1 << 31) - 1

_engine = EngineConfig("torch", None)
_scheduler = SchedulerConfig()


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """The model's arithmetic, the KV cache and the prefix cache."""
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto is float32 on a CPU, half precision on a GPU; bfloat16 is float32 on a CPU"
        " without AVX-512 or AVX-NE-CONVERT",
    )
    group.add_argument(
        "--max-model-len",
        type=at_least(2),
        help="tokens of prompt and answer together (default: the model's own, or fewer where the KV"
        " cache cannot hold as many)",
    )
    group.add_argument("--num-threads", type=at_least(1), help="CPU threads of the torch engine")
    group.add_argument(
        "--block-size",
        type=power_of_two,
        default=_engine.block_size,
        help="tokens of a KV block, a power of two (default %(default)s)",
    )
    group.add_argument(
        "--num-gpu-blocks-override", type=at_least(1), help="KV blocks (default: by memory)"
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=byte_count,
        help="memory of the KV cache, such as 4G (default: by what is available; on a CPU 1 GiB or"
        " one longest sequence, and at most a quarter of that)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=fraction,
        default=_engine.gpu_memory_utilization,
        help="part of a GPU's memory to take, weights included; on a CPU the KV cache takes at most"
        " this part of what is available (default %(default)s)",
    )
    _add_prefix_cache_flags(group)


def _add_prefix_cache_flags(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    group.add_argument(
        "--enable-prefix-caching",
        action=switch,
        default=True,
        help="re-use the KV of equal beginnings",
    )
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGOS,
        default=_engine.prefix_caching_hash_algo,
        help="names of KV blocks, byte for byte those of vLLM (default %(default)s)",
    )
    group.add_argument(
        "--prefix-caching-hash-seed",
        metavar="TEXT",
        help='seed of the block hashes, or "random" (default: PYTHONHASHSEED, else as vLLM)',
    )
    group.add_argument(
        "--enable-partial-hits",
        action=switch,
        default=_engine.enable_partial_hits,
        help="re-use the matching head of a block by copying it",
    )
    group.add_argument(
        "--enable-fair-eviction",
        action=switch,
        default=_engine.enable_fair_eviction,
        help="evict first from tenants that hold more than an equal share",
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help='such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
    )


def add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    """Who runs, who waits, who gives way."""
    switch = argparse.BooleanOptionalAction
    group.add_argument(
        "--max-num-seqs",
        type=at_least(1),
        default=_scheduler.max_num_seqs,
        help="sequences that run at once (default %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=at_least(1),
        default=_scheduler.max_num_batched_tokens,
        help="tokens of one step (default %(default)s)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=at_least(0),
        default=0,
        help="tokens of one prompt per step at most; 0 is off",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=switch,
        default=True,
        help="spread a long prompt over several steps",
    )
    group.add_argument(
        "--async-scheduling",
        action=switch,
        default=_engine.async_scheduling,
        help="schedule a step while the one before it runs",
    )
    _add_policy_flags(group)


def _add_policy_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scheduling-policy",
        choices=POLICIES,
        default=_scheduler.policy,
        help="priority goes by priority, then arrival; fcfs by arrival, and refuses priorities",
    )
    group.add_argument(
        "--waiting-order",
        choices=WAITING_ORDERS,
        default=_scheduler.waiting_order,
        help="lpm admits the longest cached prefix first, within a priority",
    )
    group.add_argument(
        "--preemption-victim",
        choices=tuple(VICTIM_POLICIES),
        default=_scheduler.victim,
        help="who gives its blocks back when there are too few (default %(default)s)",
    )
    group.add_argument(
        "--max-bypasses",
        type=at_least(0),
        default=_scheduler.max_bypasses,
        help="how often others may be admitted before a sequence that does not fit yet",
    )
    group.add_argument(
        "--in-batch-prefix-tokens",
        type=at_least(0),
        default=_scheduler.in_batch_prefix_tokens,
        help="let a request wait while another computes as much of its prompt; 0 is off",
    )
    group.add_argument(
        "--reserve-full-prompt",
        action=argparse.BooleanOptionalAction,
        default=_scheduler.reserve_full_prompt,
        help="admit a request only when its whole prompt has room",
    )
    group.add_argument(
        "--watermark",
        type=fraction,
        default=_engine.watermark,
        help="part of the KV blocks to keep free when admitting (default %(default)s)",
    )


def add_failure_flags(group: argparse._ArgumentGroup) -> None:
    """What to do about an engine that dies, hangs or stalls."""
    group.add_argument(
        "--engine-failure-policy",
        choices=("restart", "exit"),
        default="restart",
        help="start a new engine behind the open port, or end with status 1",
    )
    group.add_argument(
        "--max-engine-restarts",
        type=at_least(0),
        default=ServeConfig.__dataclass_fields__["max_engine_restarts"].default,
        help="in ten minutes; one more ends the worker (default %(default)s)",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=seconds_at_least(LEAST_HEARTBEAT_TIMEOUT_SECONDS),
        default=ServeConfig.__dataclass_fields__["heartbeat_timeout_seconds"].default,
        help="seconds of silence after which the engine process is killed (default %(default)s)",
    )
    group.add_argument(
        "--step-budget",
        type=positive,
        default=_engine.step_budget_seconds,
        help="seconds that any step may take; /health is 503 beyond its budget, and at twice the"
        " budget the engine is killed (default %(default)s)",
    )
    group.add_argument(
        "--step-budget-factor",
        type=positive,
        default=_engine.step_budget_factor,
        help="a step may also take so many times what steps of its size took (default %(default)s)",
    )


def engine_config(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None,
    environment: Mapping[str, str],
    kv_events: KvEventsConfig,
    sim: SimConfig,
) -> EngineConfig:
    """The engine's configuration, but for the scheduler's."""
    return EngineConfig(
        engine=options.engine,
        model_path=None if checkpoint is None else os.path.abspath(checkpoint.path),
        dtype=options.dtype,
        block_size=options.block_size,
        num_blocks_override=options.num_gpu_blocks_override,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        fits_max_model_len=options.max_model_len is None,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_partial_hits=options.enable_partial_hits,
        enable_fair_eviction=options.enable_fair_eviction,
        watermark=options.watermark,
        prefix_caching_hash_algo=options.prefix_caching_hash_algo,
        prefix_caching_hash_seed=options.prefix_caching_hash_seed
        or environment.get("PYTHONHASHSEED")
        or None,
        async_scheduling=options.async_scheduling,
        step_budget_factor=options.step_budget_factor,
        step_budget_seconds=options.step_budget,
        num_threads=options.num_threads,
        sim=sim,
        kv_events=kv_events,
    )


def scheduler_config(options: argparse.Namespace, max_model_len: int) -> SchedulerConfig:
    """The scheduler's configuration. Raises `ConfigError`."""
    if not options.enable_chunked_prefill and options.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill runs a prompt in one step: --max-num-batched-tokens"
            f" {options.max_num_batched_tokens} must be at least --max-model-len {max_model_len}"
        )
    return SchedulerConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_chunked_prefill=options.enable_chunked_prefill,
        policy=options.scheduling_policy,
        waiting_order=options.waiting_order,
        victim=options.preemption_victim,
        max_bypasses=options.max_bypasses,
        in_batch_prefix_tokens=options.in_batch_prefix_tokens or None,
        reserve_full_prompt=options.reserve_full_prompt,
    )


def kv_events_config(
    options: argparse.Namespace, model_name: str, environment: Mapping[str, str]
) -> KvEventsConfig:
    """`--kv-events-config`, strictly decoded. Without a topic but with `POD_IP` in the environment
    the topic is the one that endpoint pickers look for. Raises `ConfigError`.
    """
    given: dict[str, Any] = {}
    if options.kv_events_config is not None:
        try:
            given = msgspec.json.decode(options.kv_events_config, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config: not a JSON object: {error}") from error
    known = KvEventsConfig.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ConfigError(f"--kv-events-config: unknown {name!r}; known are {', '.join(known)}")
    if "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" in environment:
        as_int = environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] not in ("0", "")
        given.setdefault("int_block_hashes", as_int)
    pod = environment.get("POD_IP")
    if pod:
        given.setdefault("topic", f"kv@{pod}:{options.port}@{model_name}")
    try:
        config = msgspec.convert(given, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-events-config: {error}") from error
    if config.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"--kv-events-config: unknown publisher {config.publisher!r}; use zmq")
    if config.format not in ("map", "array"):
        raise ConfigError(f"--kv-events-config: format is map or array, not {config.format!r}")
    _check_sizes(config)
    return config


def _check_sizes(config: KvEventsConfig) -> None:
    # ZMQ's own limits are C integers, and one of them is `buffer_steps` + 1.
    for name, least in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
        value = getattr(config, name)
        if not least <= value < _MOST_BATCHES:
            bounds = f"[{least}, {_MOST_BATCHES - 1}]"
            raise ConfigError(f"--kv-events-config: {name} must be in {bounds}, got {value}")
