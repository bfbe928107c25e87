"""A simulated fleet beside the real one: what `pointsman simulate` says, and what `bench` measures.

    python benchmarks/sim_live.py [--engine torch] [--rates 2,6,12] [--seconds 30]

Starts `pointsman up` with two workers behind Envoy: simulated ones of a known latency model (real
processes and sockets, so that what differs is the simulator's picture of them), or with --engine
torch the default model, a thread each. One run of `pointsman bench` is for `pointsman fit`; a
second one, with other arrivals and lengths, is what `simulate` then has to say beforehand, at each
rate. Prints both, by metric, and writes benchmarks/results/sim_live.json. The exit status is 1 if
a p50 is more than 15 % off, or a p95 more than 25 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_files import RESULTS, write_results

from fleet.ports import free_ports

WORKERS = 2
LIMITS = {"p50": 0.15, "p95": 0.25}
KNOWN = (
    "--sim-prefill-tokens-per-second 4000 --sim-step-overhead-ms 5 --sim-decode-base-ms 15 "
    "--sim-decode-per-seq-ms 1"
)
# By engine: flags of every worker, rates, and lengths.
ENGINES = {
    "sim": (KNOWN, "2,6,12", ("--input-tokens", "128..384", "--output-tokens", "32..96")),
    "torch": (
        "--num-threads 1 --max-model-len 1024",
        "0.3,0.6,0.9",
        ("--input-tokens", "64..192", "--output-tokens", "16..48"),
    ),
}


def pointsman(*argv: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "fleet.cli", *argv]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def fleet(engine: str, worker_flags: str) -> Iterator[str]:
    """A running `pointsman up`; its address."""
    [port] = free_ports("127.0.0.1", 1, 18080)
    command = [sys.executable, "-m", "fleet.cli", "up", "--engine", engine, "--port", str(port)]
    command += ["--workers", str(WORKERS), "--worker-args", worker_flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout or ())
        if not any("stop      Ctrl-C" in line for line in lines):
            raise SystemExit("the fleet did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def stages(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["stages"]
    return found


def compared(real: list[dict[str, Any]], virtual: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each stage, metric and quantile; milliseconds."""
    return [
        {
            "stage": one["name"],
            "number": f"{metric} {name}",
            "requests": one["requests"],
            "real_ms": 1e3 * one[metric][name],
            "simulated_ms": 1e3 * other[metric][name],
            "error": other[metric][name] / one[metric][name] - 1,
            "limit": limit,
        }
        for one, other in zip(real, virtual, strict=True)
        for metric in ("ttft", "itl", "e2e")
        for name, limit in LIMITS.items()
    ]


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    worker_flags, rates, data = ENGINES[options.engine]
    fitted, real, virtual, worker = (folder / name for name in ("fitted", "real", "sim", "worker"))
    load = ["--rate", options.rates or rates, "--duration", str(options.seconds), *data]
    load += ["--warmup", str(options.seconds / 10)]
    with fleet(options.engine, worker_flags) as url:
        for seed, path in ((1, fitted), (2, real)):
            pointsman("bench", "--url", url, *load, "--seed", str(seed), "--json", str(path))
    print(pointsman("fit", str(fitted), str(worker), "--workers", str(WORKERS)))
    load += ["--seed", "2", "--json", str(virtual)]
    pointsman("simulate", "--workers", str(WORKERS), "--worker", str(worker), *load)
    return compared(stages(real), stages(virtual))


def main() -> int:
    """Run it, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="sim")
    parser.add_argument("--rates", help="three or so, of both workers together")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each rate, twice")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print(f"{'stage':>8} {'requests':>8}  {'':10}{'real ms':>10}{'simulated':>11}{'off':>8}")
    for row in rows:
        print(
            f"{row['stage']:>8} {row['requests']:>8}  {row['number']:10}{row['real_ms']:>10.1f}"
            f"{row['simulated_ms']:>11.1f}{row['error']:>8.1%}"
            f"{'' if abs(row['error']) <= row['limit'] else '  too much'}"
        )
    write_results(RESULTS / "sim_live.json", {"engine": options.engine, "rows": rows})
    return 0 if all(abs(row["error"]) <= row["limit"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
