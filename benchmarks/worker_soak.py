"""Mixed load on one real worker for minutes on end: does everything end once, and nothing leak?

    python benchmarks/worker_soak.py --minutes 10                 # the default model
    python benchmarks/worker_soak.py --minutes 10 --engine sim

32 clients ask a worker with a pool of 200 blocks, far less than they want: whole answers and
streams, short and long prompts that share prefixes, up to three choices, priorities, seeds; they
abort, leave in the middle, and send nonsense. Checked at the end, with exit status 1 if not so:

- every request ended exactly once, seen by its client and by vllm:request_success_total;
- nothing is left: no sequence running or waiting, no block in use (the prefix cache can be reset),
  no file descriptor more than before, memory that does not grow;
- nobody starved: the longest wait for a first token is below --max-wait-seconds (requests that ask
  for a low priority, --low-priority, give way as long as others come, and are told apart);
- preemptions of a request are at most three;
- requests with the same seed were answered alike (only counted for a real model without --strict).

Prints a table and writes benchmarks/results/worker_soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from result_files import RESULTS, write_results
from soak_clients import Client, Deck, Outcome

RESULTS_FILE = RESULTS / "worker_soak.json"
DEFAULT_MODEL = Path.home() / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"
START_SECONDS = 180.0
SETTLE_SECONDS = 60.0
SAMPLE_SECONDS = 1.0
MAX_PREEMPTIONS = 3
MAX_MORE_FDS = 4
MAX_MEBIBYTES_PER_MINUTE = 8.0
SLOPE_MINUTES = 4.0  # shorter runs cannot tell a leak from a cache that fills
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What one process holds."""

    rss_mebibytes: float
    num_fds: int
    num_threads: int


@dataclass(slots=True)
class Samples:
    """What was seen while the load ran; owned by the sampler."""

    minutes: list[float] = field(default_factory=list)
    processes: dict[str, list[ProcessState]] = field(default_factory=lambda: defaultdict(list))
    most: dict[str, float] = field(default_factory=dict)


def process_state(pid: int) -> ProcessState:
    """Memory, file descriptors and threads of a process."""
    root = Path("/proc") / str(pid)
    rss = int((root / "statm").read_text().split()[1]) * PAGE_BYTES
    threads = len(list((root / "task").iterdir()))
    return ProcessState(rss / 2**20, len(list((root / "fd").iterdir())), threads)


