"""Tokens per second of the model runner, by dtype, batch size and threads, beside transformers.

    python benchmarks/worker_engine.py [--model FILE.gguf] [--threads 2,1] [--steps 32]
    python benchmarks/worker_engine.py --peers [--llama-bin DIR] [--vllm-python PYTHON]
    python benchmarks/worker_engine.py --weights

Steps are made by hand, so this is the model alone: no scheduler, no HTTP. Prompts are random token
ids from a fixed seed. Each measurement is the median over repeats, transformers in the same run on
the same dequantised weights. Results go to benchmarks/results/worker_engine.json.

With --peers other engines decode the same file in turns with ours: llama.cpp (`--llama-bin` is the
folder of its `llama-batched-bench`), vLLM's CPU build (`--vllm-python` is an interpreter that can
import it) and transformers. One that is absent is skipped with a line. A ratio is the median over
turns of ours over the peer's in the same turn; results go to worker_engine_peers.json.

With --weights, types of weights take turns on one thread: safetensors of random weights in the
shape of SmolLM2-135M, in float32 and bfloat16, and the latter quantised as they are loaded. CPU
milliseconds of a decode step are the least over turns; results go to worker_engine_weights.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine_peers import Llama, Turn, Vllm
from result_files import RESULTS, write_results

# Before torch is imported: waiting threads must not spin on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from safetensors.torch import save_file

from worker.config import EngineConfig, SchedulerConfig
from worker.executor.interface import Executor, execute
from worker.executor.start import build_executor, choose_dtype
from worker.models.config import from_hf
from worker.models.loader import GgufCheckpoint, expected_shapes
from worker.ops.linear import can_pack
from worker.types import (
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 128
PREFILL_TOKENS = 512
BLOCKS_EACH = 64
MAX_SEQUENCES = 32
REPEATS = 3
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
RESULTS_FILE = RESULTS / "worker_engine.json"
PEERS_FILE = RESULTS / "worker_engine_peers.json"
WEIGHTS_FILE = RESULTS / "worker_engine_weights.json"
# A name, the dtype in the file, and what the configuration says.
WEIGHTS: tuple[tuple[str, torch.dtype, dict[str, str]], ...] = (
    ("float32", torch.float32, {}),
    ("bfloat16", torch.bfloat16, {}),
    ("q8_0", torch.bfloat16, {"quantization": "q8_0"}),
    ("q4_1", torch.bfloat16, {"quantization": "q4_1"}),
    ("q4_1, KV bfloat16", torch.bfloat16, {"quantization": "q4_1", "kv_cache_dtype": "bfloat16"}),
    ("q4_1, int8", torch.bfloat16, {"quantization": "q4_1", "cpu_activations": "int8"}),
)
WEIGHT_TURNS = 7
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

    def prefill(self, prompt: list[int]) -> float:
        """Seconds of one prompt in one step."""
        started = time.perf_counter()
        self._run([prompt], 0)
        return time.perf_counter() - started

    def fill(self, batch: list[list[int]]) -> list[int]:
        """Prompts into the cache; the first token of each answer."""
        return self._run(batch, 0)

    def continue_with(self, tokens: list[int], steps: int) -> None:
        """`steps` decode steps from those tokens."""
        for step in range(steps):
            tokens = self._run([[t] for t in tokens], PROMPT_TOKENS + step)

    def step_times(self, batch: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps."""
        tokens, times = self.fill(batch), []
        for step in range(steps):
            started = time.perf_counter()
            tokens = self._run([[t] for t in tokens], PROMPT_TOKENS + step)
            times.append(time.perf_counter() - started)
        return times

    def decode(self, batch: list[list[int]], steps: int) -> float:
        """Seconds of `steps` decode steps after the prompts are in the cache."""
        tokens = self.fill(batch)
        started = time.perf_counter()
        self.continue_with(tokens, steps)
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


def timed(seconds: Callable[[], float], tokens: int) -> Turn:
    """Of an engine in this process, whose own measure leaves its preparation out."""
    return Turn(tokens / seconds())


