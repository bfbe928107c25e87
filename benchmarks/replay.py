"""Ten thousand requests recorded and decided again: how many are identical, and what either costs.

    python benchmarks/replay.py [--requests 10000]

The same requests (chat, a shared system prompt and their own text, some of them streamed to the
end, some given up) go through the built-in configuration three times: decided alone, decided and
recorded, and decided again from the recording. The pool changes meanwhile: metrics, restarts,
endpoints that leave. Fixed seed. Prints a table and writes benchmarks/results/replay.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from result_files import RESULTS, write_results

from picker.app.in_use import pipeline_of
from picker.config.build import BuildOptions, build, default_config
from picker.config.catalog import builtin_plugins
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.recording.comparison import Tally
from picker.recording.file import RecordingFile
from picker.recording.lines import FORMAT_VERSION, Header
from picker.recording.reading import read_recording
from picker.recording.recorder import Recorder
from picker.recording.replay import Replay
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest

SEED = 20261122
HASH_SEED = 7
ENDPOINTS = (10, 100)
PROMPT_BYTES = 4_000
SYSTEM_PROMPTS = 8
UNDER_WAY = 64
RESULTS_FILE = RESULTS / "replay.json"


@dataclass(frozen=True)
class Measured:
    """One pool: microseconds of CPU are of whole requests, from their bodies to their ends."""

    endpoints: int
    requests: int
    decisions: int
    identical: int
    live_us: float
    recorded_us: float
    replayed_us: float
    bytes_per_decision: float


class Site:
    """A pool and the built-in configuration, with or without a recorder."""

    def __init__(self, endpoints: int, file: RecordingFile | None) -> None:
        self.draw = Random(SEED)
        self.datastore, inflight = Datastore(), InflightLoad()
        options = BuildOptions(Services(NoHttp(), hash_seed=HASH_SEED))
        loaded = default_config()
        clock = time.monotonic
        assembly = build(loaded, builtin_plugins(), PickerMetrics(), clock, options)
        pipeline = pipeline_of(assembly)
        self.recorder = None
        if file is not None:
            self.recorder = Recorder(file, time.monotonic)
            text, name = loaded.content.decode(), loaded.source.name
            header = Header(
                FORMAT_VERSION, "benchmark", "pool", name, text, HASH_SEED, True, 0.0, 0.0
            )
            self.recorder.begin(header, tuple(assembly.profiles))
            self.datastore.subscribe(self.recorder.endpoints_changed)
            pipeline = self.recorder.recorded(pipeline)
        observers = [] if self.recorder is None else [self.recorder]
        self.datastore.use((*assembly.observers, *observers), ())
        self.director = Director(pipeline, RequestContext(self.datastore, inflight, Random(SEED)))
        self.all = [
            Endpoint(f"w{index}", f"10.0.0.{index + 1}", 8000) for index in range(endpoints)
        ]
        self.datastore.set_endpoints(self.all)
        for endpoint in self.all:
            self.scraped(endpoint, 1.0)

    def scraped(self, endpoint: Endpoint, started: float) -> None:
        """New metrics of one endpoint."""
        metrics = EndpointMetrics(
            waiting_requests=self.draw.randrange(5),
            running_requests=self.draw.randrange(32),
            kv_cache_usage=self.draw.random(),
            block_size_tokens=16,
            num_kv_blocks=65536,
            process_start_time_seconds=started,
        )
        self.datastore.update_metrics(endpoint.key, metrics)

    def unrest(self, number: int) -> None:
        """What happens beside the requests."""
        self.scraped(self.draw.choice(self.all), 1.0 + number // 2000)
        if number % 1000 == 500:
            self.datastore.set_endpoints(self.all[1:])
        if number % 1000 == 600:
            self.datastore.set_endpoints(self.all)

    async def serve(self, requests: int) -> None:
        """So many requests, of which the latest are under way."""
        under_way = []
        for number, raw in enumerate(bodies(requests)):
            self.unrest(number)
            exchange = self.director.begin()
            await exchange.route(raw)
            under_way.append(exchange)
            if len(under_way) > UNDER_WAY:
                gone = under_way.pop(self.draw.randrange(len(under_way)))
                gone.finish(FinishCause.COMPLETED, 200)
            if number % 64 == 0:
                await asyncio.sleep(0)
        for exchange in under_way:
            exchange.finish(FinishCause.CLIENT_GONE)


def bodies(count: int) -> Iterator[RawRequest]:
    """Chat requests: four fifths a shared system prompt, the rest their own."""
    draw = Random(SEED)
    shared = [
        "".join(draw.choices("abcdefgh ", k=PROMPT_BYTES * 4 // 5)) for _ in range(SYSTEM_PROMPTS)
    ]
    for number in range(count):
        own = f"{number} " * (PROMPT_BYTES // 5 // 6)
        messages = [
            {"role": "system", "content": draw.choice(shared)},
            {"role": "user", "content": own},
        ]
        headers = {":path": "/v1/chat/completions", "x-request-id": f"r{number}"}
        yield RawRequest(headers, json.dumps({"model": "m", "messages": messages}).encode())


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """CPU seconds of all threads of this process."""
    began = time.process_time()
    yield
    into.append(time.process_time() - began)


async def measure(endpoints: int, requests: int, folder: Path) -> Measured:
    """One pool."""
    seconds: list[float] = []
    live = Site(endpoints, None)
    with timed(seconds):
        await live.serve(requests)
    path = folder / f"{endpoints}.jsonl"
    with timed(seconds):
        file = RecordingFile(path, 2**40, PickerMetrics().recording)
        recorded = Site(endpoints, file)
        writing = asyncio.create_task(file.run())
        await recorded.serve(requests)
        if recorded.recorder is not None:
            recorded.recorder.settle()
        writing.cancel()
        await file.close(time.monotonic())
    tally = Tally(3)
    with timed(seconds):
        for decision in Replay(str(path)).decisions(read_recording(path)):
            tally.add(decision)
    told = tally.result()
    for difference in told.differences:
        print("not identical:", difference)
    live_us, recorded_us, replayed_us = (1e6 * one / requests for one in seconds)
    size = path.stat().st_size / told.decisions
    return Measured(
        endpoints, requests, told.decisions, told.identical, live_us, recorded_us, replayed_us, size
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            asyncio.run(measure(count, arguments.requests, Path(folder))) for count in ENDPOINTS
        ]
    print("endpoints  decisions  identical  CPU µs a request: live  recorded  replayed  bytes each")
    for row in rows:
        print(
            f"{row.endpoints:9}  {row.decisions:9,}  {row.identical:9,}"
            f"  {row.live_us:22.0f}  {row.recorded_us:8.0f}  {row.replayed_us:8.0f}"
            f"  {row.bytes_per_decision:10,.0f}"
        )
    result = {"python": platform.python_version(), "rows": [asdict(row) for row in rows]}
    write_results(RESULTS_FILE, result)
    if any(row.identical != row.decisions for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
