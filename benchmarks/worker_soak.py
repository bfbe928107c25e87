"""Mixed load on one real worker for minutes on end: everything ends once, and nothing leaks.

    python benchmarks/worker_soak.py --minutes 10                 # the default model
    python benchmarks/worker_soak.py --minutes 10 --engine sim

32 clients ask a worker with a pool of 200 blocks for far more than it has: whole answers and
streams, short and long prompts that share prefixes, up to three choices, priorities, seeds; they
abort, leave in the middle, and send invalid requests. The exit status is 1 unless at the end

- every request has ended exactly once, by its client and by vllm:request_success_total;
- nothing is left: no sequence running or waiting, no block in use (the prefix cache can be reset),
  no file descriptor more than before, memory that does not grow;
- no first token took longer than three minutes;
- no request was preempted more than three times;
- simulated workers have answered equal requests alike (with a real model, that is only counted).

Prints a table and writes benchmarks/results/worker_soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from measuring import DEFAULT_MODEL, command_line, write_results
from prometheus_client.parser import text_string_to_metric_families
from streams import CHAT, COMPLETIONS, Answer, running

ABORT = "/inference/v1/abort_requests"
START_SECONDS, PATIENCE_SECONDS, SETTLE_SECONDS = 180.0, 300.0, 60.0
MAX_WAIT_SECONDS = 180.0
MAX_PREEMPTIONS, MAX_MORE_FDS = 3, 4
MAX_MEBIBYTES_PER_MINUTE = 8.0
SLOPE_MINUTES = 4.0  # shorter runs cannot distinguish a leak from a cache that fills
PAGE_BYTES = 4096
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
KINDS = {"whole": 30, "stream": 40, "abort": 8, "leave-stream": 10, "leave-whole": 5, "bad": 7}
NUM_PREFIXES, NUM_FIXED = 6, 8
MAX_TOKENS, PROMPT_WORDS = 64, 300
WORDS = tuple(
    f"{first}{second}"
    for first in ("riv", "sto", "lam", "gar")
    for second in ("er", "ne", "pe", "den", "dow", "ning", "able")
)
# Requests that a server must refuse, whatever the model: path, body, status.
BAD_REQUESTS: tuple[tuple[str, Any, int], ...] = (
    (CHAT, b"{", 400),
    (CHAT, b"\xff\xfe", 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "unknown"}, 404),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400),
    (COMPLETIONS, {"prompt": [1, 2, 999_999_999]}, 400),
    (COMPLETIONS, {"prompt": "x " * 20_000}, 400),
    ("/v1/nothing", {}, 404),
)


# ---- the load -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `leave_after` counts the stream events (or, for a whole answer, hundredths of a
    second) after which a client aborts or leaves. Requests of one `fixed` are all equal.
    """

    kind: str
    path: str
    body: dict[str, Any] | bytes
    status: int = 200
    num_choices: int = 1
    leave_after: int = 0
    fixed: int | None = None


@dataclass(slots=True)
class Outcome:
    """The end of one request for its client. `problem` None: the end that it should have."""

    ask: Ask
    status: int = 0
    first_seconds: float | None = None
    seconds: float = 0.0
    answer: Answer = field(default_factory=Answer)
    is_cut: bool = False  # the client left before the end
    problem: str | None = None