def ours_decode(ours: Ours, batch: list[list[int]], steps: int) -> Turn:
    """Both rates; the CPU time of the prompts drops out."""
    tokens = ours.fill(batch)
    before, started = time.process_time(), time.perf_counter()
    ours.continue_with(tokens, steps)
    wall, spent = time.perf_counter() - started, time.process_time() - before
    return Turn(len(batch) * steps / wall, len(batch) * steps / spent)


Peer = tuple[str, Callable[[int], Turn], Callable[[], Turn]]


def find_peers(options: argparse.Namespace, threads: int) -> list[Peer]:
    """Those present: a name, decode by batch size, prefill."""
    steps, [prompt] = options.steps, prompts(1, PREFILL_TOKENS)
    peers: list[Peer] = []
    try:
        llama = Llama(options.llama_bin or Path("llama"), options.model, threads)
        decode = partial(llama.decode, prompt=PROMPT_TOKENS, steps=steps)
        peers.append(("llama.cpp", decode, partial(llama.prefill, PREFILL_TOKENS)))
    except FileNotFoundError as error:
        print(f"llama.cpp skipped: {error}")
    if options.vllm_python is None:
        print("vLLM skipped: no --vllm-python")
    else:
        vllm = Vllm(options.vllm_python, options.model, threads)
        peers.append(
            (
                "vllm",
                lambda size: vllm.decode(prompts(size, PROMPT_TOKENS), steps),
                lambda: vllm.prefill(prompt),
            )
        )
    try:
        hugging = Transformers(options.model)
    except (ImportError, KeyError) as error:
        print(f"transformers skipped: {error!r}")
    else:
        peers.append(
            (
                "transformers",
                lambda size: timed(
                    lambda: hugging.decode(prompts(size, PROMPT_TOKENS), steps), size * steps
                ),
                lambda: timed(lambda: hugging.prefill(prompt), PREFILL_TOKENS),
            )
        )
    return peers


def take_turns(ours: Callable[[], Turn], peers: dict[str, Callable[[], Turn]]) -> dict[str, Any]:
    """Medians of every engine, and of our rate over each peer's of the same turn."""
    ours()
    own: list[Turn] = []
    pairs: dict[str, list[tuple[Turn, Turn]]] = {name: [] for name in peers}
    for _ in range(REPEATS):
        for name, run in peers.items():
            own.append(ours())
            try:
                pairs[name].append((own[-1], run()))
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(f"{name} failed: {error}")
        if not peers:
            own.append(ours())
    measured = {"pointsman": summary(own)}
    for name, both in pairs.items():
        measured[name] = summary([peer for _, peer in both])
        walls = [a.tokens_per_second / b.tokens_per_second for a, b in both]
        measured[name]["ratio"] = median_of(walls)
        measured[name]["cpu_ratio"] = median_of(
            [
                a.per_cpu_second / b.per_cpu_second
                for a, b in both
                if a.per_cpu_second and b.per_cpu_second
            ]
        )
    return measured


def summary(turns: list[Turn]) -> dict[str, float | None]:
    """Medians of one engine."""
    cpu = [turn.per_cpu_second for turn in turns if turn.per_cpu_second is not None]
    return {
        "per_second": median_of([turn.tokens_per_second for turn in turns]),
        "per_cpu_second": median_of(cpu),
    }


