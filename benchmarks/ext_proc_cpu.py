"""CPU of a request in the picker itself, without sockets: recorded HTTP/2 in, replies dropped.

    python benchmarks/ext_proc_cpu.py [--requests 6000] [--endpoints 10] [--body-bytes 1000]
    python benchmarks/ext_proc_cpu.py --decision-records 10000

Each request is a stream of four pieces (headers, body, response headers, end) that an HTTP/2 client
wrote beforehand; sixteen streams are under way at a time. Everything between the socket and the
reply runs as in production: frames, gRPC, protobuf, parser, producers, scorers, metrics. It prints
the median CPU time of chunks of 400 requests, and the least, which other programs on the machine
disturb little. With `--decision-records` the same chunks go, in turns, through a second picker that
records its decisions for `pointsman explain`. Fixed seed. Writes
benchmarks/results/ext_proc_cpu.json.
"""

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop
from measuring import command_line, write_results

from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.decisions.decision import Watchers
from picker.decisions.ring import DecisionRing
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


def contents(count: int, size: int) -> Iterator[str]:
    """Messages of about `size` bytes, which share twenty beginnings."""
    rng = random.Random(SEED)
    for _ in range(count):
        shared = f"system prompt {rng.randrange(20)} " * (size // 24)
        yield f"{shared[: size * 4 // 5]} {rng.randbytes(size // 12).hex()}"


class Subject:
    """A picker's request path behind one connection; `records` of its last decisions."""

    def __init__(self, endpoints: int, opening: bytes, records: int = 0) -> None:
        metrics = PickerMetrics()
        assembly = build(default_config(), builtin_plugins(), metrics, time.monotonic)
        datastore, self.requests = Datastore(assembly.observers), RequestMetrics(metrics)
        datastore.set_endpoints(
            Endpoint(f"w{n}", f"10.0.{n // 250}.{n % 250 + 1}", 8000) for n in range(endpoints)
        )
        for candidate in datastore.snapshot().candidates:
            datastore.update_metrics(candidate.key, EndpointMetrics(1, 2, 0.3, 16, 20_000))
        watchers = [self.requests, *([DecisionRing(records)] if records else [])]
        rng = random.Random(SEED)
        director = Director(
            assembly.pipeline, RequestContext(datastore, InflightLoad(), rng, Watchers(*watchers))
        )
        self._connection = build_server(director, options=ServerOptions()).accept()
        self._connection.connection_made(Sink())
        self._connection.data_received(opening)
        self.chunks: list[float] = []

    async def serve(self, streams: list[list[bytes]], counts: bool) -> None:
        """One chunk; stores its CPU microseconds a request where it counts."""
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
    subjects = {"": Subject(options.endpoints, opening)}
    if options.decision_records:
        name = f", with {options.decision_records} records"
        subjects[name] = Subject(options.endpoints, opening, options.decision_records)
    gc.collect()
    gc.freeze()
    for at in range(0, len(streams), CHUNK):
        for subject in subjects.values():
            await subject.serve(streams[at : at + CHUNK], counts=at > 0)
    found = []
    for name, subject in subjects.items():
        assert subject.requests.decisions == len(streams)
        median, least = statistics.median(subject.chunks), min(subject.chunks)
        found.append({"median_us": round(median, 1), "least_us": round(least, 1)})
        print(f"CPU µs a request{name}: {found[-1]}")
    return {**found[0], "with_records": found[1:]}


def main() -> None:
    """Measure, print and write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--endpoints", type=int, default=10)
    parser.add_argument("--body-bytes", type=int, default=1000)
    parser.add_argument("--decision-records", type=int, default=0, metavar="N")
    options = parser.parse_args()
    write_results(options, **uvloop.run(run(options)))


if __name__ == "__main__":
    main()