class Worker:
    """A worker process that serves."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        self._process = process
        self._http = http

    def states(self) -> dict[str, ProcessState]:
        """What the HTTP process and its engine hold."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids = (pid, *map(int, children))
        return {name: process_state(p) for name, p in zip(("worker", "engine"), pids, strict=False)}

    async def metrics(self) -> dict[str, float]:
        """Every sample by name and labels, but those that all have."""
        page = (await self._http.get("/metrics")).text
        return {
            sample.name
            + "".join(
                f",{k}={v}" for k, v in sample.labels.items() if k not in ("engine", "model_name")
            ): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    async def post(self, path: str, body: Any = None) -> Any:
        """The JSON of a route's answer."""
        return (await self._http.post(path, json=body)).raise_for_status().json()


@asynccontextmanager
async def running(flags: Sequence[str]) -> AsyncIterator[tuple[Worker, str]]:
    """Start the worker; stop it afterwards."""
    command = (sys.executable, "-m", "worker", "--port", "0", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode()
        ready = re.match(r"worker ready on (\S+)", line)
        assert ready, f"the worker did not start: {line}"
        async with httpx.AsyncClient(base_url=ready[1], timeout=30) as http:
            yield Worker(process, http), ready[1]
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def sample(worker: Worker, samples: Samples) -> None:
    """Look at the worker every second, until cancelled."""
    started = time.monotonic()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        with suppress(httpx.HTTPError):
            found = await worker.metrics()
            for gauge in gauges:
                value = found[f"vllm:{gauge}"]
                samples.most[gauge] = max(samples.most.get(gauge, 0.0), value)
        samples.minutes.append((time.monotonic() - started) / 60)
        for name, state in worker.states().items():
            samples.processes[name].append(state)
        await asyncio.sleep(SAMPLE_SECONDS)


async def settled(worker: Worker) -> dict[str, float]:
    """The metrics when nothing is running or waiting any more, or when patience ends."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await worker.metrics()
        busy = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def slope(samples: Samples, name: str) -> float:
    """Mebibytes a minute that a process grew by in the second half."""
    states = samples.processes[name]
    points = list(zip(samples.minutes, [state.rss_mebibytes for state in states], strict=False))
    half = points[len(points) // 2 :]
    if len(half) < 3:
        return 0.0
    return statistics.linear_regression([x for x, _ in half], [y for _, y in half]).slope


@dataclass(slots=True)
class Report:
    """Figures in the order they are printed, and what is wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def check(self, is_good: bool, what: str) -> None:
        """Remember a violation."""
        if not is_good:
            self.violations.append(what)


def judge_clients(report: Report, outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """What the clients saw. Returns how many sequences the engine must have ended: surely, and how
    many more it may have (of clients that left before any answer).
    """
    kinds = Counter(outcome.ask.kind for outcome in outcomes)
    report.figures["requests"] = len(outcomes)
    report.figures["by kind"] = dict(sorted(kinds.items()))
    reasons = Counter(reason for outcome in outcomes for reason in outcome.reasons)
    report.figures["ended for clients"] = dict(sorted(reasons.items()))
    report.figures["left by clients"] = sum(outcome.is_cut for outcome in outcomes)
    report.figures["answer tokens"] = sum(outcome.num_tokens for outcome in outcomes)
    for outcome in outcomes:
        if outcome.problem is not None:
            what = f"{outcome.ask.kind} of priority {outcome.ask.priority} to {outcome.ask.path}"
            report.violations.append(f"{what}: {outcome.problem}")
    sure = sum(outcome.ask.num_choices for outcome in outcomes if outcome.status == 200)
    silent = [o for o in outcomes if o.status == 0 and o.ask.kind != "bad"]
    perhaps = sum(outcome.ask.num_choices for outcome in silent)
    return sure, perhaps


def judge_server(
    report: Report, before: dict[str, float], after: dict[str, float], ended: tuple[int, int]
) -> None:
    """What the worker counted."""
    reasons = {
        name.partition("=")[2]: int(value - before.get(name, 0))
        for name, value in after.items()
        if name.startswith("vllm:request_success_total,")
    }
    total, (sure, perhaps) = sum(reasons.values()), ended
    report.figures["ended for the worker"] = {k: v for k, v in reasons.items() if v}
    report.figures["ended in total"] = {"worker": total, "clients": sure, "left early": perhaps}
    report.check(sure <= total <= sure + perhaps, f"{total} sequences ended, not {sure}+{perhaps}")
    report.check(reasons.get("error", 0) == 0, f"{reasons.get('error')} ended with an error")
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        value = after[f"vllm:{gauge}"]
        report.check(value == 0, f"{gauge} is {value} at the end")
    count = after["vllm:request_num_preemptions_count"]
    few = after[f"vllm:request_num_preemptions_bucket,le={float(MAX_PREEMPTIONS)}"]
    report.figures["preemptions"] = int(
        after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"]
    )
    report.figures[f"requests preempted over {MAX_PREEMPTIONS} times"] = int(count - few)
    report.check(count == few, f"{count - few:.0f} requests were preempted too often")
    report.figures["longest queue wait, s (bucket)"] = longest(
        after, "vllm:request_queue_time_seconds"
    )
    report.figures["prefix cache hits"] = round(
        after["vllm:prefix_cache_hits_total"] / max(1, after["vllm:prefix_cache_queries_total"]), 3
    )


def longest(found: dict[str, float], histogram: str) -> float:
    """The least bound of a histogram's buckets that everything is below."""
    count = found[f"{histogram}_count"]
    head = f"{histogram}_bucket,le="
    bounds = {float(k[len(head) :]): v for k, v in found.items() if k.startswith(head)}
    return min(bound for bound, value in bounds.items() if value == count)


def judge_waits(report: Report, outcomes: Sequence[Outcome], max_wait_seconds: float) -> None:
    """How long clients waited. Requests that asked to come after the others wait as long as others
    come; they are told apart, and not bounded.
    """
    waited = [o for o in outcomes if o.first_seconds is not None and o.ask.kind != "whole"]
    last = [o.first_seconds or 0.0 for o in waited if o.ask.priority > 0]
    first = [o.first_seconds or 0.0 for o in waited if o.ask.priority <= 0]
    whole = [o.seconds for o in outcomes if o.status == 200]
    if not first or not whole:
        report.violations.append("nobody was answered")
        return
    for name, seconds in (
        ("first token, s", first),
        ("first token of low priority, s", last or [0.0]),
        ("whole request, s", whole),
    ):
        median, most = statistics.median(seconds), max(seconds)
        report.figures[name] = {"median": round(median, 3), "longest": round(most, 3)}
    report.check(max(first) <= max_wait_seconds, f"somebody waited {max(first):.1f} s")


def judge_repeats(report: Report, outcomes: Sequence[Outcome], *, strict: bool) -> None:
    """Whether equal requests were answered alike."""
    answers: dict[int, set[str]] = defaultdict(set)
    count = 0
    for outcome in outcomes:
        if outcome.ask.fixed is not None and outcome.status == 200 and outcome.problem is None:
            answers[outcome.ask.fixed].add(outcome.digest)
            count += 1
    different = sum(len(found) > 1 for found in answers.values())
    report.figures["repeated requests"] = {"asked": count, "answered differently": different}
    report.check(not strict or not different, f"{different} fixed requests had several answers")


def judge_processes(
    report: Report,
    samples: Samples,
    before: dict[str, ProcessState],
    after: dict[str, ProcessState],
) -> None:
    """Memory, file descriptors and threads, before the clients came and after they left."""
    minutes = samples.minutes[-1] if samples.minutes else 0.0
    for name, state in after.items():
        first, growth = before[name], slope(samples, name)
        report.figures[f"{name} memory, MiB"] = {
            "start": round(first.rss_mebibytes, 1),
            "end": round(state.rss_mebibytes, 1),
            "per minute": round(growth, 2),
        }
        report.figures[f"{name} fds, threads"] = {
            "start": [first.num_fds, first.num_threads],
            "end": [state.num_fds, state.num_threads],
        }
        more = state.num_fds - first.num_fds
        report.check(more <= MAX_MORE_FDS, f"{name} has {more} more file descriptors")
        if minutes >= SLOPE_MINUTES:
            is_flat = growth <= MAX_MEBIBYTES_PER_MINUTE
            report.check(is_flat, f"{name} grows by {growth:.1f} MiB a minute")
    report.figures["most at once"] = {k: round(v, 3) for k, v in samples.most.items()}


async def soak(options: argparse.Namespace) -> Report:
    """Run the load and judge it."""
    report, samples = Report(), Samples()
    async with running(worker_flags(options)) as (worker, url):
        warm = {"prompt": "warm", "max_tokens": 2, "seed": 1}
        await worker.post("/v1/completions", warm)
        before = await worker.metrics()
        held = worker.states()
        until = time.monotonic() + options.minutes * 60
        sizes = (options.max_tokens, options.prompt_words)
        clients = [
            Client(url, n, Deck(options.seed, n, *sizes, options.low_priority))
            for n in range(options.clients)
        ]
        async with asyncio.TaskGroup() as group:
            sampler = group.create_task(sample(worker, samples), name="sampler")
            runs = [group.create_task(client.run(until)) for client in clients]
            await asyncio.wait(runs)
            sampler.cancel()
        outcomes = [outcome for run in runs for outcome in run.result()]
        after = await settled(worker)
        ended = judge_clients(report, outcomes)
        judge_server(report, before, after, ended)
        judge_waits(report, outcomes, options.max_wait_seconds)
        judge_repeats(report, outcomes, strict=options.strict or options.engine == "sim")
        reset = await worker.post("/reset_prefix_cache")
        report.check(reset["success"] is True, "blocks are in use at the end")
        await asyncio.sleep(0.5)  # closed connections are noticed
        judge_processes(report, samples, held, worker.states())
    return report


def worker_flags(options: argparse.Namespace) -> list[str]:
    """The worker's command line."""
    flags = ["--engine", options.engine, "--enable-admin-routes"]
    flags += ["--num-gpu-blocks-override", "200", "--block-size", "16"]
    flags += ["--max-model-len", "1024", "--seed", str(options.seed)]
    if options.engine == "torch":
        flags += ["--model", options.model]
    if options.engine == "sim":
        flags += ["--sim-decode-base-ms", "4", "--sim-mean-output-tokens", "60"]
    return flags + options.flags


def main() -> int:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("torch", "sim"), default="torch")
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="with --engine torch")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--max-wait-seconds", type=float, default=180.0)
    parser.add_argument("--low-priority", type=float, default=0.0, help="share of requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strict", action="store_true", help="equal requests, equal answers")
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    parser.add_argument("flags", nargs="*", help="more flags of the worker, after --")
    options = parser.parse_args()
    report = asyncio.run(soak(options))
    for name, value in report.figures.items():
        print(f"{name:36} {value}")
    for kind, count in Counter(report.violations).most_common(20):
        print(f"VIOLATION ({count}x): {kind}")
    print("violations:", len(report.violations))
    document = {
        "engine": options.engine,
        "minutes": options.minutes,
        "clients": options.clients,
        "figures": report.figures,
        "violations": report.violations,
    }
    write_results(options.results, document)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
