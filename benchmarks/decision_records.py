"""What remembering requests costs: a share of a decision, memory, and how long an answer takes.

    python benchmarks/decision_records.py [--decisions 20000]

A decision is all of `Exchange.route` and `finish`, with the built-in configuration, steps and
metrics included. The same requests go, in small turns, through two directors in one process: one
that only the metrics watch, and one that records. Each has a pool, an index and in-flight requests
of its own, so that both see the same. Fixed seed.
Compared are CPU times of turns, the first decile of each side: what else a machine does only ever
adds to them.

`at full speed` decisions follow each other at once, and records share what they know of endpoints;
`alone` every record is packed by itself, as when decisions are 5 ms apart: when its request is
over, so what the request waits for is told besides. Memory is that of full rings of such records,
in pools whose every scrape came between two decisions. Prints a table and writes
benchmarks/results/decision_records.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace
from result_files import RESULTS, write_results
from scheduling import SEED, pool

from picker.app.in_use import pipeline_of
from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.decisions.decision import Decision, Watchers
from picker.decisions.ring import DecisionRing
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director, Exchange
from picker.requestcontrol.pipeline import RequestContext
from picker.telemetry.request_metrics import RequestMetrics
from picker.telemetry.traffic import EndpointTraffic
from picker.types import (
    FinishCause,
    RawRequest,
)

ENDPOINTS = (10, 100, 1000)
PROMPT_BYTES = (4_000, 40_000)
SYSTEM_PROMPTS = 8
TURN = 50
RESULTS_FILE = RESULTS / "decision_records.json"


class Crowd(DecisionRing):
    """Records of requests that come without pause."""

    def goes_on(self) -> None:
        """The turn of the other side was no pause."""
        self._decided_at = time.monotonic()


class AlwaysAlone(Crowd):
    """Packs every record."""

    def decided(self, decision: Decision) -> None:
        """As if no decision had been for long."""
        self._decided_at = 0.0
        super().decided(decision)


@dataclass
class Side:
    """A director with a pool of its own; `records` None: it records nothing."""

    endpoints: int
    records: Crowd | None
    rng: Random = field(default_factory=lambda: Random(SEED))
    under_way: deque[Exchange] = field(default_factory=deque)

    def __post_init__(self) -> None:
        metrics = PickerMetrics()
        assembly = build(default_config(), builtin_plugins(), metrics, time.monotonic)
        self.datastore = Datastore(assembly.observers)
        pool(self.endpoints, self.datastore, self.rng)
        self.keys = [candidate.key for candidate in self.datastore.snapshot().candidates]
        usual = (RequestMetrics(metrics), EndpointTraffic())
        watchers = Watchers(*usual) if self.records is None else Watchers(*usual, self.records)
        context = RequestContext(self.datastore, InflightLoad(), Random(SEED), watchers)
        self.director = Director(pipeline_of(assembly), context)

    def scraped(self, key: str) -> None:
        """An endpoint has told its load."""
        known = self.datastore.get(key)
        assert known is not None
        assert known.metrics is not None
        metrics = replace(known.metrics, updated_at_seconds=time.monotonic())
        self.datastore.update_metrics(key, metrics)

    def decide(self, raw: RawRequest) -> None:
        """One request comes; the oldest of enough others ends."""
        self.route(raw)
        self.finish()

    def route(self, raw: RawRequest) -> None:
        """What a request waits for."""
        exchange = self.director.begin()
        at_once(exchange.route(raw))
        self.under_way.append(exchange)

    def finish(self) -> None:
        """The oldest of enough requests ends."""
        if len(self.under_way) > 4 * min(self.endpoints, 64):
            self.under_way.popleft().finish(FinishCause.COMPLETED, 200)

    def turn(self, requests: Sequence[RawRequest]) -> tuple[float, float]:
        """CPU seconds that the decisions about these take, and the part of it that the requests
        wait for; a scrape comes before each.
        """
        if self.records is not None:
            self.records.goes_on()
        keys = [self.rng.choice(self.keys) for _ in requests]
        whole = waited = 0.0
        for key, raw in zip(keys, requests, strict=True):
            self.scraped(key)
            began = time.process_time()
            self.route(raw)
            routed = time.process_time()
            self.finish()
            whole += time.process_time() - began
            waited += routed - began
        return whole, waited

    def end(self) -> None:
        """All requests are over."""
        while self.under_way:
            self.under_way.popleft().finish(FinishCause.COMPLETED, 200)


def at_once(asking: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        asking.send(None)
    except StopIteration:
        return
    raise AssertionError("a decision waited")


def requests(count: int, rng: Random, size: int = PROMPT_BYTES[0]) -> list[RawRequest]:
    """Chat requests: four fifths of each prompt are shared with an eighth of them."""
    shared = ["".join(rng.choices("abcdefgh ", k=size * 4 // 5)) for _ in range(SYSTEM_PROMPTS)]
    made = []
    for index in range(count):
        own = f"{index} {''.join(rng.choices('abcdefgh ', k=size // 5))}"
        messages = [
            {"role": "system", "content": rng.choice(shared)},
            {"role": "user", "content": own},
        ]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {
            ":path": "/v1/chat/completions",
            ":method": "POST",
            "x-request-id": f"{rng.getrandbits(128):032x}",
        }
        made.append(RawRequest(headers, body))
    return made


def overhead(
    endpoints: int, decisions: int, records: Crowd, size: int = PROMPT_BYTES[0]
) -> dict[str, float]:
    """Microseconds of a decision without records, and the ratio with them."""
    sides = Side(endpoints, None), Side(endpoints, records)
    made = requests(1000, Random(SEED), size)
    turns: tuple[list[float], list[float]] = ([], [])
    waits: tuple[list[float], list[float]] = ([], [])
    for start in range(0, records.capacity, TURN):  # from now on records take each other's place
        for side in sides:
            side.turn(made[start % len(made) : start % len(made) + TURN])
    gc.collect()
    gc.freeze()  # as the picker does when it has started
    for turn in range(decisions // TURN):
        start = turn * TURN % len(made)
        batch = made[start : start + TURN]
        order = (0, 1) if turn % 2 else (1, 0)
        for which in order:
            whole, waited = sides[which].turn(batch)
            turns[which].append(whole / TURN * 1e6)
            waits[which].append(waited / TURN * 1e6)
    plain, recording = (statistics.quantiles(times, n=10)[0] for times in turns)
    routed, routed_recording = (statistics.quantiles(times, n=10)[0] for times in waits)
    return {
        "plain_us": round(plain, 2),
        "added_us": round(recording - plain, 2),
        "ratio": round(recording / plain, 4),
        "waited_ratio": round(routed_recording / routed, 4),
    }


def memory(endpoints: int, is_alone: bool, capacity: int) -> int:
    """Bytes that a record takes in a full ring; in a crowd a scrape comes before each decision,
    alone all endpoints are scraped before each.
    """
    records = AlwaysAlone(capacity) if is_alone else Crowd(capacity)
    side = Side(endpoints, records)
    made = requests(200, Random(SEED))
    for raw in made:
        side.decide(raw)
    side.end()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    begun = records.size
    for index in range(capacity - begun):
        for key in side.keys if is_alone else (side.rng.choice(side.keys),):
            side.scraped(key)
        # Ids as they come from the wire: each a text of its own.
        raw = made[index % len(made)]
        headers = {**raw.headers, "x-request-id": f"{index:032x}"}
        side.decide(RawRequest(headers, raw.body))
        side.under_way.popleft().finish(FinishCause.COMPLETED, 200)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken // (capacity - begun)


def answers(endpoints: int, capacity: int) -> dict[str, float]:
    """Milliseconds that finding and showing a request takes with a full ring."""
    records = Crowd(capacity)
    side = Side(endpoints, records)
    rng = Random(SEED)
    ids = []
    made = requests(200, rng)
    for index in range(capacity):
        raw = made[index % len(made)]
        ids.append(f"{index:032x}")
        side.decide(RawRequest({**raw.headers, "x-request-id": ids[-1]}, raw.body))
    side.end()
    took = []
    for wanted in rng.choices(ids, k=500):
        began = time.perf_counter()
        assert records.find(wanted) is not None
        took.append((time.perf_counter() - began) * 1000)
    began = time.perf_counter()
    records.last(100)
    listing = (time.perf_counter() - began) * 1000
    return {
        "find_p50_ms": round(statistics.median(took), 3),
        "find_p99_ms": round(statistics.quantiles(took, n=100)[98], 3),
        "last_100_ms": round(listing, 3),
    }


def main() -> None:
    """Measure every pool."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--capacity", type=int, default=10_000)
    arguments = parser.parse_args()
    rows = []
    for endpoints in ENDPOINTS:
        decisions = arguments.decisions if endpoints <= 100 else arguments.decisions // 5
        capacity = arguments.capacity if endpoints <= 100 else arguments.capacity // 5
        crowd = overhead(endpoints, decisions, Crowd(capacity))
        alone = overhead(endpoints, decisions // 2, AlwaysAlone(capacity))
        long = overhead(endpoints, decisions // 2, Crowd(capacity), PROMPT_BYTES[1])
        row = {
            "endpoints": endpoints,
            "at_full_speed": crowd,
            "at_full_speed_long_prompts": long,
            "alone": alone,
            "record_bytes_at_full_speed": memory(endpoints, False, min(capacity, 3000)),
            "record_bytes_alone": memory(endpoints, True, min(capacity, 1000)),
            **answers(endpoints, capacity),
        }
        rows.append(row)
        print(
            f"{endpoints:>5} endpoints: a decision {crowd['plain_us']:.0f} µs; records add "
            f"{crowd['added_us']:.1f} µs ({crowd['ratio'] - 1:+.1%}) at full speed, "
            f"{long['added_us']:.1f} µs ({long['ratio'] - 1:+.1%}) with long prompts, "
            f"{alone['added_us']:.1f} µs ({alone['ratio'] - 1:+.1%}) alone, "
            f"{crowd['waited_ratio'] - 1:+.1%} and {alone['waited_ratio'] - 1:+.1%} of what a "
            f"request waits for; "
            f"{row['record_bytes_at_full_speed']} and {row['record_bytes_alone']} bytes a record; "
            f"found and shown in {row['find_p99_ms']} ms (p99)"
        )
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    document = {"seed": SEED, "prompt_bytes": PROMPT_BYTES, **machine, "rows": rows}
    write_results(RESULTS_FILE, document)


if __name__ == "__main__":
    main()
