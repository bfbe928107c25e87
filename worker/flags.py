"""The command line of a worker, in vLLM's spelling, and what it resolves to."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from worker import catalog
from worker.config import (
    HASH_ALGOS,
    ApiConfig,
    EngineConfig,
    LoraConfig,
    LoraModule,
    SchedulerConfig,
    ServeConfig,
)
from worker.engine.policies import POLICIES, VICTIM_POLICIES, WAITING_ORDERS
from worker.errors import ConfigError
from worker.faults.sim_flags import add_sim_flags, fault_config, sim_config
from worker.flag_types import (
    Flag,
    add_flags,
    at_least,
    byte_count,
    configured,
    field_defaults,
    fraction,
    positive,
    power_of_two,
    seconds_at_least,
    whole_numbers,
)
from worker.kv_flags import (
    KV_FLAGS,
    kv_events_config,
    kv_offloading_config,
    kv_transfer_config,
)
from worker.logits_processors import load
from worker.server_flags import MODEL_FLAGS, add_server_flags, api_config, tls_config
from worker.speculation_flags import add_speculation_flags, speculative_config
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

SIM_MAX_MODEL_LEN = 8192

# There are five heartbeats in a second; a busy machine delays some.
LEAST_HEARTBEAT_TIMEOUT_SECONDS = 1.0
CPU_ACTIVATIONS = ("float32", "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "q8_0", "q4_1")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8", "fp8_e4m3")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flash-attn")

# Of flags whose fields have no default, or another one; the sequence length is the model's.
_OWN_DEFAULTS = {
    "max_model_len": None,
    "generation_config": "auto",
    "override_generation_config": "{}",
    "sse_keep_alive_interval": 0.0,
    "enable_lora": False,
    "max_cpu_loras": None,
}

_ENGINE = (
    Flag(
        "--dtype",
        DTYPES,
        "auto is float32 on a CPU, half precision on a GPU; bfloat16 is float32 on a CPU"
        " without AVX-512 or AVX-NE-CONVERT",
    ),
    Flag(
        "--quantization",
        QUANTIZATIONS,
        "on a CPU, convert the weights of a safetensors checkpoint to blocks of 8 or 4 bits as they"
        " are loaded; a draft model's stay; FP8, AWQ and GPTQ need no flag (default %(default)s)",
    ),
    Flag(
        "--kv-cache-dtype",
        KV_CACHE_DTYPES,
        "auto is that of activations; on a CPU bfloat16 halves the cache, and so does fp8 on a GPU;"
        " either may change answers (default %(default)s)",
    ),
    Flag(
        "--max-model-len",
        at_least(2),
        "tokens of prompt and answer together (default: the model's own, or fewer where the KV"
        " cache cannot hold as many)",
    ),
    Flag("--device", DEVICES, "auto is the first GPU that CUDA sees, else the CPU"),
    Flag(
        "--tensor-parallel-size",
        at_least(1),
        "processes that share the model, each with a GPU, or with its part of the CPU threads"
        " (default %(default)s)",
    ),
    Flag(
        "--attention-backend",
        ATTENTION_BACKENDS,
        "kernels of attention, norms and activations; auto is triton on a GPU and native kernels on"
        " a CPU (torch without them); flash-attn uses that package for attention alone, and needs"
        " --block-size 256",
    ),
    Flag("--enforce-eager", bool, "on a GPU, launch every step anew instead of replaying graphs"),
    Flag(
        "--cuda-graph-sizes",
        whole_numbers,
        "on a GPU, sizes (in sequences) of decode steps to capture as graphs; smaller steps"
        " are padded (default: 1,2,4,8,16,24 and so on up to --max-num-seqs)",
        metavar="N,N",
    ),
    Flag("--num-threads", at_least(1), "CPU threads of the torch engine"),
    Flag(
        "--cpu-activations",
        CPU_ACTIVATIONS,
        "type of activations in products with quantised weights on a CPU; int8 rounds them in"
        " blocks of 32, which is faster and may change answers (default %(default)s)",
    ),
    Flag(
        "--block-size", power_of_two, "tokens in a KV block, a power of two (default %(default)s)"
    ),
    Flag(
        "--num-gpu-blocks-override",
        at_least(1),
        "KV blocks (default: by memory)",
        "num_blocks_override",
    ),
    Flag(
        "--kv-cache-memory-bytes",
        byte_count,
        "memory of the KV cache on each rank, such as 4G (default: on a GPU what is left; on a CPU"
        " 1 GiB or one longest sequence, and at most a quarter of the available memory)",
    ),
    Flag(
        "--gpu-memory-utilization",
        fraction,
        "share of a GPU's memory to use, weights included; on a CPU the KV cache uses at most"
        " this share of what is available (default %(default)s)",
    ),
    Flag("--enable-prefix-caching", bool, "reuse the KV of common prompt prefixes"),
    Flag(
        "--prefix-caching-hash-algo",
        HASH_ALGOS,
        "hash that names KV blocks, byte for byte as in vLLM (default %(default)s)",
    ),
    Flag(
        "--prefix-caching-hash-seed",
        str,
        'seed of the block hashes, or "random" (default: PYTHONHASHSEED, else as vLLM)',
        metavar="TEXT",
    ),
    Flag("--enable-partial-hits", bool, "reuse the matching beginning of a block by copying it"),
    Flag(
        "--enable-fair-eviction",
        bool,
        "evict first from tenants that hold more than an equal share",
    ),
)
_SCHEDULER = (
    Flag("--max-num-seqs", at_least(1), "most sequences that run at once (default %(default)s)"),
    Flag("--max-num-batched-tokens", at_least(1), "most tokens in one step (default %(default)s)"),
    Flag(
        "--long-prefill-token-threshold",
        at_least(0),
        "most tokens of one prompt in one step; 0: no limit",
    ),
    Flag("--enable-chunked-prefill", bool, "spread a long prompt over several steps"),
    Flag("--async-scheduling", bool, "schedule the next step while one runs"),
    Flag(
        "--scheduling-policy",
        POLICIES,
        "order of waiting requests: by priority, then arrival; or by arrival alone (fcfs), which"
        " rejects requests with a priority",
        "policy",
    ),
    Flag(
        "--waiting-order",
        WAITING_ORDERS,
        "order within a priority: fcfs by arrival, lpm the longest cached prefix first",
    ),
    Flag(
        "--preemption-victim",
        tuple(VICTIM_POLICIES),
        "sequence to preempt when KV blocks run out (default %(default)s)",
        "victim",
    ),
    Flag(
        "--max-bypasses",
        at_least(0),
        "how many others may be admitted before a sequence that does not fit yet",
    ),
    Flag(
        "--in-batch-prefix-tokens",
        at_least(0),
        "let a request wait while another computes at least this much of its prompt; 0: never",
    ),
    Flag("--reserve-full-prompt", bool, "admit a request only when its whole prompt has room"),
    Flag(
        "--watermark",
        fraction,
        "share of the KV blocks to keep free when admitting (default %(default)s)",
    ),
)
_LORA = (
    Flag("--enable-lora", bool, "serve LoRA adapters, each under its own name"),
    Flag(
        "--max-loras",
        at_least(1),
        "most different adapters in one step; other requests wait for a slot (default %(default)s)",
    ),
    Flag("--max-lora-rank", at_least(1), "highest rank of an adapter (default %(default)s)"),
    Flag(
        "--max-cpu-loras",
        at_least(1),
        "adapters kept in host memory; others are read again when a request names them"
        " (default: --max-loras)",
    ),
)
_FAILURES = (
    Flag(
        "--engine-failure-policy",
        ("restart", "exit"),
        "start a new engine behind the open port, or end with status 1",
    ),
    Flag(
        "--max-engine-restarts",
        at_least(0),
        "most restarts in ten minutes; one more ends the worker (default %(default)s)",
    ),
    Flag(
        "--heartbeat-timeout",
        seconds_at_least(LEAST_HEARTBEAT_TIMEOUT_SECONDS),
        "seconds of silence after which the engine process is killed (default %(default)s)",
        "heartbeat_timeout_seconds",
    ),
    Flag(
        "--step-budget",
        positive,
        "seconds that any step may take; /health is 503 beyond its budget, and at twice the"
        " budget the engine is killed (default %(default)s)",
        "step_budget_seconds",
    ),
    Flag(
        "--step-budget-factor",
        positive,
        "a step may also take this many times as long as earlier steps of its size (default"
        " %(default)s)",
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser; an unknown flag is refused, not ignored."""
    parser = argparse.ArgumentParser(
        prog="pointsman worker",
        description="Serve one model over the OpenAI API.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        help="GGUF file, Hugging Face directory or id (default: variable POINTSMAN_MODEL, else a"
        " small model)",
    )
    model.add_argument(
        "--engine",
        choices=("torch", "sim"),
        default="torch",
        help="torch runs the model; sim answers with words after the time that a model would take,"
        " and needs neither a model nor torch",
    )
    add_flags(model, MODEL_FLAGS)
    add_server_flags(parser.add_argument_group("server"))
    engine = parser.add_argument_group("engine")
    add_flags(engine, _ENGINE + KV_FLAGS)
    engine.add_argument(
        "--logits-processors",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="installed logits processors that requests may ask for by `vllm_xargs`",
    )
    add_flags(parser.add_argument_group("scheduler"), _SCHEDULER)
    add_speculation_flags(parser.add_argument_group("speculative decoding"))
    lora = parser.add_argument_group("LoRA adapters")
    add_flags(lora, _LORA)
    modules = 'adapters to load at start: NAME=PATH, or {"name": …, "path": …} with an optional'
    lora.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help=f'{modules} "base_model_name" in JSON',
    )
    add_flags(parser.add_argument_group("engine failures"), _FAILURES)
    add_sim_flags(parser.add_argument_group("simulator (--engine sim)"))
    kinds = (ApiConfig, EngineConfig, SchedulerConfig, ServeConfig, LoraConfig)
    defaults = field_defaults(*kinds)
    for name in ("lora_modules", "logits_processors"):  # lists on the command line
        del defaults[name]
    parser.set_defaults(**defaults | _OWN_DEFAULTS)
    return parser


