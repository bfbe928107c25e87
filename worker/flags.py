"""The command line of a worker, in vLLM's spelling, and what it resolves to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from worker.config import ApiConfig, EngineConfig, SchedulerConfig, ServeConfig
from worker.errors import ConfigError
from worker.sim_flags import add_sim_flags, sim_config
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIM_MODEL_NAME = "sim"
SIM_MAX_MODEL_LEN = 8192
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_BODY_BYTES_LIMIT = 64 << 20

_scheduler = SchedulerConfig()


def build_parser() -> argparse.ArgumentParser:
    """The parser; an unknown flag is refused, not ignored."""
    parser = argparse.ArgumentParser(
        prog="pointsman worker",
        description="Serve one model over the OpenAI API.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="GGUF file or Hugging Face directory")
    parser.add_argument(
        "--engine",
        choices=("torch", "sim"),
        default="torch",
        help="torch runs the model; sim answers with words after the time a model would take, and"
        " needs neither a model nor torch",
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_engine_flags(parser.add_argument_group("engine"))
    add_sim_flags(parser.add_argument_group("simulator (--engine sim)"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    group.add_argument("--served-model-name", nargs="+", help="names to serve the model under")
    group.add_argument(
        "--api-key", nargs="+", default=[], help="bearer keys that /v1 routes ask for"
    )
    group.add_argument(
        "--max-num-queued-reqs",
        type=_at_least(0),
        help="answer 503 when so many requests wait (default: no limit)",
    )
    group.add_argument("--max-body-bytes", type=_at_least(1), default=4 << 20)
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running requests may take to finish after SIGTERM (default %(default)s)",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", choices=DTYPES, default="auto")
    group.add_argument("--max-model-len", type=_at_least(2), help="default: the model's own")
    group.add_argument("--block-size", type=_at_least(1), default=16)
    group.add_argument("--num-gpu-blocks-override", type=_at_least(1))
    group.add_argument("--max-num-seqs", type=_at_least(1), default=_scheduler.max_num_seqs)
    group.add_argument(
        "--max-num-batched-tokens", type=_at_least(1), default=_scheduler.max_num_batched_tokens
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=_at_least(0),
        default=0,
        help="tokens of one prompt per step at most; 0 is off",
    )
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    group.add_argument(
        "--seed", type=int, help="makes the seeds drawn for requests without one repeatable"
    )
    group.add_argument("--num-threads", type=_at_least(1), help="CPU threads of the torch engine")


class _at_least:  # noqa: N801 (an argparse type, called like a function)
    """An integer with a lower bound."""

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self._minimum:
            raise argparse.ArgumentTypeError(f"must be at least {self._minimum}, got {value}")
        return value


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


def resolve(options: argparse.Namespace, checkpoint: Checkpoint | None) -> ServeConfig:
    """Flags and the model's own facts → the frozen configuration. Pure; raises `ConfigError`."""
    block_size: int = options.block_size
    if block_size & (block_size - 1):
        raise ConfigError(f"--block-size must be a power of two, got {block_size}")
    if options.max_body_bytes > MAX_BODY_BYTES_LIMIT:
        raise ConfigError(f"--max-body-bytes may be {MAX_BODY_BYTES_LIMIT} at most")
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port must be in [0, 65535], got {options.port}")
    max_model_len = _max_model_len(options.max_model_len, checkpoint)
    name = SIM_MODEL_NAME if checkpoint is None else checkpoint.name
    path = None if checkpoint is None else str(checkpoint.path)
    return ServeConfig(
        host=options.host,
        port=options.port,
        api=ApiConfig(
            served_model_names=tuple(options.served_model_name or (name,)),
            max_model_len=max_model_len,
            vocab_size=sim.VOCAB_SIZE if checkpoint is None else checkpoint.vocab_size,
            accepted_model_names=() if path is None else (path,),
            model_root=path or name,
            api_keys=tuple(options.api_key),
            max_body_bytes=options.max_body_bytes,
            max_num_seqs=options.max_num_seqs,
            max_num_queued_reqs=options.max_num_queued_reqs,
            seed=options.seed,
        ),
        engine=_engine_config(options, checkpoint, max_model_len),
        shutdown_timeout_seconds=max(0.0, options.shutdown_timeout),
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


def _engine_config(
    options: argparse.Namespace, checkpoint: Checkpoint | None, max_model_len: int
) -> EngineConfig:
    eos_token_ids = (sim.IM_END_ID,) if checkpoint is None else checkpoint.eos_token_ids
    return EngineConfig(
        engine=options.engine,
        model_path=None if checkpoint is None else os.path.abspath(checkpoint.path),
        dtype=options.dtype,
        block_size=options.block_size,
        num_blocks_override=options.num_gpu_blocks_override,
        enable_prefix_caching=options.enable_prefix_caching,
        num_threads=options.num_threads,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
        ),
        sim=sim_config(options, checkpoint, eos_token_ids),
        eos_token_ids=eos_token_ids,
    )
