"""What failing workers and stale metrics cost a fleet, and how soon a worker is used again.

Starts `pointsman up --engine sim` and asks it at a steady rate (open loop, Poisson) for all of it.
A worker that answers 500 to everything joins, is healed, turns bad under load, is healed again, and
is killed; then no metrics page can be read any more, against the same arrivals before and after.
Prints a table, the bounds beside what was measured, and writes
benchmarks/results/endpoint_faults.json.

    python benchmarks/endpoint_faults.py --workers 4 --rate 120
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import httpx
import uvloop
import yaml
from fleet_rate import HOST, Fleet, descendants, fleet
from overload_clients import Seen, Site
from result_files import RESULTS, write_results

from fleet.probe import NoReplyError

EJECTIONS = "pointsman_endpoint_ejections_total"
EJECTED = "pointsman_endpoints_ejected"
FAILS_ALL = {"failure-injection-rate": 100, "failure-types": ["internal_error"]}
WELL = {"failure-injection-rate": 0, "metrics-page": "ok"}
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 30.0


def command_of(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Faults:
    """Makes workers of a running fleet fail, and looks at what the picker says of it."""

    def __init__(self, running: Fleet, site: Site, http: httpx.AsyncClient) -> None:
        self._running, self._site, self._http = running, site, http
        lines = [command_of(pid) for pid in descendants(running.pid)]
        folders = (re.search(r"-c (\S+)/envoy\.yaml", line) for line in lines)
        self._folder = Path(next(found[1] for found in folders if found))
        self.last = len(running.worker_ports) - 1

    async def configure(self, number: int, settings: dict[str, object]) -> None:
        """Change the faults of a worker."""
        url = f"http://{HOST}:{self._running.worker_ports[number]}/admin/config"
        (await self._http.post(url, json=settings)).raise_for_status()

    def list_workers(self, number: int) -> None:
        """Have the picker know the first so many."""
        entries = [
            {"name": f"worker-{index + 1}", "address": HOST, "port": str(port)}
            for index, port in enumerate(self._running.worker_ports[:number])
        ]
        fresh = self._folder / "endpoints.new"
        fresh.write_text(yaml.safe_dump({"endpoints": entries}), encoding="utf-8")
        fresh.rename(self._folder / "endpoints.yaml")

    def kill(self, number: int) -> None:
        """SIGKILL a worker."""
        port = self._running.worker_ports[number]
        for pid in descendants(self._running.pid):
            if "-m worker " in (line := command_of(pid)) and f"--port {port}" in line:
                os.kill(pid, signal.SIGKILL)

    async def served(self, number: int) -> int:
        """How many requests a worker has answered well; 0 while it is gone."""
        try:
            return (await self._running.served())[f"worker-{number + 1}"]
        except NoReplyError:
            return 0

    async def until(self, series: str, value: float) -> float:
        """When a series of the picker has that value (`time.perf_counter`)."""

        async def has() -> bool:
            return (await self._site.sums(series))[series] == value

        return await until(has)


async def until(condition: Callable[[], Awaitable[bool]]) -> float:
    """When something has come true (`time.perf_counter`)."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await condition():
                return time.perf_counter()
            await asyncio.sleep(POLL_SECONDS)


def failures(seen: Sequence[Seen], begun: float) -> list[float]:
    """When errors of a worker came back, in order (`time.perf_counter`)."""
    return sorted(begun + one.done_at for one in seen if one.outcome.status == 500)


async def joins(faults: Faults, site: Site, arguments: argparse.Namespace) -> dict[str, object]:
    """A worker that fails everything joins under load; after a while it is healed."""
    faults.list_workers(faults.last)
    await asyncio.sleep(1.0)
    await faults.configure(faults.last, FAILS_ALL)
    seconds = arguments.failing_seconds
    begun = time.perf_counter()
    load = asyncio.create_task(site.offer({"all": arguments.rate}, seconds + 13.0, arguments.seed))
    await asyncio.sleep(1.0)
    faults.list_workers(faults.last + 1)
    ejected = await faults.until(EJECTIONS, 1)
    await asyncio.sleep(seconds)
    await faults.configure(faults.last, WELL)
    healed = time.perf_counter()
    back = await faults.until(EJECTED, 0)
    errors = failures(await load, begun)
    before = [at for at in errors if at <= ejected]
    probes = [at for at in errors if at > ejected]
    gaps = [after - one for one, after in pairwise([before[-1], *probes])]
    return {
        "errors_before_ejection": len(before),
        "failed_probes": len(probes),
        "shortest_gap_seconds": round(min(gaps), 2) if gaps else None,
        "failed_probes_per_second": round(len(probes) / (healed - ejected), 2),
        "back_after_seconds": round(back - healed, 2),
    }


