"""Workers that fail behind a real Envoy and a real picker: little is lost, and they come back."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import yaml

from fleet.envoy.probe import request
from fleet.envoy.settings import PipeAddress
from tests.support.fleet.running_fleet import LIMIT_SECONDS, Fleet, ready_fleet
from tests.support.waiting import until

FAILS_ALL = {"failure-injection-rate": 100, "failure-types": ["internal_error"]}
FAILS_NONE = {"failure-injection-rate": 0}


class FailingFleet:
    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._fleet, self._http = fleet, http
        line = next(line for line in fleet.descendants().values() if "envoy.yaml" in line)
        found = re.search(r"-c (\S+)/envoy\.yaml", line)
        self._folder = Path(found[1])
        self._numbers = count()
        self.statuses: Counter[int] = Counter()

    async def configure(self, number: int, settings: object) -> None:
        url = f"{self._fleet.worker_urls[number]}/admin/config"
        async with self._http.post(url, json=settings) as response:
            assert response.status == 200, await response.text()

    def list_workers(self, *numbers: int) -> None:
        entries = []
        for number in numbers:
            host, _, port = self._fleet.worker_urls[number].rpartition("//")[2].rpartition(":")
            entries.append({"name": f"worker-{number + 1}", "address": host, "port": port})
        fresh = self._folder / "endpoints.new"
        fresh.write_text(yaml.safe_dump({"endpoints": entries}))
        fresh.rename(self._folder / "endpoints.yaml")

    async def num_endpoints(self) -> int:
        async with self._http.get(f"{self._fleet.picker_url}/endpoints") as response:
            return len((await response.json())["endpoints"])

    async def received(self, number: int) -> int:
        port = int(self._fleet.worker_urls[number].rpartition(":")[2])
        admin = PipeAddress(str(self._folder / "envoy.sock"))
        page = await request(admin, "/clusters?format=json", timeout_seconds=LIMIT_SECONDS)
        clusters = json.loads(page.body)
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
        url = f"{self._fleet.url}/v1/chat/completions"
        message = {"role": "user", "content": f"question {next(self._numbers)}"}
        body = {"model": "sim", "max_tokens": 4, "messages": [message]}
        async with self._http.post(url, json=body) as response:
            await response.read()
        self.statuses[response.status] += 1
        return response.status

    async def keep_asking(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.ask()

    async def spoilt_by_no_probe(self) -> float:
        spoilt = self.statuses[500]
        return spoilt - await self._fleet.series(PROBES, result="failure")

    async def until(self, name: str, value: float, /, **labels: str) -> None:
        await until(lambda: self._fleet.series(name, **labels), lambda found: found >= value)


pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("patient_envoy"), pytest.mark.full]
CLIENTS = 32
EJECTIONS = "pointsman_endpoint_ejections_total"
PROBES = "pointsman_endpoint_probes_total"


@asynccontextmanager
async def failing_fleet(*flags: str) -> AsyncIterator[tuple[Fleet, FailingFleet]]:
    timeout = aiohttp.ClientTimeout(LIMIT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        ready_fleet("--workers", "3", *flags) as fleet,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
    ):
        yield fleet, FailingFleet(fleet, http)


@asynccontextmanager
async def clients(failing: FailingFleet) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(failing.keep_asking(stop))
        try:
            yield
        finally:
            stop.set()


async def test_a_worker_that_fails_everything_spoils_few_requests() -> None:
    async with failing_fleet("--routing", "original-dst") as (fleet, failing):
        failing.list_workers(0, 1)
        await until(failing.num_endpoints, lambda found: found == 2)
        await failing.configure(2, FAILS_ALL)
        async with clients(failing):
            await until(lambda: failing.statuses[200] >= 3 * CLIENTS)
            loop = asyncio.get_running_loop()
            began = loop.time()
            failing.list_workers(0, 1, 2)
            await failing.until(PROBES, 2, result="failure")
            assert await failing.spoilt_by_no_probe() <= 5
            assert await fleet.series(PROBES) <= loop.time() - began
            await failing.configure(2, FAILS_NONE)
            spoilt = failing.statuses[500]
            await failing.until(PROBES, 1, result="success")
            assert failing.statuses[500] - spoilt <= 1  # a probe that was under way
            before = await failing.received(2)
            await until(lambda: failing.received(2), lambda found: found >= before + 20)
        assert await fleet.series(EJECTIONS) == 1
        assert await fleet.series("pointsman_endpoints_ejected") == 0
        assert set(failing.statuses) == {200, 500}


async def test_a_crowd_risks_little_on_an_idle_pool_with_a_broken_worker() -> None:
    async with failing_fleet() as (_, failing):
        await failing.configure(0, FAILS_ALL)
        received = await failing.received(0)
        async with clients(failing):
            await failing.until(EJECTIONS, 1)
            assert await failing.spoilt_by_no_probe() <= 5
            await until(lambda: failing.statuses[200] >= 3 * CLIENTS)
            await failing.until(PROBES, 1, result="failure")
        assert set(failing.statuses) == {200, 500}
        assert await failing.received(0) - received == failing.statuses[500]
