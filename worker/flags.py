"""The command line of a worker, in vLLM's spelling, and what it resolves to."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from worker.config import ServeConfig
from worker.engine_flags import (
    add_engine_flags,
    add_failure_flags,
    add_scheduler_flags,
    engine_config,
    kv_events_config,
    scheduler_config,
)
from worker.errors import ConfigError
from worker.faults.sim_flags import add_sim_flags, fault_config, sim_config
from worker.server_flags import add_model_flags, add_server_flags, api_config, tls_config
from worker.speculation_flags import add_speculation_flags, speculative_config
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIM_MAX_MODEL_LEN = 8192


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
        help="GGUF file or Hugging Face directory (default: POINTSMAN_MODEL, else a small one)",
    )
    model.add_argument(
        "--engine",
        choices=("torch", "sim"),
        default="torch",
        help="torch runs the model; sim answers with words after the time a model would take, and"
        " needs neither a model nor torch",
    )
    add_model_flags(model)
    add_server_flags(parser.add_argument_group("server"))
    add_engine_flags(parser.add_argument_group("engine"))
    add_scheduler_flags(parser.add_argument_group("scheduler"))
    add_speculation_flags(parser.add_argument_group("speculative decoding"))
    add_failure_flags(parser.add_argument_group("engine failures"))
    add_sim_flags(parser.add_argument_group("simulator (--engine sim)"))
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
    cached = folder / "models" / DEFAULT_MODEL_FILE
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
    `ConfigError`; reads no file but those of TLS.
    """
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port must be in [0, 65535], got {options.port}")
    max_model_len = _max_model_len(options.max_model_len, checkpoint)
    speculative = speculative_config(options)
    api = api_config(options, checkpoint, max_model_len, environment)
    if speculative is not None:
        most_drafts = speculative.num_speculative_tokens
        api = dataclasses.replace(api, num_speculative_tokens=most_drafts)
    eos_token_ids = (sim.IM_END_ID,) if checkpoint is None else checkpoint.eos_token_ids
    engine = engine_config(
        options,
        checkpoint,
        environment,
        kv_events_config(options, api.served_model_names[0], environment),
        sim_config(options, checkpoint, eos_token_ids),
    )
    return ServeConfig(
        host=options.host,
        port=options.port,
        api=api,
        engine=dataclasses.replace(
            engine,
            scheduler=scheduler_config(options, max_model_len),
            eos_token_ids=eos_token_ids,
            speculative=speculative,
            vocab_size=api.vocab_size,
        ),
        shutdown_timeout_seconds=options.shutdown_timeout,
        engine_failure_policy=options.engine_failure_policy,
        max_engine_restarts=options.max_engine_restarts,
        heartbeat_timeout_seconds=options.heartbeat_timeout,
        uds=options.uds,
        tls=tls_config(options),
        chat_template=chat_template,
        faults=fault_config(options, environment),
    )


def _max_model_len(asked: int | None, checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return asked or SIM_MAX_MODEL_LEN
    if asked is not None and asked > checkpoint.context_length:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's context of"
            f" {checkpoint.context_length} tokens"
        )
    return asked or checkpoint.context_length
