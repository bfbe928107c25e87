"""What it costs to verify drafts, on a model of random weights: by batch size and draft length.

Used by `speculation.py --random-weights`. Two tables: how long a step takes with k drafts for each
sequence, beside one without; and tokens per second through the whole engine when exactly so many
of k drafts stand, which a drafter brings about that knows the answers.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculation_runs import BLOCK_SIZE, MAX_MODEL_LEN, Lent, Outcome, Request, Subject, Turn

from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.interface import DraftContext
from worker.engine.scheduler import Scheduler
from worker.engine.speculation import Speculation
from worker.executor.interface import Executor, execute
from worker.executor.start import build_executor
from worker.types import Drafts, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SEED = 20261127
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 2, 3, 4, 6, 8)
PROMPT_TOKENS, REPEATS = 256, 11
GREEDY = SamplingParams(64, 0.0, ignore_eos=True)


def measure_verification(shape: str, batches: Sequence[int], is_quick: bool) -> dict[str, Any]:
    """Both tables, printed on the way. `batches` of one size or none: a range of sizes."""
    sizes: Sequence[int] = [n for n in BATCHES if n <= 4] if is_quick else BATCHES
    sizes = batches if len(batches) > 2 else sizes
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[shape])
        executor = random_executor(Path(folder), max(sizes))
    params = replace(GREEDY, max_tokens=16) if is_quick else GREEDY
    try:
        steps = time_steps(executor, sizes, 3 if is_quick else REPEATS)
        forced = [row for size in sizes for row in force(executor, size, params)]
    finally:
        executor.shutdown()
    return {"shape": shape, "steps": steps, "forced": forced}


# ---- the model ----------------------------------------------------------------------------------


def write_checkpoint(folder: Path, shape: Mapping[str, Any]) -> None:
    """A llama of this shape with random bfloat16 weights, of the size trained ones have."""
    config = {
        "model_type": "llama",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(SEED)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(shape["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{prefix}{name}.weight"] = weight(rows, columns)
    save_file(tensors, folder / "model.safetensors")


def random_executor(folder: Path, most: int) -> Executor:
    """The executor of a worker, with room for `most` sequences."""
    blocks = most * (PROMPT_TOKENS + GREEDY.max_tokens + BLOCK_SIZE) // BLOCK_SIZE + 8 * most
    config = EngineConfig(
        "torch",
        str(folder),
        num_blocks_override=blocks,
        block_size=BLOCK_SIZE,
        scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN),
    )
    return build_executor(config)[0]


def prompts(count: int) -> list[tuple[int, ...]]:
    """Random ones, always the same."""
    rng = random.Random(SEED)
    return [tuple(rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


# ---- steps by hand ------------------------------------------------------------------------------


def time_steps(executor: Executor, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a step without drafts, and the times of it that steps with k drafts take;
    all lengths in turn in every repeat.
    """
    print(f"{'batch':>5}{'ms':>9}" + "".join(f"{f'1+{k} rows':>10}" for k in LENGTHS))
    rows = []
    for size in sizes:
        for index, prompt in enumerate(prompts(size)):
            execute(executor, SchedulerOutput(0, (share(index, prompt, 0, 0),)))
        seconds: dict[int, list[float]] = {k: [] for k in (0, *LENGTHS)}
        for repeat in range(repeats + 2):
            for k, measured in seconds.items():
                drafts = [(3 + i + repeat,) * (1 + k) for i in range(size)]
                step = SchedulerOutput(
                    0, tuple(share(i, d, PROMPT_TOKENS, k) for i, d in enumerate(drafts))
                )
                started = time.perf_counter()
                execute(executor, step)
                if repeat >= 2:  # those before choose kernels
                    measured.append(time.perf_counter() - started)
        medians = {k: statistics.median(measured) for k, measured in seconds.items()}
        ratios = {k: medians[k] / medians[0] for k in LENGTHS}
        rows.append({"batch": size, "milliseconds": medians[0] * 1e3, "ratios": ratios})
        cells = "".join(f"{ratio:10.2f}" for ratio in ratios.values())
        print(f"{size:>5}{medians[0] * 1e3:9.2f}{cells}", flush=True)
    return rows


