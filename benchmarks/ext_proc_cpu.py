"""What a request costs the picker itself, without sockets: recorded HTTP/2 in, replies dropped.

    python benchmarks/ext_proc_cpu.py [--requests 6000] [--endpoints 10] [--body-bytes 1000]

Each request is a stream of four pieces (headers, body, response headers, end) that an HTTP/2 client
wrote beforehand; sixteen streams are under way at a time. Everything between the socket and the
reply runs as in production: frames, gRPC, protobuf, parser, producers, scorers, metrics. It prints
the median CPU time of chunks of 400 requests, and the least, which other programs on the machine
disturb little. Fixed seed. Writes benchmarks/results/ext_proc_cpu.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from result_files import RESULTS, write_results

sys.path.append(str(Path(__file__).parents[1]))

from picker.app.in_use import pipeline_of
from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.decisions.decision import Watchers
from picker.extproc.server import build_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.options import ServerOptions
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Endpoint, EndpointMetrics
from tests.support.picker.ext_proc_recording import Sink, record

SEED = 20261121
CHUNK = 400
AT_ONCE = 16
RESULTS_FILE = RESULTS / "ext_proc_cpu.json"


def contents(count: int, size: int) -> Iterator[str]:
    """Messages of about so many bytes, which share twenty beginnings."""
    rng = random.Random(SEED)
    for _ in range(count):
        shared = f"system prompt {rng.randrange(20)} " * (size // 24)
        yield f"{shared[: size * 4 // 5]} {rng.randbytes(size // 12).hex()}"


class Subject:
    """A picker's request path behind one connection."""

    def __init__(self, endpoints: int, opening: bytes) -> None:
        metrics = PickerMetrics()
        assembly = build(default_config(), builtin_plugins(), metrics, time.monotonic)
        datastore, self.requests = Datastore(assembly.observers), RequestMetrics(metrics)
        datastore.set_endpoints(
            Endpoint(f"w{n}", f"10.0.{n // 250}.{n % 250 + 1}", 8000) for n in range(endpoints)
        )
        for candidate in datastore.snapshot().candidates:
            datastore.update_metrics(candidate.key, EndpointMetrics(1, 2, 0.3, 16, 20_000))
        director = Director(
            pipeline_of(assembly),
            RequestContext(datastore, InflightLoad(), random.Random(SEED), Watchers(self.requests)),
        )
        self._connection = build_server(director, options=ServerOptions()).accept()
        self._connection.connection_made(Sink())
        self._connection.data_received(opening)
        self.chunks: list[float] = []

    async def serve(self, streams: list[list[bytes]], counts: bool) -> None:
        """One chunk; its CPU microseconds a request are kept when it counts."""
        begun = time.process_time()
        for at in range(0, len(streams), AT_ONCE):
            for phase in zip(*streams[at : at + AT_ONCE], strict=True):
                for piece in phase:
                    self._connection.data_received(piece)
                for _ in range(3):
                    await asyncio.sleep(0)
        if counts:
            self.chunks.append(1e6 * (time.process_time() - begun) / len(streams))


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All chunks but the first, which warms up."""
    opening, streams = record(contents(options.requests, options.body_bytes))
    subject = Subject(options.endpoints, opening)
    gc.collect()
    gc.freeze()
    for at in range(0, len(streams), CHUNK):
        await subject.serve(streams[at : at + CHUNK], counts=at > 0)
    assert subject.requests.decisions == len(streams)
    found = {
        "median_us": round(statistics.median(subject.chunks), 1),
        "least_us": round(min(subject.chunks), 1),
    }
    print(f"CPU µs a request: {found}")
    return {"arguments": vars(options) | {"json": str(options.json)}, **found}


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--endpoints", type=int, default=10)
    parser.add_argument("--body-bytes", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=RESULTS_FILE)
    options = parser.parse_args()
    document = uvloop.run(run(options))
    write_results(options.json, document)


if __name__ == "__main__":
    main()