def find_model(options: argparse.Namespace, environment: Mapping[str, str]) -> Path | None:
    """The model to serve: the flag, `POINTSMAN_MODEL`, or the default in the cache (which
    `POINTSMAN_CACHE` moves). None only with the simulator, which needs none; raises `ConfigError`
    otherwise.
    """
    given = options.model or environment.get("POINTSMAN_MODEL")
    if options.engine == "sim":
        return Path(options.model) if options.model else None
    if given:
        return Path(given)
    cache = environment.get("POINTSMAN_CACHE")
    folder = Path(cache) if cache else Path.home() / ".cache/pointsman"
    cached = folder / "models" / catalog.DEFAULT.file
    if cached.is_file():
        return cached
    raise ConfigError(
        f"no model: give --model FILE_OR_DIRECTORY (there is no default model at {cached})"
    )


def resolve(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None,
    environment: Mapping[str, str],
    chat_template: str | None = None,
) -> ServeConfig:
    """Flags, environment and the model's own facts → the frozen configuration. Raises
    `ConfigError`; reads no file but those of TLS, and imports the logits processors.
    """
    max_model_len = _max_model_len(options.max_model_len, checkpoint)
    processors = _logits_processors(options)
    scheduler = _scheduler_config(options, max_model_len)
    speculative = speculative_config(options)
    api = api_config(options, checkpoint, max_model_len, environment)
    api = dataclasses.replace(api, logits_processors=processors)
    if options.enable_lora:
        allowed = environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
        api = dataclasses.replace(api, enable_adapter_routes=allowed or api.enable_admin_routes)
    if speculative is not None:
        most_drafts = speculative.num_speculative_tokens
        api = dataclasses.replace(api, num_speculative_tokens=most_drafts)
    eos_token_ids = (sim.IM_END_ID,) if checkpoint is None else checkpoint.eos_token_ids
    engine = configured(
        EngineConfig,
        options,
        model_path=None if checkpoint is None else os.path.abspath(checkpoint.path),
        fits_max_model_len=options.max_model_len is None,
        prefix_caching_hash_seed=options.prefix_caching_hash_seed
        or environment.get("PYTHONHASHSEED")
        or None,
        scheduler=scheduler,
        sim=sim_config(options, checkpoint, eos_token_ids),
        kv_events=kv_events_config(options, api.served_model_names[0], environment),
        eos_token_ids=eos_token_ids,
        speculative=speculative,
        vocab_size=api.vocab_size,
        lora=_lora_config(options),
        logits_processors=processors,
    )
    transfer = kv_transfer_config(options, engine)
    if transfer is not None:
        engine = dataclasses.replace(engine, kv_transfer=transfer)
        api = dataclasses.replace(api, kv_role=transfer.kv_role)
    offloading = kv_offloading_config(options, engine)
    engine = dataclasses.replace(engine, kv_offloading=offloading)
    return configured(
        ServeConfig,
        options,
        api=api,
        engine=engine,
        tls=tls_config(options),
        chat_template=chat_template,
        faults=fault_config(options, environment),
        lora_modules=_lora_modules(options),
    )


