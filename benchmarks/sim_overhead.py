"""CPU microseconds that the simulator itself needs for a step, by latency model and batch size.

    python benchmarks/sim_overhead.py

Decoding steps of 1 to 256 sequences with noise, half of them greedy, that are not waited for: what
is measured is drawing the tokens and working out the time. While serving, all of it is part of the
time that a step takes anyway. Medians over repeats. Results go
to benchmarks/results/sim_overhead.json.
"""

from __future__ import annotations

import statistics
import time

from result_files import RESULTS, write_results

from worker.config import SimConfig
from worker.executor.sim.latency import MODELS
from worker.executor.sim.runner import SimExecutor, SimLimits
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

RESULTS_FILE = RESULTS / "sim_overhead.json"
BATCHES = (1, 32, 128, 256)
STEPS = 400
REPEATS = 5


def step_of(batch: int, position: int) -> SchedulerOutput:
    """A step in which every sequence decodes one token."""
    num_prompt = 64
    table = list(range(num_prompt))
    return SchedulerOutput(
        position,
        tuple(
            ScheduledSequence(
                number,
                [300 + number],
                position - 1,
                table,
                (
                    SampleSpec(
                        SamplingParams(512, seed=number, temperature=float(number % 2)),
                        position,
                        num_prompt=num_prompt,
                    ),
                ),
            )
            for number in range(batch)
        ),
    )


def microseconds(model: str, batch: int, mode: str = "random") -> float:
    """Median time of one step."""
    config = SimConfig(
        latency_model=model,
        mode=mode,
        inter_token_latency_seconds=0.01,
        inter_token_latency_std_seconds=0.003,
        end_token_id=2,
    )
    executor = SimExecutor(config, lambda seconds, follows: None, SimLimits(64, 16, 256))
    steps = [step_of(batch, 66 + number) for number in range(STEPS)]
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        for step in steps:
            executor.execute(step)
        times.append((time.process_time() - started) / STEPS)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    """Measure, print the table, write the JSON."""
    subjects = [(model, "random") for model in MODELS] + [("linear", "echo")]
    print(f"{'model':12}{'mode':8}" + "".join(f"{f'batch {b}':>11}" for b in BATCHES))
    rows = []
    for model, mode in subjects:
        row = {str(batch): microseconds(model, batch, mode) for batch in BATCHES}
        print(f"{model:12}{mode:8}" + "".join(f"{value:>9.1f} µs"[-11:] for value in row.values()))
        rows.append({"model": model, "mode": mode, "microseconds": row})
    write_results(RESULTS_FILE, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
