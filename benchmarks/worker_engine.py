"""Tokens per second of the model runner beside other engines, and by the type of its weights.

    python benchmarks/worker_engine.py --peers [--model FILE.gguf] [--llama-bin DIR]
    python benchmarks/worker_engine.py --weights

Steps are made by hand, so this is the model alone: no scheduler, no HTTP. Prompts are random token
ids from a fixed seed.

With --peers other engines decode the same file in turns with ours: llama.cpp (`--llama-bin` is the
folder of its `llama-batched-bench`) and transformers, on the same weights in float32. One that is
absent is skipped with a line. Rates are medians over turns, by wall time and by CPU time; a ratio
is the median over turns of ours over the peer's in the same turn.

With --weights, types of weights take turns on one thread: safetensors of random weights in the
shape of SmolLM2-135M, in float32 and bfloat16, and the latter quantised as they are loaded. CPU
milliseconds of a decode step are the least over turns.

Both write benchmarks/results/worker_engine.json.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from measuring import DEFAULT_MODEL, Table, command_line, numbers, write_results

# Before torch is imported: waiting threads must not spin on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from fleet.bench.offline.random_weights import write_checkpoint
from worker.config import EngineConfig, SchedulerConfig
from worker.executor.interface import Executor, execute
from worker.executor.start import build_executor
from worker.models.checkpoints import GgufCheckpoint, read
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

PROMPT_TOKENS, PREFILL_TOKENS = 128, 512
BLOCKS_EACH = 64
MAX_SEQUENCES = 32
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# A name, the dtype in the file, and the changes of the configuration.
WEIGHTS: tuple[tuple[str, torch.dtype, dict[str, str]], ...] = (
    ("float32", torch.float32, {}),
    ("bfloat16", torch.bfloat16, {}),
    ("q8_0", torch.bfloat16, {"quantization": "q8_0"}),
    ("q4_1", torch.bfloat16, {"quantization": "q4_1"}),
    ("q4_1, KV bfloat16", torch.bfloat16, {"quantization": "q4_1", "kv_cache_dtype": "bfloat16"}),
    ("q4_1, int8", torch.bfloat16, {"quantization": "q4_1", "cpu_activations": "int8"}),
)
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
LLAMA_PROGRAM = "llama-batched-bench"


def prompts(count: int, length: int) -> list[list[int]]:
    """Random prompts, always the same ones."""
    draw = random.Random(20260101)
    return [[draw.randrange(17, 49152) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens a second by wall time and, where it is known, by CPU time."""

    tokens_per_second: float
    per_cpu_second: float | None = None