class Deck:
    """Draws requests; the same ones for the same seed and client."""

    def __init__(self, seed: int, client: int) -> None:
        self._rng = random.Random(seed * 1000 + client)
        shared = random.Random(seed)
        self._prefixes = [
            " ".join(shared.choices(WORDS, k=shared.randrange(20, PROMPT_WORDS // 2)))
            for _ in range(NUM_PREFIXES)
        ]

    def draw(self) -> Ask:
        """Draw the next request at random."""
        rng = self._rng
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        if kind == "bad":
            return Ask(kind, *rng.choice(BAD_REQUESTS))
        if kind in ("whole", "stream") and rng.random() < 0.15:
            return self._fixed(kind, rng.randrange(NUM_FIXED))
        words = rng.choices(WORDS, k=rng.choice((3, 10, PROMPT_WORDS // 2)))
        body: dict[str, Any] = {
            "max_tokens": rng.randrange(1, MAX_TOKENS),
            "n": rng.choices((1, 2, 3), weights=(8, 1, 1))[0],
            "priority": -1 if rng.random() > 0.9 else 0,
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            body["seed"] = rng.randrange(1 << 30)
        if rng.random() < 0.3:  # several greedy answers are refused
            body |= {"temperature": rng.choice((0.0, 0.7, 1.3)), "top_p": 0.9, "n": 1}
        text = rng.choice(self._prefixes) + " " + " ".join(words)
        if rng.random() < 0.5:
            path, body["prompt"] = COMPLETIONS, text
        else:
            path, body["messages"] = CHAT, [{"role": "user", "content": text}]
        leave = rng.randrange(5, 150) if kind == "leave-whole" else rng.randrange(1, 8)
        return _asked(kind, path, body, leave_after=leave)

    def _fixed(self, kind: str, number: int) -> Ask:
        body: dict[str, Any] = {
            "prompt": self._prefixes[number % NUM_PREFIXES] + f" number {number}",
            "max_tokens": 4 + 2 * number,
            "seed": number,
            "temperature": 0.0 if number % 2 else 1.0,
            "ignore_eos": True,
        }
        return _asked(kind, COMPLETIONS, body, fixed=number)


def _asked(kind: str, path: str, body: dict[str, Any], **rest: Any) -> Ask:
    if kind in ("stream", "abort", "leave-stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask(kind, path, body, num_choices=body.get("n", 1), **rest)


class Client:
    """Asks, waits for the end, asks again."""

    def __init__(self, http: aiohttp.ClientSession, number: int, deck: Deck) -> None:
        self._http = http
        self._deck = deck
        self._name = f"soak{number}"
        self._count = 0

    async def run(self, until: float) -> list[Outcome]:
        """Ask until that time (monotonic), and wait for the last answer."""
        outcomes = []
        while time.monotonic() < until:
            outcomes.append(await self._ask(self._deck.draw()))
        return outcomes

    async def _ask(self, ask: Ask) -> Outcome:
        self._count += 1
        outcome, started = Outcome(ask), time.monotonic()
        leave = ask.leave_after / 100 if ask.kind == "leave-whole" else PATIENCE_SECONDS
        try:
            async with asyncio.timeout(leave):
                await self._receive(outcome, started)
        except TimeoutError:
            outcome.is_cut = True
            if ask.kind != "leave-whole":
                outcome.problem = "no answer in time"
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            outcome.problem = f"{type(error).__name__}: {error}"
        outcome.seconds = time.monotonic() - started
        return outcome

    async def _receive(self, outcome: Outcome, started: float) -> None:
        ask, name = outcome.ask, f"{self._name}-{self._count}"
        content = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        headers = {"content-type": "application/json", "x-request-id": name}
        async with self._http.post(ask.path, data=content, headers=headers) as reply:
            outcome.status, answer = reply.status, outcome.answer
            if reply.status != ask.status:
                outcome.problem = f"status {reply.status}: {(await reply.text())[:200]}"
            elif reply.status != 200:
                if "error" not in await reply.json():
                    outcome.problem = "an error without a body that says why"
            elif reply.content_type != "text/event-stream":
                answer.take(await reply.json())
                outcome.problem = _problem(answer, ask.num_choices)
            else:
                async for line in reply.content:
                    if outcome.first_seconds is None:
                        outcome.first_seconds = time.monotonic() - started
                    answer.take_line(line)
                    if not line.startswith(b"data") or answer.num_events != ask.leave_after:
                        continue
                    if ask.kind == "leave-stream":
                        outcome.is_cut = True
                        return
                    if ask.kind == "abort":
                        await (await self._http.post(ABORT, json={"request_ids": [name]})).read()
                outcome.problem = _problem(answer, ask.num_choices, is_stream=True)


def _problem(answer: Answer, num_choices: int, *, is_stream: bool = False) -> str | None:
    ends = [len(answer.reasons.get(index, ())) for index in range(num_choices)]
    if answer.error is not None:
        return answer.error
    if is_stream and not answer.is_done:
        return "the stream ended without [DONE]"
    if set(ends) != {1}:
        return f"choices ended {ends} times"
    return "no usage came" if answer.usage is None else None


# ---- the worker ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Memory, file descriptors and threads of one process."""

    rss_mebibytes: float
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessState:
        """The present state of a process."""
        root = Path("/proc") / str(pid)
        rss = int((root / "statm").read_text().split()[1]) * PAGE_BYTES
        return cls(
            rss / 2**20, len(list((root / "fd").iterdir())), len(list((root / "task").iterdir()))
        )


class Worker:
    """A worker that serves, and the samples of its load; owned by `soak`."""

    def __init__(self, pid: int, http: aiohttp.ClientSession) -> None:
        self._pid = pid
        self._http = http
        self.minutes: list[float] = []
        self.samples: dict[str, list[ProcessState]] = defaultdict(list)
        self.most: dict[str, float] = dict.fromkeys(GAUGES, 0.0)

    def states(self) -> dict[str, ProcessState]:
        """The states of the HTTP process and of its engine."""
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return {"worker": ProcessState.of(self._pid), "engine": ProcessState.of(int(children[0]))}

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name and those labels that differ."""
        async with self._http.get("/metrics") as reply:
            page = await reply.text()
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {
                    k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")
                }
                name = sample.name + "".join(f",{k}={v}" for k, v in labels.items())
                found[name.removeprefix("vllm:")] = sample.value
        return found

    async def post(self, path: str, body: Any = None) -> Any:
        """The JSON of a route's answer."""
        async with self._http.post(path, json=body) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def sample(self) -> None:
        """Take a sample every second, until cancelled."""
        started = time.monotonic()
        while True:
            with suppress(aiohttp.ClientError):
                found = await self.metrics()
                self.most = {gauge: max(found[gauge], most) for gauge, most in self.most.items()}
            self.minutes.append((time.monotonic() - started) / 60)
            for name, state in self.states().items():
                self.samples[name].append(state)
            await asyncio.sleep(1.0)

    async def settled(self) -> dict[str, float]:
        """The metrics once nothing runs or waits, or when patience ends."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = await self.metrics()
            busy = found["num_requests_running"] + found["num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)

    def growth(self, name: str) -> float:
        """Mebibytes a minute of a process in the second half."""
        memory = [state.rss_mebibytes for state in self.samples[name]]
        half = list(zip(self.minutes, memory, strict=False))[len(memory) // 2 :]
        if len(half) < 3:
            return 0.0
        return statistics.linear_regression([x for x, _ in half], [y for _, y in half]).slope


# ---- the checks ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """Figures in the order of the table, and the violations."""

    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def check(self, is_good: bool, what: str) -> None:
        """Record a violation if the condition fails."""
        if not is_good:
            self.violations.append(what)

    def judge_clients(self, outcomes: Sequence[Outcome]) -> None:
        """Ends and waits, as the clients saw them."""
        ends = Counter(
            end for one in outcomes for ends in one.answer.reasons.values() for end in ends
        )
        self.figures["requests"] = len(outcomes)
        self.figures["by kind"] = dict(sorted(Counter(one.ask.kind for one in outcomes).items()))
        self.figures["ended for clients"] = dict(sorted(ends.items()))
        self.figures["left by clients"] = sum(one.is_cut for one in outcomes)
        self.figures["answer tokens"] = sum(one.answer.num_tokens for one in outcomes)
        for one in outcomes:
            if one.problem is not None:
                self.violations.append(f"{one.ask.kind} to {one.ask.path}: {one.problem}")
        first = [one.first_seconds for one in outcomes if one.first_seconds is not None]
        whole = [one.seconds for one in outcomes if one.status == 200]
        self.check(bool(first and whole), "no request was answered")
        for name, seconds in (("first token, s", first), ("whole request, s", whole)):
            median, most = statistics.median(seconds or [0.0]), max(seconds, default=0.0)
            self.figures[name] = {"median": round(median, 3), "longest": round(most, 3)}
        waited = max(first, default=0.0)
        self.check(waited <= MAX_WAIT_SECONDS, f"a first token took {waited:.1f} s")

    def judge_worker(
        self, outcomes: Sequence[Outcome], before: dict[str, float], after: dict[str, float]
    ) -> None:
        """Ends and preemptions, as the worker counted them."""
        prefix = "request_success_total,"
        reasons = {
            name.partition("=")[2]: int(value - before.get(name, 0))
            for name, value in after.items()
            if name.startswith(prefix)
        }
        total = sum(reasons.values())
        sure = sum(one.ask.num_choices for one in outcomes if one.status == 200)
        silent = [one for one in outcomes if one.status == 0 and one.ask.kind != "bad"]
        perhaps = sum(one.ask.num_choices for one in silent)  # left before any answer
        self.figures["ended for the worker"] = {k: v for k, v in reasons.items() if v}
        self.figures["ended in total"] = {"worker": total, "clients": sure, "left early": perhaps}
        self.check(sure <= total <= sure + perhaps, f"{total} ended, not {sure}+{perhaps}")
        self.check(reasons.get("error", 0) == 0, f"{reasons.get('error')} ended with an error")
        for gauge in GAUGES:
            self.check(after[gauge] == 0, f"{gauge} is {after[gauge]} at the end")
        count = after["request_num_preemptions_count"]
        few = after[f"request_num_preemptions_bucket,le={float(MAX_PREEMPTIONS)}"]
        preempted = after["num_preemptions_total"] - before["num_preemptions_total"]
        self.figures["preemptions"] = int(preempted)
        self.check(count == few, f"{count - few:.0f} requests were preempted too often")
        hits, asked = after["prefix_cache_hits_total"], after["prefix_cache_queries_total"]
        self.figures["prefix cache hits"] = round(hits / max(1, asked), 3)

    def judge_repeats(self, outcomes: Sequence[Outcome], *, strict: bool) -> None:
        """Answers to equal requests."""
        answers: dict[int, set[str]] = defaultdict(set)
        count = 0
        for one in outcomes:
            if one.ask.fixed is not None and one.status == 200 and one.problem is None:
                text = json.dumps(sorted(one.answer.texts.items()))
                answers[one.ask.fixed].add(hashlib.sha256(text.encode()).hexdigest())
                count += 1
        different = sum(len(found) > 1 for found in answers.values())
        self.figures["repeated requests"] = {"asked": count, "answered differently": different}
        self.check(not strict or not different, f"{different} fixed requests had several answers")

    def judge_processes(self, worker: Worker, before: dict[str, ProcessState]) -> None:
        """Memory, file descriptors and threads, before the clients came and after they left."""
        minutes = worker.minutes[-1] if worker.minutes else 0.0
        for name, state in worker.states().items():
            first, growth = before[name], worker.growth(name)
            self.figures[f"{name} memory, MiB"] = {
                "start": round(first.rss_mebibytes, 1),
                "end": round(state.rss_mebibytes, 1),
                "per minute": round(growth, 2),
            }
            self.figures[f"{name} fds, threads"] = {
                "start": [first.num_fds, first.num_threads],
                "end": [state.num_fds, state.num_threads],
            }
            more = state.num_fds - first.num_fds
            self.check(more <= MAX_MORE_FDS, f"{name} has {more} more file descriptors")
            is_flat = minutes < SLOPE_MINUTES or growth <= MAX_MEBIBYTES_PER_MINUTE
            self.check(is_flat, f"{name} grows by {growth:.1f} MiB a minute")
        self.figures["most at once"] = {k: round(v, 3) for k, v in worker.most.items()}


async def soak(options: argparse.Namespace) -> Report:
    """Run the load and judge it."""
    report = Report()
    command = [sys.executable, "-m", "worker", "--port", "0", *worker_flags(options)]
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_SECONDS)
    async with (
        running(command, r"^worker ready on (\S+)", START_SECONDS) as (program, ready),
        aiohttp.ClientSession(
            ready[1], timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as http,
    ):
        worker = Worker(program.process.pid, http)
        await worker.post(COMPLETIONS, {"prompt": "warm", "max_tokens": 2, "seed": 1})
        before, states = await worker.metrics(), worker.states()
        until = time.monotonic() + options.minutes * 60
        clients = [Client(http, n, Deck(options.seed, n)) for n in range(options.clients)]
        async with asyncio.TaskGroup() as group:
            sampler = group.create_task(worker.sample(), name="sampler")
            runs = [group.create_task(client.run(until)) for client in clients]
            await asyncio.wait(runs)
            sampler.cancel()
        outcomes = [outcome for run in runs for outcome in run.result()]
        after = await worker.settled()
        report.judge_clients(outcomes)
        report.judge_worker(outcomes, before, after)
        report.judge_repeats(outcomes, strict=options.engine == "sim")
        reset = await worker.post("/reset_prefix_cache")
        report.check(reset["success"] is True, "blocks are in use at the end")
        await http.connector.close()  # so that only what leaks is left
        await asyncio.sleep(0.5)  # closed connections are noticed
        report.judge_processes(worker, states)
    return report


def worker_flags(options: argparse.Namespace) -> list[str]:
    """The worker's command line."""
    flags = ["--engine", options.engine, "--enable-admin-routes"]
    flags += ["--num-gpu-blocks-override", "200", "--block-size", "16"]
    flags += ["--max-model-len", "1024", "--seed", str(options.seed)]
    if options.engine == "torch":
        flags += ["--model", str(options.model)]
    else:
        flags += ["--sim-decode-base-ms", "4", "--sim-mean-output-tokens", "60"]
    return flags + options.flags


def main() -> int:
    """Run, print the table, write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--engine", choices=("torch", "sim"), default="torch")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="with --engine torch")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags of the worker, after --")
    options = parser.parse_args()
    report = asyncio.run(soak(options))
    for name, value in report.figures.items():
        print(f"{name:36} {value}")
    for kind, count in Counter(report.violations).most_common(20):
        print(f"VIOLATION ({count}x): {kind}")
    print("violations:", len(report.violations))
    write_results(options, figures=report.figures, violations=report.violations)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
