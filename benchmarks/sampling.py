"""What a draw costs: batches of the sampler, native and torch, against rows one by one.

`python -m benchmarks.sampling`, from the repository root. The ways take turns in one run, on
one thread; CPU time, the median of some rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.model import row_draws
from worker.ops.cpu.native import open_kernels
from worker.ops.cpu.sampling import NativeDraws
from worker.ops.sample import Sampler, draw_rows
from worker.types import SampleSpec, SamplingParams

ROUNDS = 5
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T": {"temperature": 0.7},
    "T+top-p": {"temperature": 0.7, "top_p": 0.9},
    "T+top-k": {"temperature": 0.7, "top_k": 40},
    "T+penalties": {"temperature": 0.7, "repetition_penalty": 1.1},
}


def native() -> Sampler:
    """The kernel, on one thread."""
    kernels = open_kernels(1)
    if kernels is None:
        raise SystemExit("there are no native kernels here")
    return Sampler(NativeDraws(kernels))


def measure(ways: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of CPU time of each of `ways`, in turns."""
    spent: list[list[float]] = [[] for _ in ways]
    for turn in range(ROUNDS + 1):
        for way, times in zip(ways, spent, strict=True):
            start = time.process_time()
            way()
            if turn:
                times.append((time.process_time() - start) * 1e3)
    return [statistics.median(times) for times in spent]


def main() -> None:
    """Print a table of ms a row."""
    torch.set_num_threads(1)
    samplers = [native(), Sampler(draw_rows)]
    print("| V | rows | draw | native | torch | row by row |\n|---|---|---|---|---|---|")
    for vocab_size in (49152, 151936):
        for count in (1, 16, 64):
            logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
            for name, wish in WISHES.items():
                specs = [
                    SampleSpec(
                        SamplingParams(max_tokens=1, seed=i, **wish), 600, (), range(600), 500
                    )
                    for i in range(count)
                ]
                ways: list[Callable[[], object]] = [
                    lambda s=sampler, x=logits, w=specs: s.launch(x, range(len(w)), w).collect()
                    for sampler in samplers
                ]
                ways.append(
                    lambda x=logits, w=specs: [
                        row_draws.choose(row, spec) for row, spec in zip(x, w, strict=True)
                    ]
                )
                cells = " | ".join(f"{spent / count:.3f}" for spent in measure(ways))
                print(f"| {vocab_size} | {count} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
