"""A running fleet whose workers are made to fail, and what each of them was sent meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families
from running_fleet import LIMIT_SECONDS, Fleet

from fleet.envoy.settings import PipeAddress
from fleet.probe import request

FAILS_ALL = {"failure-injection-rate": 100, "failure-types": ["internal_error"]}
FAILS_NONE = {"failure-injection-rate": 0}


class FailingFleet:
    """Asks for faults, sends requests, and looks at what Envoy and the picker count."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._fleet, self._http = fleet, http
        line = next(line for line in fleet.descendants().values() if "envoy.yaml" in line)
        found = re.search(r"-c (\S+)/envoy\.yaml", line)
        assert found is not None
        self._folder = Path(found[1])
        self._numbers = count()
        self.statuses: Counter[int] = Counter()

    def pid_of(self, number: int) -> int:
        """The process of a worker, of those that are started again the present one."""
        port = self._fleet.worker_urls[number].rpartition(":")[2]
        lines = self._fleet.descendants().items()
        return next(pid for pid, line in lines if "-m worker" in line and f"--port {port}" in line)

    async def configure(self, number: int, settings: object) -> None:
        """Make a worker fail, or stop failing."""
        url = f"{self._fleet.worker_urls[number]}/admin/config"
        async with self._http.post(url, json=settings) as response:
            assert response.status == 200, await response.text()

    def list_workers(self, *numbers: int) -> None:
        """Write the picker's endpoints file anew, with these alone."""
        entries = []
        for number in numbers:
            host, _, port = self._fleet.worker_urls[number].rpartition("//")[2].rpartition(":")
            entries.append({"name": f"worker-{number + 1}", "address": host, "port": port})
        fresh = self._folder / "endpoints.new"
        fresh.write_text(yaml.safe_dump({"endpoints": entries}))
        fresh.rename(self._folder / "endpoints.yaml")

    async def num_endpoints(self) -> int:
        """How many the picker knows."""
        async with self._http.get(f"{self._fleet.picker_url}/endpoints") as response:
            return len((await response.json())["endpoints"])

    async def series(self, name: str, /, **labels: str) -> float:
        """The sum of the picker's samples of that name with these labels."""
        async with self._http.get(f"{self._fleet.picker_url}/metrics") as response:
            page = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def received(self, number: int) -> int:
        """How many requests Envoy has sent to a worker."""
        port = int(self._fleet.worker_urls[number].rpartition(":")[2])
        admin = PipeAddress(str(self._folder / "envoy.sock"))
        clusters = json.loads((await request(admin, "/clusters?format=json")).body)
        (pool,) = (one for one in clusters["cluster_statuses"] if one["name"] == "pool")
        # Where the picker says the address, Envoy may know it as several hosts.
        return sum(
            int(stat.get("value", 0))
            for host in pool["host_statuses"]
            if host["address"]["socket_address"]["port_value"] == port
            for stat in host["stats"]
            if stat["name"] == "rq_total"
        )

    async def ask(self) -> int:
        """One chat, with nothing that any worker could have cached; its status."""
        url = f"{self._fleet.url}/v1/chat/completions"
        message = {"role": "user", "content": f"question {next(self._numbers)}"}
        body = {"model": "sim", "max_tokens": 4, "messages": [message]}
        async with self._http.post(url, json=body) as response:
            await response.read()
        self.statuses[response.status] += 1
        return response.status

    async def keep_asking(self, stop: asyncio.Event) -> None:
        """One chat after the other, until told to stop."""
        while not stop.is_set():
            await self.ask()

    async def until(self, name: str, value: float, /, **labels: str) -> None:
        """Wait until a series has reached this."""

        async def has() -> bool:
            return await self.series(name, **labels) >= value

        await until(has)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that happens before long."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)