def share(index: int, tokens: Sequence[int], start: int, num_drafts: int) -> ScheduledSequence:
    """Sequence `index`, which has blocks of its own, runs `tokens`."""
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE + 2
    table = range(index * num_blocks, (index + 1) * num_blocks)
    known = start + len(tokens) - num_drafts
    spec = SampleSpec(GREEDY, known, num_prompt=PROMPT_TOKENS)
    return ScheduledSequence(index, tokens, start, table, (spec,), num_drafts=num_drafts)


# ---- the whole engine ---------------------------------------------------------------------------


class Forced:
    """Implements `Drafter`: `length` drafts of which exactly the first `num_right` are right."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], length: int, num_right: int
    ) -> None:
        self._answers = answers
        self._length = length
        self._num_right = num_right

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """What the answer goes on with, spoilt where it is to fall."""
        done = len(context.token_ids) - context.num_prompt
        answer = self._answers[tuple(context.token_ids[: context.num_prompt])]
        upcoming = answer[done : done + min(self._length, num_tokens)]
        tokens = tuple(
            token if index < self._num_right else token ^ 1 for index, token in enumerate(upcoming)
        )
        return Drafts(len(context.token_ids), tokens, (1.0,) * len(tokens)) if tokens else None

    def end(self, context: DraftContext, learns: bool) -> None:
        """Nothing to forget."""

    def learn(self, num_tokens: int) -> None:
        """Nothing to learn."""


def force(executor: Executor, size: int, params: SamplingParams) -> list[dict[str, Any]]:
    """Tokens per second of `size` sequences, plain and by (drafts, those that stand)."""
    job = [Request(prompt, params) for prompt in prompts(size)]
    run_forced(executor, job, None)
    plain = run_forced(executor, job, None)
    answers = {request.prompt: answer for request, answer in zip(job, plain.answers, strict=True)}
    rows = []
    for length in LENGTHS[1::2]:
        for num_right in sorted({0, length // 2, length}):
            before = run_forced(executor, job, None)
            outcome = run_forced(executor, job, Forced(answers, length, num_right))
            after = run_forced(executor, job, None)
            mean = (before.seconds_per_token + after.seconds_per_token) / 2
            row = {
                "batch": size,
                "k": length,
                "num_right": num_right,
                "plain_tokens_per_second": 1 / mean,
                "speed_up": mean / outcome.seconds_per_token,
                "tokens_per_step": outcome.num_decoded / max(outcome.num_shares, 1),
                "num_differing": sum(
                    mine != theirs
                    for mine, theirs in zip(outcome.answers, plain.answers, strict=True)
                ),
            }
            rows.append(row)
            print(
                f"batch {size}: {num_right} of {length} drafts stand,"
                f" {row['tokens_per_step']:.2f} tokens a step, {row['speed_up']:.2f} times"
                f" {row['plain_tokens_per_second']:.0f} tokens/s;"
                f" {row['num_differing']} answers differ",
                flush=True,
            )
    return rows


def run_forced(executor: Executor, job: Sequence[Request], drafter: Forced | None) -> Outcome:
    """One run of a fresh engine on the executor."""
    speculation = None
    if drafter is not None:
        config = SpeculativeConfig("ngram", max(LENGTHS), enable_adaptive_verification=False)
        speculation = Speculation(config, drafter, False)
    room = PROMPT_TOKENS + job[0].params.max_tokens + BLOCK_SIZE
    cache = CacheConfig(len(job) * (room // BLOCK_SIZE + 1), BLOCK_SIZE, False)
    limits = SchedulerConfig(len(job) * PROMPT_TOKENS, len(job), MAX_MODEL_LEN)
    scheduler = Scheduler(cache, limits, (), speculation)
    with ThreadPoolExecutor(max_workers=1) as thread:
        turn = Turn(thread)
        core = EngineCore(scheduler, executor, turn.clock, pipeline=turn.pipeline(Lent(executor)))
        subject = Subject("forced", core, turn)
        outcome = subject.run(job, "")
        subject.shutdown()
    return outcome