def median_of(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def compare_with_peers(options: argparse.Namespace) -> None:
    """Print a table for each number of threads, and write them all."""
    [prompt] = prompts(1, PREFILL_TOKENS)
    document: dict[str, Any] = {
        "model": options.model.name,
        "cores": os.cpu_count(),
        "activations": options.cpu_activations,
    }
    for threads in [int(t) for t in options.threads.split(",")]:
        torch.set_num_threads(threads)
        ours = Ours(options.model, options.dtype, cpu_activations=options.cpu_activations)
        peers = find_peers(options, threads)
        rows = {}
        for size in [int(size) for size in options.batches.split(",")]:
            rows[f"decode {size}"] = take_turns(
                partial(ours_decode, ours, prompts(size, PROMPT_TOKENS), options.steps),
                {name: partial(decode, size) for name, decode, _ in peers},
            )
            print_turns(threads, f"decode {size}", rows[f"decode {size}"])
        rows["prefill"] = take_turns(
            lambda ours=ours: timed(lambda: ours.prefill(prompt), PREFILL_TOKENS),
            {name: prefill for name, _, prefill in peers},
        )
        print_turns(threads, "prefill", rows["prefill"])
        document[f"{threads} threads"] = rows
    write_results(PEERS_FILE, document)


def print_turns(threads: int, title: str, measured: dict[str, Any]) -> None:
    """Tokens a second, of wall and of CPU time, and our rate over the peer's."""
    for name, row in measured.items():
        names = ("per_second", "per_cpu_second", "ratio", "cpu_ratio")
        numbers = [row.get(name) for name in names]
        columns = "".join(f"{'–' if n is None else format(n, '.2f'):>12}" for n in numbers)
        print(f"{threads} threads  {title:12}{name:14}{columns}", flush=True)


def spin() -> None:
    """Keep a core busy until the process is ended."""
    while True:
        pass


def measure_beside_busy_loops(options: argparse.Namespace) -> None:
    """Times of single decode steps alone, then beside processes that want all of the cores."""
    for threads in [int(t) for t in options.threads.split(",")]:
        torch.set_num_threads(threads)
        ours = Ours(options.model, options.dtype, cpu_activations=options.cpu_activations)
        for num_loops in (0, options.busy_loops):
            loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(num_loops)]
            for loop in loops:
                loop.start()
            try:
                times = ours.step_times(prompts(1, PROMPT_TOKENS), options.steps)
            finally:
                for loop in loops:
                    loop.kill()
                    loop.join()
            told = {
                "median": statistics.median(times),
                "mean": statistics.mean(times),
                "longest": max(times),
            }
            numbers = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in told.items())
            print(f"{threads} threads, {num_loops} busy loops: {numbers}", flush=True)


def measure_dtypes(options: argparse.Namespace) -> None:
    """Ours by dtype, and transformers: print the table and write the JSON."""
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


def random_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    """Random weights in the shape of SmolLM2-135M, always the same ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2_135M))
    draw = torch.Generator().manual_seed(20260101)
    tensors = {
        name: (0.05 * torch.randn(shape, generator=draw) + ("norm" in name)).to(dtype)
        for name, shape in expected_shapes(from_hf("config", SMOLLM2_135M)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure_weights(options: argparse.Namespace) -> None:
    """Types of weights in turns: print the table and write the JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            dtype: random_checkpoint(Path(folder) / str(dtype), dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        subjects = {name: Ours(paths[dtype], "auto", **changes) for name, dtype, changes in WEIGHTS}
    rows: dict[str, dict[str, float]] = {name: {} for name in subjects}
    for size in (1, 16):
        batch, column = prompts(size, PROMPT_TOKENS), f"decode {size}"
        for _ in range(WEIGHT_TURNS):
            for name, subject in subjects.items():
                spent = size / (ours_decode(subject, batch, options.steps).per_cpu_second or 1)
                rows[name][column] = round(min(spent * 1e3, rows[name].get(column, 1e9)), 2)
    for name, row in rows.items():
        print(f"{name:20}" + "".join(f"{ms:12.2f} ms" for ms in row.values()))
    write_results(WEIGHTS_FILE, {"cores": os.cpu_count(), "cpu_milliseconds": rows})


def main() -> None:
    """Measure by dtype, beside peers, or by type of weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batches", default="1,4,16,32", help="with --peers")
    parser.add_argument("--peers", action="store_true", help="compare with other engines")
    parser.add_argument("--weights", action="store_true", help="compare types of weights")
    parser.add_argument("--dtype", default="float32", help="ours, with --peers")
    parser.add_argument("--cpu-activations", default="float32", help="ours, with --peers")
    parser.add_argument("--llama-bin", type=Path, help="the folder of llama-batched-bench")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that imports vllm")
    parser.add_argument("--busy-loops", type=int, help="step times alone and beside so many")
    options = parser.parse_args()
    if options.busy_loops is not None:
        measure_beside_busy_loops(options)
    elif options.weights:
        measure_weights(options)
    elif options.peers:
        print(f"{'tokens a second':37}{'wall':>12}{'CPU':>12}{'ours/peer':>12}{'by CPU':>12}")
        compare_with_peers(options)
    else:
        measure_dtypes(options)


if __name__ == "__main__":
    main()
