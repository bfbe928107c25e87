"""All products of one decode step with weights in GGUF blocks: libraries beside our own kernel.

    python benchmarks/quantised_products.py [--layers 30] [--rows 1,4,16,64] [--only NAME,…]

The matrices have the shapes of SmolLM2-135M: Q4_1 in its layers, Q8_0 in its head, random values
from a fixed seed. A library that is not installed is skipped with a line; none is a dependency of
the project. Times are the best of many calls: CPU time with one thread, wall time with two. The
error is the largest difference from the product in float64, over the largest value. Results go to
benchmarks/results/quantised_products.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Before any library is imported: waiting threads must not spin on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from quantised_libraries import BLOCK, ENGINES, Array, Blocks, Engine, Inputs, Step
from result_files import RESULTS, write_results

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
SECONDS_PER_TIME = 2.0
MOST_CALLS = 100
FEWEST_CALLS = 3
RESULTS_FILE = RESULTS / "quantised_products.json"


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> Blocks:
    """A matrix whose minima are no multiple of its scales, as in real files."""
    rows, columns = shape
    scales = rng.uniform(0.002, 0.02, (rows, columns // BLOCK)).astype(np.float16)
    if bits == 8:
        return Blocks(rng.integers(-127, 128, shape, np.int8), scales, None)
    minima = (scales * -rng.uniform(5, 10, scales.shape)).astype(np.float16)
    return Blocks(rng.integers(0, 16, shape, np.uint8), scales, minima)


def make_inputs(rows: int) -> Inputs:
    """The same first rows for any number of rows."""
    return {
        k: np.random.default_rng(k).standard_normal((64, k), np.float32)[:rows].copy()
        for k in sorted({k for _, k in (*LAYER, HEAD)})
    }


def best_seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """The least of many calls, after one that does not count."""
    call()
    times: list[float] = []
    until = time.perf_counter() + SECONDS_PER_TIME
    while len(times) < MOST_CALLS:
        if len(times) >= FEWEST_CALLS and time.perf_counter() > until:
            break
        started = clock()
        call()
        times.append(clock() - started)
    return min(times)


def relative_error(output: Array, matrix: Blocks, inputs: Inputs) -> float:
    """Of one product, from that of the exact weights in float64."""
    weights = matrix.quants * np.repeat(matrix.scales.astype(np.float64), BLOCK, 1)
    if matrix.minima is not None:
        weights += np.repeat(matrix.minima.astype(np.float64), BLOCK, 1)
    exact = inputs[matrix.shape[1]].astype(np.float64) @ weights.T
    return float(np.abs(output - exact).max() / np.abs(exact).max())


def first_rows(step: Step, rows: int) -> list[Array]:
    return [output[0].copy() for output in step(make_inputs(rows))]


def measure(engine: Engine, matrices: list[Blocks], rows: list[int]) -> dict[str, Any]:
    """One line of the table."""
    num_bytes = sum(matrix.num_bytes for matrix in matrices)
    line: dict[str, Any] = {"engine": engine.name, "arithmetic": engine.arithmetic}
    for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        step = engine.build(matrices, threads)
        kind = "cpu_ms" if threads == 1 else "wall_ms"
        milliseconds = []
        for m in rows:
            inputs = make_inputs(m)
            milliseconds.append(best_seconds(partial(step, inputs), clock) * 1e3)
        line[kind] = dict(zip(map(str, rows), (round(t, 2) for t in milliseconds), strict=True))
        alone, among = first_rows(step, 1), first_rows(step, 7)
        equal = all(np.array_equal(a, b) for a, b in zip(alone, among, strict=True))
        line[f"row_independent_{threads}"] = equal
        if threads == 1:
            line["gigabytes_per_second"] = round(num_bytes / milliseconds[0] / 1e6, 1)
            line["relative_error"] = relative_error(
                step(make_inputs(7))[0], matrices[0], make_inputs(7)
            )
    line["installed_megabytes"] = engine.megabytes()
    return line


def print_line(line: dict[str, Any], rows: list[int]) -> None:
    """CPU times, wall times, rate at the first number of rows, invariance, error, size."""
    cpu = "".join(f"{line['cpu_ms'][str(m)]:9.1f}" for m in rows)
    wall = "".join(f"{line['wall_ms'][str(m)]:9.1f}" for m in rows)
    same = line["row_independent_1"] and line["row_independent_2"]
    print(
        f"{line['engine']:26}{cpu}  |{wall}  |{line['gigabytes_per_second']:6.1f}"
        f"{'yes' if same else 'no':>5}{line['relative_error']:9.0e}"
        f"{line['installed_megabytes']:6}  {line['arithmetic']}",
        flush=True,
    )


def main() -> None:
    """Measure what is installed, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--no-head", action="store_true", help="without the Q8_0 matrix")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--only", help="engines whose name contains one of these, by comma")
    options = parser.parse_args()
    rows = [int(m) for m in options.rows.split(",")]
    wanted = options.only.split(",") if options.only else [""]
    rng = np.random.default_rng(20260101)
    matrices = [random_blocks(rng, shape, 4) for _ in range(options.layers) for shape in LAYER]
    if not options.no_head:
        matrices.append(random_blocks(rng, HEAD, 8))
    heads = "".join(f"{'m=' + str(m):>9}" for m in rows)
    print(f"{'ms of CPU | of wall':26}{heads}  |{heads}  |  GB/s same    error    MB")
    lines: list[dict[str, Any]] = []
    for engine in ENGINES:
        if not any(part in engine.name for part in wanted):
            continue
        try:
            line = measure(engine, matrices, rows)
        except (ImportError, OSError) as error:
            print(f"{engine.name:26}skipped: {error}")
            continue
        lines.append(line)
        print_line(line, rows)
    write_results(RESULTS_FILE, {"cores": os.cpu_count(), "layers": options.layers, "runs": lines})


if __name__ == "__main__":
    main()
