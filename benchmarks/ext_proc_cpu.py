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
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from result_files import RESULTS, write_results

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
from picker.rpc.framing import prefix
from picker.rpc.options import ServerOptions
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Endpoint, EndpointMetrics

SEED = 20261121
CHUNK = 400
AT_ONCE = 16
WINDOW = 2**31 - 1
RESULTS_FILE = RESULTS / "ext_proc_cpu.json"
CALL = (
    *((":method", "POST"), (":scheme", "http"), (":authority", "picker")),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    *(("te", "trailers"), ("content-type", "application/grpc"), ("x-envoy-internal", "true")),
)


class Sink(asyncio.Transport):
    """A transport that counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def write(self, data: Any) -> None:
        """Count."""
        self.num_bytes += len(data)

    def is_closing(self) -> bool:
        """Never."""
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""


def messages(index: int, size: int, rng: random.Random) -> list[bytes]:
    """Request headers, request body and response headers of one request, framed."""
    shared = f"system prompt {rng.randrange(20)} " * (size // 24)
    content = f"{shared[: size * 4 // 5]} {rng.randbytes(size // 12).hex()}"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    headers, whole, response = (pb.ProcessingRequest() for _ in range(3))
    for name, value in (
        *((":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http")),
        *((":authority", "127.0.0.1:8080"), ("content-type", "application/json")),
        *(("content-length", str(len(body))), ("user-agent", "benchmark"), ("accept", "*/*")),
        ("x-request-id", f"7b2cb3b6-0000-4000-8000-{index:012}"),
    ):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    mode = processing_mode_pb2.ProcessingMode
    headers.protocol_config.request_body_mode = mode.BUFFERED
    headers.protocol_config.response_body_mode = mode.NONE
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    for name, value in (("status", "200"), ("content-type", "application/json")):
        key = ":status" if name == "status" else name
        response.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    serialized = (message.SerializeToString() for message in (headers, whole, response))
    return [prefix(message) + message for message in serialized]


def record(count: int, size: int) -> tuple[bytes, list[list[bytes]]]:
    """A connection's first bytes, and the pieces of each stream after it."""
    rng = random.Random(SEED)
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.local_settings.initial_window_size = WINDOW
    client.initiate_connection()
    client.increment_flow_control_window(WINDOW - 65_535)
    client.remote_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    opening = client.data_to_send()
    streams = []
    for index in range(count):
        stream_id = 1 + 2 * index
        client.outbound_flow_control_window = WINDOW  # nobody reads the picker's updates
        client.send_headers(stream_id, CALL)
        client.streams[stream_id].outbound_flow_control_window = WINDOW
        pieces = []
        for message in messages(index, size, rng):
            for at in range(0, len(message), 16_384):
                client.send_data(stream_id, message[at : at + 16_384])
            pieces.append(client.data_to_send())
        client.end_stream(stream_id)
        streams.append([*pieces, client.data_to_send()])
    return opening, streams


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
    opening, streams = record(options.requests, options.body_bytes)
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