class Stopwatch:
    """Wall and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu_at = time.perf_counter(), time.process_time()

    def seconds(self) -> tuple[float, float]:
        """Seconds of prefill and decode so far."""
        return time.perf_counter() - self._began, time.process_time() - self._cpu_at

    def turn(self, num_tokens: int) -> Turn:
        """The rates of that many tokens."""
        wall, cpu = self.seconds()
        return Turn(num_tokens / wall, num_tokens / cpu)


class Engine(Protocol):
    """An engine that is measured."""

    def decode(self, size: int, steps: int) -> Turn:
        """`steps` tokens for each of `size` sequences; their prompts are not counted."""

    def prefill(self) -> Turn:
        """Run the prefill of one prompt."""


class Ours:
    """The project's model runner as a rival."""

    def __init__(self, path: Path, dtype: str, **changes: Any) -> None:
        config = EngineConfig(
            "torch",
            str(path),
            dtype,
            num_blocks_override=MAX_SEQUENCES * BLOCKS_EACH + 1,
            scheduler=SchedulerConfig(max_model_len=1024),
            **changes,
        )
        self.executor: Executor = build_executor(config)[0]

    def _run(self, chunks: list[list[int]], start: int) -> list[int]:
        sequences = tuple(
            ScheduledSequence(
                index,
                tokens,
                start,
                range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH),
                (SampleSpec(GREEDY, start + len(tokens)),),
            )
            for index, tokens in enumerate(chunks)
        )
        sampled = execute(self.executor, SchedulerOutput(0, sequences)).sampled
        return [sampled[index][0].token_id for index in range(len(chunks))]

    def decode(self, size: int, steps: int) -> Turn:
        tokens = self._run(prompts(size, PROMPT_TOKENS), 0)
        watch = Stopwatch()
        for step in range(steps):
            tokens = self._run([[t] for t in tokens], PROMPT_TOKENS + step)
        return watch.turn(size * steps)

    def prefill(self) -> Turn:
        watch = Stopwatch()
        self._run(prompts(1, PREFILL_TOKENS), 0)
        return watch.turn(PREFILL_TOKENS)


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
        weights = {name: read(checkpoint, name) for name in checkpoint.shapes()}
        self.model.load_state_dict(weights, strict=False)

    def decode(self, size: int, steps: int) -> Turn:
        """The difference of two lengths, so that prompts drop out."""
        short, long = (self._generate(size, count) for count in (1, steps + 1))
        wall, cpu = (b - a for a, b in zip(short, long, strict=True))
        return Turn(size * steps / wall, size * steps / cpu)

    @torch.inference_mode()
    def _generate(self, size: int, count: int) -> tuple[float, float]:
        ids = torch.tensor(prompts(size, PROMPT_TOKENS))
        watch = Stopwatch()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=2,
        )
        return watch.seconds()

    @torch.inference_mode()
    def prefill(self) -> Turn:
        """Logits of the last token only."""
        ids = torch.tensor(prompts(1, PREFILL_TOKENS))
        watch = Stopwatch()
        self.model(ids, logits_to_keep=1)
        return watch.turn(PREFILL_TOKENS)


class Llama:
    """`llama-batched-bench`, a process for each measurement."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._program, self._model, self._threads = folder / LLAMA_PROGRAM, model, threads
        if not self._program.is_file():
            raise FileNotFoundError(f"no {LLAMA_PROGRAM} in {folder}")

    def decode(self, size: int, steps: int) -> Turn:
        """CPU time is the difference of two lengths: loading and the prompt drop out."""
        _, short = self._run(PROMPT_TOKENS, 1, size)
        line, long = self._run(PROMPT_TOKENS, steps + 1, size)
        return Turn(line["speed_tg"], size * steps / max(long - short, 1e-3))

    def prefill(self) -> Turn:
        return Turn(self._run(PREFILL_TOKENS, 1, 1)[0]["speed_pp"])

    def _run(self, prompt: int, steps: int, batch: int) -> tuple[dict[str, float], float]:
        """The program's own line, and the CPU seconds of the process."""
        sizes = {"-npp": prompt, "-ntg": steps, "-npl": batch, "-c": batch * (prompt + steps)}
        sizes |= {"-b": 2048, "-ub": 512, "-t": self._threads, "-tb": self._threads}
        command = [str(self._program), "-m", str(self._model), "--output-format", "jsonl"]
        command += [str(word) for pair in sizes.items() for word in pair]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        [line] = [text for text in done.stdout.splitlines() if text.startswith("{")]
        values: dict[str, float] = json.loads(line)
        return values, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def find_peers(options: argparse.Namespace, threads: int) -> dict[str, Engine]:
    """The peers that are present."""
    peers: dict[str, Engine] = {}
    builders: dict[str, Callable[[], Engine]] = {
        "llama.cpp": lambda: Llama(options.llama_bin or Path("llama"), options.model, threads),
        "transformers": lambda: Transformers(options.model),
    }
    for name, build in builders.items():
        try:
            peers[name] = build()
        except (FileNotFoundError, ImportError, KeyError) as error:
            print(f"{name} skipped: {error}")
    return peers


