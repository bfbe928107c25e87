"""Clients for `overload.py`: tenants that ask at given rates, and looks at the picker meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fleet_rate import HOST, Connection, Fleet, Outcome, Shot, cpu_seconds, descendants, kind_of
from prometheus_client.parser import text_string_to_metric_families

from fleet.envoy.settings import SocketAddress
from fleet.probe import request

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLE_SECONDS = 20.0
WATCH_SECONDS = 0.25
QUEUE_TIMES = "llm_d_epp_flow_control_request_queue_duration_seconds_bucket"
QUEUE_SIZE = "llm_d_epp_flow_control_queue_size"
QUEUE_BYTES = "llm_d_epp_flow_control_queue_bytes"
AT_REST = (QUEUE_SIZE, QUEUE_BYTES, "llm_d_epp_request_running")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: whose it was, when it was due (seconds from the start), what became of it."""

    tenant: str
    at_seconds: float
    outcome: Outcome

    @property
    def done_at(self) -> float:
        """When its answer was whole."""
        return self.at_seconds + self.outcome.latency_seconds

    @property
    def is_good(self) -> bool:
        """Whether it was served."""
        return self.outcome.status == 200


@dataclass(slots=True)
class Watch:
    """What the picker takes and holds, as it was looked at every quarter of a second."""

    rss_bytes: list[int] = field(default_factory=list)
    queue_bytes: list[float] = field(default_factory=list)
    queue_size: list[float] = field(default_factory=list)


class Site:
    """A running fleet and the load on it."""

    def __init__(self, running: Fleet, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._port = running.port
        self._picker = SocketAddress(HOST, running.picker_port)
        self._pool: list[Connection] = []
        self._root_pid = running.pid
        (self._picker_pid,) = [p for p in descendants(running.pid) if kind_of(p) == "picker"]
        filler = "x" * arguments.body_bytes
        self._body = {
            "model": "sim",
            "max_tokens": arguments.max_tokens,
            "ignore_eos": True,
            "metadata": {"filler": filler},
        }

    def shots(self, rng: random.Random, rate: float, seconds: float, tenant: str) -> list[Shot]:
        """Poisson arrivals of one tenant."""
        found, at = [], rng.expovariate(rate)
        while at < seconds:
            content = f"question {rng.randrange(10**6)}"
            messages = [{"role": "user", "content": content}]
            body = json.dumps({**self._body, "messages": messages}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\n"
                f"x-llm-d-inference-fairness-id: {tenant}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            found.append(Shot(at, head.encode() + body))
            at += rng.expovariate(rate)
        return found

    async def offer(
        self, load: dict[str, float], seconds: float, seed: int, watch: Watch | None = None
    ) -> list[Seen]:
        """Ask at these rates, by tenant; every request's end, in the order of their arrival."""
        rng = random.Random(seed)
        due = [
            (shot.at_seconds, tenant, shot)
            for tenant, rate in load.items()
            for shot in self.shots(rng, rate, seconds, tenant)
        ]
        due.sort(key=lambda one: one[0])
        begun = time.perf_counter()
        tasks: list[asyncio.Task[Seen]] = []
        watching = asyncio.create_task(self._watch(watch)) if watch else None
        for at, tenant, shot in due:
            pause = begun + at - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(self._one(shot, begun, tenant)))
        await asyncio.wait(tasks, timeout=SETTLE_SECONDS)
        if watching is not None:
            watching.cancel()
        late = Outcome(error="no answer in time")
        return [
            task.result() if task.done() else Seen(tenant, at, late)
            for task, (at, tenant, _) in zip(tasks, due, strict=True)
        ]

    async def _one(self, shot: Shot, begun: float, tenant: str) -> Seen:
        loop, due = asyncio.get_running_loop(), begun + shot.at_seconds
        try:
            if self._pool:
                connection = self._pool.pop()
            else:
                new = partial(Connection, self._pool)
                _, connection = await loop.create_connection(new, HOST, self._port)
            return Seen(tenant, shot.at_seconds, await connection.send(shot.payload, due))
        except OSError as error:
            return Seen(tenant, shot.at_seconds, Outcome(error=str(error)))

    async def _watch(self, watch: Watch) -> None:
        while True:
            watch.rss_bytes.append(self.rss_bytes())
            sums = await self.sums(QUEUE_SIZE, QUEUE_BYTES)
            watch.queue_size.append(sums[QUEUE_SIZE])
            watch.queue_bytes.append(sums[QUEUE_BYTES])
            await asyncio.sleep(WATCH_SECONDS)

    def cpu_seconds(self) -> dict[str, float]:
        """Used so far, by kind of process."""
        return cpu_seconds(self._root_pid)

    def rss_bytes(self) -> int:
        """Memory of the picker."""
        return int(Path(f"/proc/{self._picker_pid}/statm").read_text().split()[1]) * PAGE_BYTES

    async def sums(self, *names: str) -> dict[str, float]:
        """The sum of each of these series of the picker."""
        page = await self._page()
        return {name: sum(value for _, value in _samples(page, name)) for name in names}

    async def queue_times(self, tenant: str) -> dict[float, float]:
        """How many requests of a tenant waited for so long or less before they were let in."""
        wanted = {"fairness_id": tenant, "outcome": "Dispatched"}.items()
        found: dict[float, float] = {}
        for labels, value in _samples(await self._page(), QUEUE_TIMES):
            if wanted <= labels.items():
                edge = float(labels["le"])
                found[edge] = found.get(edge, 0.0) + value
        return found

    async def at_rest(self) -> dict[str, float]:
        """What is left when nobody asks any more, by counter."""
        left = await self.sums(*AT_REST)
        page = json.loads((await request(self._picker, "/endpoints")).body)
        left["inflight"] = sum(row["inflight_requests"] for row in page["endpoints"])
        return left

    async def _page(self) -> str:
        return (await request(self._picker, "/metrics", timeout_seconds=10.0)).body.decode()


def _samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """The labels and values of one series."""
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
        if sample.name == name
    ]