def _logits_processors(options: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(options.logits_processors))
    if names and options.engine == "sim":
        raise ConfigError("--logits-processors: --engine sim has no logits; use --engine torch")
    for name in names:
        load(name)
    return names


def _lora_config(options: argparse.Namespace) -> LoraConfig | None:
    if not options.enable_lora:
        return None
    num_held = options.max_cpu_loras or options.max_loras
    if num_held < options.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {num_held} is less than --max-loras {options.max_loras}: adapters"
            " come from the host's memory"
        )
    return configured(LoraConfig, options, max_cpu_loras=num_held)


def _lora_modules(options: argparse.Namespace) -> tuple[LoraModule, ...]:
    modules = tuple(map(_lora_module, options.lora_modules))
    if modules and not options.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    return modules


def _lora_module(text: str) -> LoraModule:
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=LoraModule)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--lora-modules {text}: {error}") from error
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora-modules {text}: give NAME=PATH, or JSON with name and path")
    return LoraModule(name, path)


def _max_model_len(asked: int | None, checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return asked or SIM_MAX_MODEL_LEN
    if asked is not None and asked > checkpoint.context_length:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's context of"
            f" {checkpoint.context_length} tokens"
        )
    return asked or checkpoint.context_length


def _scheduler_config(options: argparse.Namespace, max_model_len: int) -> SchedulerConfig:
    if not options.enable_chunked_prefill and options.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill runs a prompt in one step: --max-num-batched-tokens"
            f" {options.max_num_batched_tokens} must be at least --max-model-len {max_model_len}"
        )
    return configured(
        SchedulerConfig,
        options,
        max_model_len=max_model_len,
        in_batch_prefix_tokens=options.in_batch_prefix_tokens or None,
    )
