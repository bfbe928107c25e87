"""How many requests a second a one-machine fleet carries, and what picking costs each of them.

Starts `pointsman up --engine sim`, sends short chats (half of them streaming) at Poisson times that
do not wait for answers, first through the picker and then, the same requests to the same workers,
through an Envoy without one that balances round robin. Prints rate, errors, latency, time to first
token and CPU seconds per kind of process, and writes them to benchmarks/results/fleet_rate.json.

    python benchmarks/fleet_rate.py --rate 300 --seconds 30 --workers 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import httptools
import uvloop
from result_files import RESULTS, write_results

from fleet.envoy.binary import find_envoy
from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from fleet.ports import free_ports
from fleet.probe import request, until

HOST = "127.0.0.1"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
REFUSAL_HEADERS = (b"retry-after", b"x-llm-d-request-dropped-reason")
SETTLE_SECONDS = 30.0  # how long answers may be late after the last request


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when to send it (seconds from the start) and its bytes."""

    at_seconds: float
    payload: bytes


@dataclass(slots=True)
class Outcome:
    """What became of one request; seconds from when it should have been sent."""

    status: int = 0
    first_byte_seconds: float = 0.0
    latency_seconds: float = 0.0
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def schedule(rate: float, seconds: float, seed: int, max_tokens: int) -> list[Shot]:
    """Poisson arrivals; every second request streams; prompts share a few long prefixes."""
    rng = random.Random(seed)
    prefixes = [" ".join(f"w{rng.randrange(999)}" for _ in range(80)) for _ in range(20)]
    shots, at = [], rng.expovariate(rate)
    while at < seconds:
        content = f"{rng.choice(prefixes)} question {rng.randrange(10**6)}"
        body = json.dumps(
            {
                "model": "sim",
                "stream": len(shots) % 2 == 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": content}],
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        shots.append(Shot(at, head.encode() + body))
        at += rng.expovariate(rate)
    return shots


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, pool: list[Connection]) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._outcome = Outcome()
        self._due = 0.0
        self._done: asyncio.Future[Outcome] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        self._transport = cast("asyncio.Transport", transport)

    async def send(self, payload: bytes, due: float) -> Outcome:
        """Send, and wait for the whole answer."""
        assert self._transport is not None
        self._outcome, self._due = Outcome(), due
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return await self._done

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which calls the `on_` methods."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what a refusal says."""
        if name.lower() in REFUSAL_HEADERS:
            self._outcome.headers[name.decode().lower()] = value.decode()

    def on_body(self, _: bytes) -> None:
        """The first byte of a body is the first token of a streamed answer."""
        if not self._outcome.first_byte_seconds:
            self._outcome.first_byte_seconds = time.perf_counter() - self._due

    def on_message_complete(self) -> None:
        """The answer is whole; the connection is free again."""
        self._outcome.status = self._parser.get_status_code()
        self._outcome.latency_seconds = time.perf_counter() - self._due
        self._pool.append(self)
        self._finish("")

    def connection_lost(self, error: Exception | None) -> None:
        """Whatever was under way has failed."""
        if self in self._pool:
            self._pool.remove(self)
        self._finish(str(error or "closed"))

    def _finish(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._outcome.error = error
            self._done.set_result(self._outcome)


async def fire(shots: list[Shot], port: int) -> list[Outcome]:
    """Send every shot at its time, answered or not; all outcomes, lost ones included."""
    loop = asyncio.get_running_loop()
    pool: list[Connection] = []
    begun = time.perf_counter()

    async def one(shot: Shot) -> Outcome:
        try:
            if pool:
                connection = pool.pop()
            else:
                _, connection = await loop.create_connection(lambda: Connection(pool), HOST, port)
            return await connection.send(shot.payload, begun + shot.at_seconds)
        except OSError as error:
            return Outcome(error=str(error))

    tasks = []
    for shot in shots:
        pause = begun + shot.at_seconds - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        tasks.append(loop.create_task(one(shot)))
    done, late = await asyncio.wait(tasks, timeout=SETTLE_SECONDS)
    for task in late:
        task.cancel()
    return [task.result() for task in done] + [Outcome(error="no answer in time") for _ in late]


def descendants(pid: int) -> Iterator[int]:
    """All processes below `pid`."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def kind_of(pid: int) -> str:
    """Which part of the fleet a process is."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for mark, kind in (
            ("worker.engine", "worker engine"),
            ("-m worker", "worker http"),
            ("-m picker", "picker"),
            ("/envoy ", "envoy"),
        ):
            if mark in line:
                return kind
    return "other"


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU time so far, per kind of process, and of ourselves."""
    used: dict[str, float] = defaultdict(float)
    for pid in {*descendants(root), *descendants(os.getpid())}:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[kind_of(pid)] += (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    used["load generator"] = time.process_time()
    return used


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds."""
    ordered = sorted(values) or [0.0]
    return {
        f"p{percent}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)
        for percent in (50, 95, 99)
    }


@dataclass(frozen=True, slots=True)
class Report:
    """One run in numbers; milliseconds, seconds, counts."""

    sent: int
    succeeded: int
    rate: float
    errors: dict[str, int]
    latency_ms: dict[str, float]
    streaming_ttft_ms: dict[str, float]
    cpu_seconds: dict[str, float]
    served_by: dict[str, int]


class Fleet:
    """A running `pointsman up`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, announced: str) -> None:
        self.pid = process.pid
        self.port = port
        found = re.search(r"workers +\S+?:([\d, ]+\d)  ", announced)
        assert found is not None, announced
        self.worker_ports = [int(port) for port in found[1].split(", ")]
        found = re.search(r"metrics (\d+)", announced)
        assert found is not None, announced
        self.picker_port = int(found[1])

    async def served(self) -> dict[str, int]:
        """Requests answered so far, per worker."""
        counts = {}
        for index, port in enumerate(self.worker_ports):
            page = (await request(SocketAddress(HOST, port), "/metrics")).body.decode()
            lines = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)
            counts[f"worker-{index + 1}"] = int(sum(map(float, lines)))
        return counts


@contextlib.asynccontextmanager
async def fleet(arguments: argparse.Namespace, *flags: str) -> AsyncIterator[Fleet]:
    """`pointsman up` around a block, with more flags if need be."""
    (port,) = free_ports(HOST, 1, 22_000)
    command = [sys.executable, "-m", "fleet.cli", "up", "--engine", "sim", "--port", str(port)]
    command += ["--workers", str(arguments.workers), "--worker-args", arguments.worker_args]
    command += ["--envoy-concurrency", str(arguments.envoy_concurrency)]
    command += ["--request-body", arguments.request_body, *flags]
    if arguments.config:
        command += ["--config", arguments.config]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    announced = ""
    while "curl" not in announced:
        line = (await process.stdout.readline()).decode()
        assert line, f"the fleet did not start: {announced}"
        announced += line
    try:
        yield Fleet(process, port, announced)
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()


@contextlib.asynccontextmanager
async def plain_envoy(running: Fleet) -> AsyncIterator[int]:
    """The rival: the same Envoy settings and workers, round robin, no picker; its port."""
    port, admin = free_ports(HOST, 2, running.port + 500)
    config = BootstrapConfig(
        listen=SocketAddress(HOST, port),
        admin=SocketAddress(HOST, admin),
        picker=SocketAddress(HOST, 1),
        endpoints=tuple(SocketAddress(HOST, worker) for worker in running.worker_ports),
    )
    document = json.loads(to_json(build(config)))
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    del chain["filters"][0]["typed_config"]["http_filters"][0]
    pool = document["static_resources"]["clusters"][0]
    del pool["load_balancing_policy"]
    pool["lb_policy"] = "ROUND_ROBIN"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        process = await asyncio.create_subprocess_exec(
            *(str(find_envoy()), "-c", file.name, "--disable-hot-restart"),
            *("--concurrency", "1", "--log-level", "off"),
        )
        try:
            await until(SocketAddress(HOST, port), "/v1/models")
            yield port
        finally:
            process.kill()
            await process.wait()


async def measure(running: Fleet, port: int, shots: list[Shot]) -> Report:
    """Fire at `port` and put the outcomes into numbers."""
    cpu_before, served_before = cpu_seconds(running.pid), await running.served()
    begun = time.perf_counter()
    outcomes = await fire(shots, port)
    seconds = time.perf_counter() - begun
    cpu_after, served_after = cpu_seconds(running.pid), await running.served()
    good = [outcome for outcome in outcomes if outcome.status == 200]
    errors: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if outcome.status != 200:
            errors[outcome.error or str(outcome.status)] += 1
    streamed = [o.first_byte_seconds for o in good if o.first_byte_seconds < o.latency_seconds]
    return Report(
        sent=len(shots),
        succeeded=len(good),
        rate=round(len(good) / seconds, 1),
        errors=dict(errors),
        latency_ms=quantiles([outcome.latency_seconds for outcome in good]),
        streaming_ttft_ms=quantiles(streamed),
        cpu_seconds={k: round(v - cpu_before.get(k, 0.0), 2) for k, v in cpu_after.items()},
        served_by={k: v - served_before[k] for k, v in served_after.items()},
    )


def show(name: str, report: Report) -> None:
    """One run as a few lines."""
    cpu = ", ".join(f"{kind} {value:.2f}" for kind, value in sorted(report.cpu_seconds.items()))
    print(f"{name}: {report.succeeded}/{report.sent} answered, {report.rate}/s {report.errors}")
    print(f"  latency ms {report.latency_ms}   streaming TTFT ms {report.streaming_ttft_ms}")
    print(f"  CPU s: {cpu}")
    print(f"  served by: {list(report.served_by.values())}", flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Both runs; the document to write."""
    shots = schedule(arguments.rate, arguments.seconds, arguments.seed, arguments.max_tokens)
    async with fleet(arguments) as running:
        warm_up = schedule(50.0, 2.0, arguments.seed + 1, arguments.max_tokens)
        await fire(warm_up, running.port)
        picked = await measure(running, running.port, shots)
        show("pointsman", picked)
        async with plain_envoy(running) as port:
            await fire(warm_up, port)
            plain = await measure(running, port, shots)
        show("Envoy round robin", plain)
    ratios = {
        f"latency_{key}": round(picked.latency_ms[key] / max(plain.latency_ms[key], 1e-9), 3)
        for key in picked.latency_ms
    }
    print(f"pointsman / Envoy round robin: {ratios}")
    return {
        "arguments": vars(arguments),
        "cores": len(os.sched_getaffinity(0)),
        "pointsman": asdict(picked),
        "envoy_round_robin": asdict(plain),
        "ratios": ratios,
    }


def main() -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker-args", default="", help="more flags for the simulated workers")
    parser.add_argument("--config", help="the picker's configuration file")
    parser.add_argument("--request-body", choices=("buffered", "full-duplex"), default="buffered")
    parser.add_argument("--envoy-concurrency", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    document = uvloop.run(run(arguments))
    write_results(arguments.out / "fleet_rate.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