async def turns_bad(faults: Faults, site: Site, arguments: argparse.Namespace) -> dict[str, object]:
    """A worker that has served for a while fails everything from one moment on, and is healed."""
    begun = time.perf_counter()
    load = asyncio.create_task(site.offer({"all": arguments.rate}, 12.0, arguments.seed + 1))
    await asyncio.sleep(1.0)
    already = (await site.sums(EJECTIONS))[EJECTIONS]
    await faults.configure(faults.last, FAILS_ALL)
    ejected = await faults.until(EJECTIONS, already + 1)
    await asyncio.sleep(2.0)
    await faults.configure(faults.last, WELL)
    healed = time.perf_counter()
    back = await faults.until(EJECTED, 0)
    errors = failures(await load, begun)
    return {
        "errors_before_ejection": sum(at <= ejected for at in errors),
        "back_after_seconds": round(back - healed, 2),
    }


async def is_killed(faults: Faults, site: Site, arguments: argparse.Namespace) -> dict[str, object]:
    """A worker is killed under load; the fleet starts it again."""
    load = asyncio.create_task(site.offer({"all": arguments.rate}, 15.0, arguments.seed + 2))
    await asyncio.sleep(1.0)
    already = (await site.sums(EJECTIONS))[EJECTIONS]
    faults.kill(faults.last)
    killed = time.perf_counter()
    ejected = await faults.until(EJECTIONS, already + 1)

    async def serves() -> bool:
        return await faults.served(faults.last) >= 3

    back = await until(serves)
    lost = [one for one in await load if not one.is_good]
    return {
        "requests_lost": len(lost),
        "ejected_after_seconds": round(ejected - killed, 2),
        "serving_again_after_seconds": round(back - killed, 2),
    }


async def goes_blind(
    faults: Faults, site: Site, arguments: argparse.Namespace
) -> dict[str, object]:
    """The same arrivals with metrics, without any, and with them again."""

    async def good() -> int:
        load = {"all": arguments.rate}
        seen = await site.offer(load, arguments.seconds, arguments.seed + 3)
        limit = arguments.limit_seconds
        return sum(one.is_good and one.outcome.latency_seconds <= limit for one in seen)

    before = await good()
    for number in range(faults.last + 1):
        await faults.configure(number, {"metrics-page": "error"})
    await asyncio.sleep(3.0)  # what was scraped is stale after two
    blind = await good()
    for number in range(faults.last + 1):
        await faults.configure(number, WELL)
    await asyncio.sleep(1.0)
    after = await good()
    normal = (before + after) / 2
    return {
        "served_in_time": {"before": before, "without_metrics": blind, "after": after},
        "goodput_of_normal": round(blind / normal, 4),
    }


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """All of it."""
    sim = f"--sim-decode-base-ms {arguments.token_ms:g}"
    arguments.worker_args, arguments.config = sim, None
    async with fleet(arguments) as running, httpx.AsyncClient(timeout=PATIENCE_SECONDS) as http:
        site = Site(running, arguments)
        faults = Faults(running, site, http)
        await site.offer({"warm": arguments.rate}, 2.0, arguments.seed)
        parts = {
            "a failing worker joins": await joins(faults, site, arguments),
            "a worker turns bad": await turns_bad(faults, site, arguments),
            "a worker is killed": await is_killed(faults, site, arguments),
            "no metrics": await goes_blind(faults, site, arguments),
        }
    joined, blind = parts["a failing worker joins"], parts["no metrics"]
    checks = {
        "errors before ejection <= 5": joined["errors_before_ejection"],
        "probes a second <= 1": joined["failed_probes_per_second"],
        "back in seconds <= 10": joined["back_after_seconds"],
        "requests lost to a killed worker: 0": parts["a worker is killed"]["requests_lost"],
        "goodput without metrics >= 0.95": blind["goodput_of_normal"],
    }
    for name, told in {**parts, "asked for": checks}.items():
        print(name)
        for key, value in told.items():
            print(f"  {key:36} {value}")
    return {
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("config", "out")},
        "cores": len(os.sched_getaffinity(0)),
        **parts,
        "checks": checks,
    }


def main() -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=120.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part without faults")
    parser.add_argument("--failing-seconds", type=float, default=8.0)
    parser.add_argument("--limit-seconds", type=float, default=1.0, help="for an answer to count")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--body-bytes", type=int, default=256)
    parser.add_argument("--envoy-concurrency", type=int, default=1)
    parser.add_argument("--request-body", choices=("buffered", "full-duplex"), default="buffered")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    document = uvloop.run(run(arguments))
    write_results(arguments.out / "endpoint_faults.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
