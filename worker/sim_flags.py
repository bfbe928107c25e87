"""The simulator's part of the worker's command line (`--engine sim`)."""

from __future__ import annotations

import argparse

from worker.config import SimConfig
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

_sim = SimConfig()


def add_sim_flags(group: argparse._ArgumentGroup) -> None:
    """Add the simulator's flags; times are in milliseconds."""
    group.add_argument(
        "--sim-prefill-tokens-per-second",
        type=_positive,
        default=_sim.prefill_tokens_per_second,
    )
    milliseconds = (
        ("--sim-decode-base-ms", _sim.decode_base_seconds),
        ("--sim-decode-per-seq-ms", _sim.decode_per_sequence_seconds),
        ("--sim-step-overhead-ms", _sim.step_overhead_seconds),
    )
    for flag, seconds in milliseconds:
        group.add_argument(flag, type=_not_negative, default=seconds * 1e3)
    group.add_argument("--sim-time-scale", type=_not_negative, default=_sim.time_scale)
    group.add_argument("--sim-seed", type=int, default=_sim.seed)
    group.add_argument(
        "--sim-mean-output-tokens",
        type=_positive,
        default=_sim.mean_output_tokens,
        help="average length of answers that max_tokens does not cut; with ignore_eos they all run"
        " to max_tokens",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def sim_config(
    options: argparse.Namespace, checkpoint: Checkpoint | None, eos_token_ids: tuple[int, ...]
) -> SimConfig:
    """The simulator's configuration. With a checkpoint, answers are words of its vocabulary."""
    first, count = sim.FIRST_WORD_ID, sim.NUM_WORDS
    if checkpoint is not None:
        # Real vocabularies begin with control tokens and bytes; what follows is ordinary text.
        first = min(512, checkpoint.vocab_size // 2)
        count = max(1, min(16_384, checkpoint.vocab_size - first))
    return SimConfig(
        prefill_tokens_per_second=options.sim_prefill_tokens_per_second,
        decode_base_seconds=options.sim_decode_base_ms / 1e3,
        decode_per_sequence_seconds=options.sim_decode_per_seq_ms / 1e3,
        step_overhead_seconds=options.sim_step_overhead_ms / 1e3,
        time_scale=options.sim_time_scale,
        seed=options.sim_seed,
        first_word_id=first,
        num_words=count,
        end_token_id=eos_token_ids[0] if eos_token_ids else None,
        mean_output_tokens=options.sim_mean_output_tokens,
    )
