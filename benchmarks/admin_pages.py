"""Pages of the picker's HTTP port: their size, and how long decisions wait while they are made.

    python benchmarks/admin_pages.py [--values 100000] [--endpoints 4,1000]

A picker of one pool with flow control, a producer of loads by tenant and a ring of 10,000 decisions
decides `--values` requests, each with a model, a tenant, an objective, an id and other headers that
no request had before; all are answered with their usage. Of the models the workers name one. Then
each page is read over and over by another process, while requests are decided one after the other,
half of them with new values. The longest decision is printed beside the same without a reader, in
turns, also in CPU time, which other programs on the machine disturb little. Fixed seed. Writes
benchmarks/results/admin_pages.json.
"""

import argparse
import asyncio
import gc
import json
import resource
import tempfile
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from measuring import Table, child, command_line, numbers, write_results

from picker.admin.routes import PoolPages
from picker.admin.server import AdminServer
from picker.app.picker import compose
from picker.app.served_pool import ServedPool
from picker.cli.options import Options
from picker.types import EndpointMetrics, FinishCause, RawRequest, ResponseHead

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: queue-scorer}
- {type: prefix-cache-scorer}
- {type: active-request-scorer}
"""
PAGES: tuple[str, ...] = (
    "/metrics",
    "/endpoints",
    "/endpoints?history=120",
    "/decisions?limit=1000",
)
PAGES += ("/decisions/last", "/queues", "/config")
USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{}}}'
SECONDS = 2.0


def read_pages(pipe: Connection, url: str) -> None:
    """Another process: reads each page that it is sent the name of, over and over for as long."""
    pipe.send("started")
    while True:
        path, seconds = pipe.recv()
        end, size, times = time.perf_counter() + seconds, 0, 0
        while time.perf_counter() < end:
            with urllib.request.urlopen(url + path) as answer:
                size, times = max(size, len(answer.read())), times + 1
        pipe.send((size, times))


class Subject:
    """A picker without ports for requests; the pool of `endpoints` with their load."""

    def __init__(self, folder: Path, endpoints: int) -> None:
        path = folder / "endpoints.yaml"
        names = [f"worker-{number}" for number in range(endpoints)]
        rows = [
            {"name": name, "address": f"10.0.{number >> 8}.{number & 255}", "port": 8000}
            for number, name in enumerate(names)
        ]
        path.write_text(json.dumps({"endpoints": rows}))
        picker = compose(Options(config_text=CONFIG, endpoints_file=path))
        self.pool: ServedPool = picker.pools[""]
        self.pool.load()
        load = EndpointMetrics(2, 5, 0.4, 16, 20_000, updated_at_seconds=time.monotonic() + 1e6)
        for name in names:
            self.pool.datastore.update_metrics(f"default/{name}", load)
        self.pool.datastore.add_models(frozenset({"served"}))
        self.pages = PoolPages(self.pool)
        gc.collect()
        gc.freeze()  # as the picker does when it starts
        self._sent = 0

    async def decide(self, is_new: bool) -> None:
        """One request from its arrival to the end of its response."""
        self._sent += 1
        number = self._sent if is_new else 0
        model = f"model-{number}" if number % 2 else "served"
        headers = {
            ":path": f"/v1/completions?n={number}",
            "x-request-id": f"id-{number}",
            "x-llm-d-inference-fairness-id": f"tenant-{number}",
            "x-llm-d-inference-objective": f"objective-{number}",
            f"x-header-{number}": f"value-{number}",
            "x-session-token": f"session-{number}",
        }
        body = {"model": model, "prompt": f"prompt {number}", "user": f"user-{number}"}
        exchange = self.pool.director.begin()
        decision = await exchange.route(RawRequest(headers, json.dumps(body).encode()))
        tap = decision.response
        if tap is None:
            raise TypeError("a request with a body has a response that is seen")
        tap.head(ResponseHead(200, {"content-type": "application/json"}))
        tap.body(USAGE, True)
        exchange.finish(FinishCause.COMPLETED, 200)

    async def watched(self, seconds: float) -> dict[str, float]:
        """Decide one after the other for so long; all in milliseconds.

        `longest_ms` is from a moment at which a request could have come to the end of its decision,
        while other programs run too; `cpu_ms` is the same in CPU time of this thread, `hold_ms` its
        part before the decision.
        """
        end = time.perf_counter() + seconds
        longest = cpu = hold = 0.0
        last, worked = time.perf_counter(), time.thread_time()
        while last < end:
            await asyncio.sleep(0)  # whatever else is due
            hold = max(hold, time.thread_time() - worked)
            await self.decide(bool(self._sent % 2))
            cpu = max(cpu, time.thread_time() - worked)
            longest = max(longest, time.perf_counter() - last)
            last, worked = time.perf_counter(), time.thread_time()
        return {"longest_ms": longest * 1e3, "cpu_ms": cpu * 1e3, "hold_ms": hold * 1e3}


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def measured(options: argparse.Namespace, endpoints: int, table: Table) -> dict[str, Any]:
    """Measure one size of the pool."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder), endpoints)
        memory = {}
        for count in range(options.values + 1):
            if count in (options.values // 2, options.values):
                memory[count] = round(resident_mib(), 1)
            await subject.decide(True)
        subject.pages.sample()
        for _ in range(120):
            subject.pages.sample()
        server = AdminServer.of_one(subject.pages, lambda: True)
        port = await server.start("127.0.0.1", 0)
        with child(read_pages, f"http://127.0.0.1:{port}") as pipe:
            loop = asyncio.get_running_loop()
            pipe.recv()
            for path in PAGES:
                alone = await subject.watched(options.seconds)
                pipe.send((path, options.seconds))
                found = await subject.watched(options.seconds)
                size, times = await loop.run_in_executor(None, pipe.recv)
                table.add(
                    endpoints=endpoints,
                    page=path,
                    kilobytes=size / 1e3,
                    read=times,
                    **found,
                    alone_longest_ms=alone["longest_ms"],
                    alone_cpu_ms=alone["cpu_ms"],
                )
        await server.stop()
        return {"endpoints": endpoints, "resident_mib_after": memory}


async def run(options: argparse.Namespace) -> None:
    """Measure all sizes of the pool."""
    table = Table(
        *("endpoints", "page <24", "kilobytes .0f", "read", "longest_ms .1f", "cpu_ms .1f"),
        *("hold_ms .1f", "alone_longest_ms .1f", "alone_cpu_ms .1f"),
    )
    memory = [await measured(options, endpoints, table) for endpoints in options.endpoints]
    for row in memory:
        print(row)
    write_results(options, pages=table.rows, memory=memory)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--values", type=int, default=100_000, help="distinct values of each kind")
    parser.add_argument("--endpoints", type=numbers(int), default=[4, 1000], help="pool sizes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each page")
    uvloop.run(run(parser.parse_args()))
