"""The cost of a draw: batches of the sampler, native and torch, against rows one by one.

    python benchmarks/sampling.py [--vocab 49152,151936] [--rows 1,16,64] [--rounds 5]

The ways take turns in one run, on one thread. Prints milliseconds of CPU of a row, the median over
rounds, and writes benchmarks/results/sampling.json.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measuring import Table, command_line, numbers, write_results

from worker.ops.cpu.native import NativeDraws, open_kernels
from worker.ops.sample import Sampler, choose, draw_rows
from worker.types import SampleSpec, SamplingParams

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


def measure(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of CPU time of each of `ways`, in turns."""
    spent: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, times in zip(ways, spent, strict=True):
            start = time.process_time()
            way()
            if turn:
                times.append((time.process_time() - start) * 1e3)
    return [statistics.median(times) for times in spent]


@torch.inference_mode()
def main() -> None:
    """Measure each vocabulary, batch and kind of draw."""
    parser = command_line(__doc__)
    parser.add_argument("--vocab", type=numbers(int), default=[49152, 151936])
    parser.add_argument("--rows", type=numbers(int), default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    samplers = [native(), Sampler(draw_rows)]
    names = ("native", "torch", "row_by_row")
    table = Table("vocabulary", "rows", "draw <12", *(f"{name} .3f" for name in names))
    for vocab_size in options.vocab:
        for count in options.rows:
            logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
            for draw, wish in WISHES.items():
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
                        choose(row, spec) for row, spec in zip(x, w, strict=True)
                    ]
                )
                spent = (each / count for each in measure(ways, options.rounds))
                figures = dict(zip(names, spent, strict=True))
                table.add(vocabulary=vocab_size, rows=count, draw=draw, **figures)
    write_results(options, cpu_milliseconds_of_a_row=table.rows)


if __name__ == "__main__":
    main()
