"""Tokens per second of the model runner, by dtype, batch size and threads, beside transformers.

    python benchmarks/worker_engine.py [--model FILE.gguf] [--threads 2,1] [--steps 32]

Steps are made by hand, so this is the model alone: no scheduler, no HTTP. Prompts are random token
ids from a fixed seed. Each measurement is the median over repeats, transformers in the same run on
the same dequantised weights. Results go to benchmarks/results/worker_engine.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_files import RESULTS, write_results

# Before torch is imported: waiting threads must not spin on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from worker.config import EngineConfig, SchedulerConfig
from worker.executor.interface import Executor
from worker.executor.model_runner import build_executor, choose_dtype
from worker.models.loader import GgufCheckpoint
from worker.ops.linear import can_pack
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 128
PREFILL_TOKENS = 512
BLOCK_SIZE = 16
REPEATS = 3
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
RESULTS_FILE = RESULTS / "worker_engine.json"
DEFAULT_MODEL = Path.home() / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def prompts(count: int, length: int) -> list[list[int]]:
    """Random prompts, always the same ones."""
    draw = random.Random(20260101)
    return [[draw.randrange(17, 49152) for _ in range(length)] for _ in range(count)]


def median_seconds(measure: Callable[[], float]) -> float:
    """Median over repeats, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


class Ours:
    """The model runner behind the two measurements."""

    def __init__(self, path: Path, dtype: str) -> None:
        limits = SchedulerConfig(max_model_len=1024)
        self.executor: Executor = build_executor(
            EngineConfig("torch", str(path), dtype, num_blocks_override=1200, scheduler=limits)
        )[0]

    def _run(self, chunks: list[list[int]], start: int) -> list[int]:
        sequences = tuple(
            ScheduledSequence(
                index,
                tokens,
                start,
                range(index * 64, index * 64 + 64),
                (SampleSpec(GREEDY, start + len(tokens)),),
            )
            for index, tokens in enumerate(chunks)
        )
        sampled = self.executor.execute(SchedulerOutput(0, sequences)).sampled
        return [sampled[index][0].token_id for index in range(len(chunks))]

    def prefill(self, prompt: list[int]) -> float:
        """Seconds of one prompt in one step."""
        started = time.perf_counter()
        self._run([prompt], 0)
        return time.perf_counter() - started

    def decode(self, batch: list[list[int]], steps: int) -> float:
        """Seconds of `steps` decode steps after the prompts are in the cache."""
        tokens = self._run(batch, 0)
        started = time.perf_counter()
        for step in range(steps):
            tokens = self._run([[t] for t in tokens], PROMPT_TOKENS + step)
        return time.perf_counter() - started


class Transformers:
    """`LlamaForCausalLM.generate` in float32 on the same weights."""

    def __init__(self, path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        checkpoint = GgufCheckpoint(path)
        shape = checkpoint.config
        self.model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                max_position_embeddings=shape.max_context,
                rms_norm_eps=shape.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
                tie_word_embeddings=shape.tied_head,
            )
        ).eval()
        weights = {name: checkpoint.read(name) for name in checkpoint.shapes()}
        self.model.load_state_dict(weights, strict=False)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Seconds of one prompt, logits of its last token only."""
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        self.model(ids, logits_to_keep=1)
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, batch: list[list[int]], steps: int) -> float:
        """Seconds of `steps` tokens of `generate`, less those of its prefill."""
        ids = torch.tensor(batch)

        def generate(count: int) -> float:
            started = time.perf_counter()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=2,
            )
            return time.perf_counter() - started

        return generate(steps + 1) - generate(1)


def measure(subject: Ours | Transformers, steps: int) -> dict[str, float]:
    """Tokens per second of prefill and of decode at each batch size."""
    [prompt] = prompts(1, PREFILL_TOKENS)
    rates = {"prefill": PREFILL_TOKENS / median_seconds(lambda: subject.prefill(prompt))}
    for size in BATCHES:
        batch = prompts(size, PROMPT_TOKENS)
        seconds = median_seconds(lambda batch=batch: subject.decode(batch, steps))
        rates[f"decode {size}"] = size * steps / seconds
    return {name: round(rate, 1) for name, rate in rates.items()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Rates in tokens per second, one row a subject and thread count."""
    columns = [name for name in rows[0] if name not in ("engine", "dtype", "threads")]
    print(f"{'engine':14}{'dtype':10}{'threads':>7}" + "".join(f"{c:>12}" for c in columns))
    for row in rows:
        rates = "".join(f"{row[c]:12.1f}" for c in columns)
        print(f"{row['engine']:14}{row['dtype']:10}{row['threads']:7}{rates}")


def main() -> None:
    """Measure everything, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    subjects: dict[tuple[str, str], Ours | Transformers] = {
        ("pointsman", "float32"): Ours(options.model, "float32"),
        ("pointsman", "bfloat16"): Ours(options.model, "bfloat16"),
        ("transformers", "float32"): Transformers(options.model),
    }
    rows: list[dict[str, Any]] = []
    for threads in [int(t) for t in options.threads.split(",")]:
        torch.set_num_threads(threads)
        for (engine, dtype), subject in subjects.items():
            rates = measure(subject, options.steps)
            rows.append({"engine": engine, "dtype": dtype, "threads": threads, **rates})
    print_table(rows)
    auto = choose_dtype("auto", torch.device("cpu"), can_pack(torch.bfloat16))
    print(f"auto: {auto}; prompts of {PROMPT_TOKENS} tokens, prefill of {PREFILL_TOKENS}")
    machine = {"cpu": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    document = {"machine": machine, "auto_dtype": str(auto), "tokens_per_second": rows}
    write_results(RESULTS_FILE, document)


if __name__ == "__main__":
    main()