def take_turns(
    ours: Engine, peers: dict[str, Engine], run: Callable[[Engine], Turn], repeats: int
) -> dict[str, dict[str, float | None]]:
    """Medians of every engine, and of our rate over each peer's of the same turn."""
    run(ours)  # chooses kernels
    turns: dict[str, list[Turn]] = {name: [] for name in ("pointsman", *peers)}
    ratios: dict[str, list[tuple[float, float | None]]] = {name: [] for name in peers}
    for _ in range(repeats):
        own = run(ours)
        turns["pointsman"].append(own)
        for name, peer in peers.items():
            turn = run(peer)
            turns[name].append(turn)
            by_cpu = own.per_cpu_second / turn.per_cpu_second if turn.per_cpu_second else None
            ratios[name].append((own.tokens_per_second / turn.tokens_per_second, by_cpu))
    return {
        name: {
            "per_second": median_of(turn.tokens_per_second for turn in some),
            "per_cpu_second": median_of(turn.per_cpu_second for turn in some),
            "ours_over": median_of(ratio for ratio, _ in ratios.get(name, ())),
            "by_cpu": median_of(ratio for _, ratio in ratios.get(name, ())),
        }
        for name, some in turns.items()
    }


def median_of(values: Iterable[float | None]) -> float | None:
    """None where no value is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare_with_peers(options: argparse.Namespace) -> None:
    """Decoding by batch size and prefill, for each number of threads."""
    figures = ("per_second .1f", "per_cpu_second .1f", "ours_over .2f", "by_cpu .2f")
    table = Table("threads", "what <12", "engine <14", *figures)
    for threads in options.threads:
        torch.set_num_threads(threads)
        ours = Ours(options.model, options.dtype, cpu_activations=options.cpu_activations)
        peers = find_peers(options, threads)
        runs: dict[str, Callable[[Engine], Turn]] = {
            f"decode {size}": lambda engine, size=size: engine.decode(size, options.steps)
            for size in options.batches
        }
        runs["prefill"] = lambda engine: engine.prefill()
        for what, run in runs.items():
            for engine, row in take_turns(ours, peers, run, options.repeats).items():
                table.add(threads=threads, what=what, engine=engine, **row)
    write_results(options, rows=table.rows)


def measure_weights(options: argparse.Namespace) -> None:
    """Types of weights in turns: the least CPU milliseconds of a decode step."""
    torch.set_num_threads(1)
    shape = SMOLLM2_135M | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            dtype: write_checkpoint(Path(folder) / str(dtype), shape, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        subjects = {name: Ours(paths[dtype], "auto", **changes) for name, dtype, changes in WEIGHTS}
    sizes = [size for size in (1, 16) if size <= max(options.batches)]
    least: dict[tuple[str, int], float] = {}
    for size in sizes:
        for _ in range(options.repeats):
            for name, subject in subjects.items():
                spent = 1e3 * size / (subject.decode(size, options.steps).per_cpu_second or 1)
                least[name, size] = min(spent, least.get((name, size), spent))
    table = Table("weights <20", *(f"cpu_ms_at_{size} .2f" for size in sizes))
    for name in subjects:
        table.add(weights=name, **{f"cpu_ms_at_{size}": least[name, size] for size in sizes})
    write_results(options, rows=table.rows)


def main() -> None:
    """Compare with peers, or types of weights."""
    parser = command_line(__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--peers", action="store_true", help="compare with other engines")
    mode.add_argument("--weights", action="store_true", help="compare types of weights")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=numbers(int), default=[2, 1])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batches", type=numbers(int), default=[1, 4, 16, 32])
    parser.add_argument("--repeats", type=int, help="default: 3; of types of weights, 7")
    parser.add_argument("--dtype", default="float32", help="ours, with --peers")
    parser.add_argument("--cpu-activations", default="float32", help="ours, with --peers")
    parser.add_argument("--llama-bin", type=Path, help="the folder of llama-batched-bench")
    parser.add_argument("--layers", type=int, default=30, help="with --weights")
    options = parser.parse_args()
    options.repeats = options.repeats or (7 if options.weights else 3)
    if options.weights:
        measure_weights(options)
    else:
        compare_with_peers(options)


if __name__ == "__main__":
    main()
