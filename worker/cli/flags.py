"""The command line of a worker, and the configuration that it resolves to."""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from base.flags import Parser, add_flags, configured
from base.shelves import load_shelf
from worker.catalog import DEFAULT_FILE
from worker.cli.kv import kv_events_config, kv_offloading_config, kv_transfer_config
from worker.cli.server import api_config, read_chat_template, tls_config
from worker.cli.speculation import speculative_config
from worker.cli.table import DIALECT, FLAGS
from worker.config import (
    SIM_TOKENIZER,
    EngineConfig,
    LoraConfig,
    LoraModule,
    SchedulerConfig,
    ServeConfig,
)
from worker.errors import ConfigError
from worker.logits_processors import load
from worker.tokenizer.checkpoint import Checkpoint, read_checkpoint

SIM_MAX_MODEL_LEN = 8192
# By name: the core must not import the shelf, and works without it.
_SIM_FLAGS = "worker.sim.flags"


def build_parser(kind: type[Parser] = Parser) -> Parser:
    """Return a parser of all flags, with those of the simulator where it is installed."""
    parser = kind(prog="pointsman worker", description="Serve one model over the OpenAI API.")
    add_flags(parser, FLAGS, DIALECT)
    shelf = load_shelf(_SIM_FLAGS)
    if shelf is not None:
        shelf.add_sim_flags(parser.add_argument_group("simulator (--engine sim)"))
    return parser


def find_model(options: argparse.Namespace, environment: Mapping[str, str]) -> Path | None:
    """Find the model by the flag, `POINTSMAN_MODEL` or the cache. Raises `ConfigError`."""
    given = options.model or environment.get("POINTSMAN_MODEL")
    if options.engine == "sim":
        return Path(options.model) if options.model else None
    if given:
        return Path(given)
    cache = environment.get("POINTSMAN_CACHE")
    folder = Path(cache) if cache else Path.home() / ".cache/pointsman"
    cached = folder / "models" / DEFAULT_FILE
    if cached.is_file():
        return cached
    raise ConfigError(
        f"no model: give --model FILE_OR_DIRECTORY (there is no default model at {cached})"
    )


def read_config(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[ServeConfig, Checkpoint | None]:
    """Read the model's text settings (None: the simulator's) and resolve the flags. Raises
    `WorkerError`.
    """
    path = find_model(options, environment)
    is_sim = options.engine == "sim"
    checkpoint = None if path is None else read_checkpoint(path, any_architecture=is_sim)
    return resolve(options, checkpoint, environment, read_chat_template(options)), checkpoint


def resolve(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None,
    environment: Mapping[str, str],
    chat_template: str | None = None,
) -> ServeConfig:
    """Make the configuration of flags, environment and the model's facts. Raises `ConfigError`."""
    shelf = load_shelf(_SIM_FLAGS)
    if shelf is None and options.engine == "sim":
        raise ConfigError("--engine sim needs worker.sim, which is not installed")
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
    sim: Any = load_shelf(SIM_TOKENIZER)
    eos_token_ids = (sim.IM_END_ID,) if checkpoint is None else checkpoint.eos_token_ids
    engine = configured(
        EngineConfig,
        options,
        # The engine process may have another working directory.
        model_path=None if checkpoint is None else os.path.abspath(checkpoint.path),
        fits_max_model_len=options.max_model_len is None,
        # PYTHONHASHSEED is vLLM's: with one value of it, both name blocks alike.
        prefix_caching_hash_seed=options.prefix_caching_hash_seed
        or environment.get("PYTHONHASHSEED")
        or None,
        scheduler=scheduler,
        sim=None if shelf is None else shelf.sim_config(options, checkpoint, eos_token_ids),
        kv_events=kv_events_config(options, api.served_model_names[0], environment),
        eos_token_ids=eos_token_ids,
        speculative=speculative,
        vocab_size=api.vocab_size,
        lora=_lora_config(options),
        logits_processors=processors,
    )
    transfer = kv_transfer_config(options)
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
        faults=None if shelf is None else shelf.fault_config(options, environment),
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
