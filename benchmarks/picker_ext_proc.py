"""The cost of an endpoint picker: latency and CPU beside an Envoy without one.

    python benchmarks/picker_ext_proc.py                       # rates and sizes, about ten minutes
    python benchmarks/picker_ext_proc.py --quick               # does it work?
    python benchmarks/picker_ext_proc.py --saturate            # the most requests a second
    python benchmarks/picker_ext_proc.py --saturate --other ../before --seconds 3

One real Envoy with the picker, one without that balances round robin, both in front of the same ten
endpoints. Requests arrive at Poisson times and do not wait for each other; the same requests go
through both, in turns. `added` is the difference between the quantiles of the two. CPU is user and
system time of each process over its requests. The picker's includes its scrapes, two hundred a
second while requests come, which weigh little at high rates; `beyond_idle` leaves out the CPU of a
picker without requests, which scrapes once a second.

`--saturate` keeps 1, 16 and 64 connections busy, through the picker, past it, and through
sglang-router, if that is installed, in turns; `--other` adds the picker of another checkout. A row
has the medians of all rounds. `switches` counts the waits of the picker's threads, or the proxy's,
for each request: a process that waits once has been woken up once.

The endpoints are listeners of one more Envoy, which answers everything itself: at 2,000 requests a
second ten simulated workers would need several cores for themselves. Fixed seed. Writes
benchmarks/results/picker_ext_proc.json.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from ext_proc_load import Shot, drive, saturate
from ext_proc_site import (
    HOST,
    Site,
    answering_envoy,
    envoy,
    front_envoy,
    picker,
    sglang_router,
    without_picker,
)
from measuring import Table, command_line, numbers, write_results

from fleet.run.ports import free_ports

SEED = 20261121
RATES = (10.0, 100.0, 500.0, 1000.0, 2000.0)
BODY_BYTES = (1_000, 40_000, 400_000)
MAX_BYTES_PER_SECOND = 60e6  # of bodies: beyond it the load generator is what is measured
COLUMNS = (
    *("rate .0f", "body_bytes", "answers", "failed", "answered_per_second"),
    *("p50_ms", "p95_ms", "p99_ms", "added_p50_ms", "added_p95_ms", "added_p99_ms"),
    *("picker_cpu_ms", "beyond_idle", "envoy_cpu_ms", "plain_envoy_cpu_ms"),
)
SATURATED = (
    *("connections", "way <14", "per_second .0f", "of_plain .2f", "p50_ms .2f", "p99_ms .2f"),
    *("picker_cpu_ms .3f", "switches .2f", "proxy_cpu_ms .3f", "endpoints_cpu_ms .3f"),
    "load_cpu_ms .3f",
)


def requests(rate: float, seconds: float, size: int, seed: int) -> list[Shot]:
    """Chat requests of about `size` bytes at Poisson times; they share twenty beginnings."""
    rng = random.Random(seed)
    prefixes = ["".join(rng.choices("abcdefgh ", k=size * 4 // 5)) for _ in range(20)]
    shots, at = [], rng.expovariate(rate)
    while at < seconds:
        own = "".join(rng.choices("abcdefgh ", k=max(0, size // 5 - 90)))
        content = rng.choice(prefixes) + own
        message = {"model": "sim", "messages": [{"role": "user", "content": content}]}
        body = json.dumps(message).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        shots.append(Shot(at, head.encode() + body))
        at += rng.expovariate(rate)
    return shots


# ---- measuring ------------------------------------------------------------------------------


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds."""
    ordered = sorted(values) or [0.0]
    return {
        f"p{percent}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)
        for percent in (50, 95, 99)
    }


async def idle_cpu(site: Site, seconds: float) -> float:
    """Cores that the picker takes without requests."""
    before, begun = site.cpu_seconds("picker"), time.perf_counter()
    await asyncio.sleep(seconds)
    return (site.cpu_seconds("picker") - before) / (time.perf_counter() - begun)


async def measure(
    site: Site, options: argparse.Namespace, rate: float, size: int, bodies: bool
) -> dict[str, Any]:
    """One row: the same requests in turns through the picker and past it."""
    share = options.seconds / options.turns
    idle = await idle_cpu(site, min(2.0, share))
    latencies: dict[str, list[float]] = {"front": [], "plain": []}
    cpu: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    number, lasted = 0, 0.0
    for turn in range(options.turns):
        shots = requests(rate, share, size, SEED + turn)
        number += len(shots)
        for way in ("front", "plain"):
            before = {name: site.cpu_seconds(name) for name in ("picker", way)}
            begun = time.perf_counter()
            outcomes = await drive(shots, HOST, site.ports[way])
            if way == "front":
                lasted += time.perf_counter() - begun
                cpu["picker"] += site.cpu_seconds("picker") - before["picker"]
                failed.update(o.error or str(o.status) for o in outcomes if o.status != 200)
            cpu[way] += site.cpu_seconds(way) - before[way]
            latencies[way] += [o.seconds for o in outcomes if o.status == 200]
    front, plain = quantiles(latencies["front"]), quantiles(latencies["plain"])
    return {
        "rate": rate,
        "body_bytes": size,
        "answers": "seen" if bodies else "unseen",
        "sent": number,
        "failed": sum(failed.values()),
        "failures": failed,
        "answered_per_second": round(len(latencies["front"]) / lasted, 1),
        **{f"{name}_ms": value for name, value in front.items()},
        **{f"added_{name}_ms": round(value - plain[name], 2) for name, value in front.items()},
        "plain_latency_ms": plain,
        "picker_cpu_ms": round(1e3 * cpu["picker"] / number, 3),
        "beyond_idle": round(1e3 * (cpu["picker"] - idle * lasted) / number, 3),
        "envoy_cpu_ms": round(1e3 * cpu["front"] / number, 3),
        "plain_envoy_cpu_ms": round(1e3 * cpu["plain"] / number, 3),
    }


@dataclass(frozen=True, slots=True)
class Way:
    """A way to the endpoints: the process that takes requests, and the picker that it asks."""

    proxy: str
    picker: str | None = None


async def most(site: Site, options: argparse.Namespace, ways: Sequence[Way]) -> Table:
    """The requests a second of clients that ask again at once, every way in turns."""
    shots = requests(1000.0, 1.0, 1_000, SEED)
    table = Table(*SATURATED)
    for connections in options.connections:
        rounds: dict[Way, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                found = await saturated(site, way, shots, connections, options.seconds)
                rounds[way].append(found)
        rows = {
            way: {key: statistics.median(one[key] for one in found) for key in found[0]}
            for way, found in rounds.items()
        }
        plain = next(row["per_second"] for way, row in rows.items() if way.picker is None)
        for way, row in rows.items():
            of_plain = row["per_second"] / plain
            by_round = {"by_round": rounds[way]}
            table.add(way=way.proxy, connections=connections, of_plain=of_plain, **row, **by_round)
    return table


async def saturated(
    site: Site, way: Way, shots: Sequence[Shot], connections: int, seconds: float
) -> dict[str, float]:
    """One round of one way."""
    port, busy = site.ports[way.proxy], way.picker or way.proxy
    await saturate(shots, HOST, port, connections, seconds / 5)
    before = {name: site.cpu_seconds(name) for name in (busy, way.proxy, "endpoints")}
    own, switches = time.process_time(), site.switches(busy)
    answered, latencies = await saturate(shots, HOST, port, connections, seconds)
    used = {
        name: 1e3 * (site.cpu_seconds(name) - value) / answered for name, value in before.items()
    }
    own = time.process_time() - own
    return {
        "per_second": answered / seconds,
        **{f"{name}_ms": value for name, value in quantiles(latencies).items()},
        "picker_cpu_ms": used[busy] if way.picker else 0.0,
        "switches": (site.switches(busy) - switches) / answered,
        "proxy_cpu_ms": used[way.proxy],
        "endpoints_cpu_ms": used["endpoints"],
        "load_cpu_ms": 1e3 * own / answered,
    }


@contextlib.asynccontextmanager
async def started_ways(
    site: Site, options: argparse.Namespace, bodies: bool
) -> AsyncIterator[list[Way]]:
    """Envoy with each picker, Envoy without one, and, with `--saturate`, another router."""
    async with contextlib.AsyncExitStack() as stack:
        ways = [Way("front", "picker")]
        if options.other is not None:
            ways.append(Way("other front", "other picker"))
        ways.append(Way("plain"))
        for number, way in enumerate(ways):
            (port,) = free_ports(HOST, 1, 26_000 + 100 * number)
            document = front_envoy(site, options, bodies, port, way.picker or "picker")
            if way.picker is None:
                document = without_picker(document)
            await stack.enter_async_context(envoy(way.proxy, site, document, port))
        if options.saturate and importlib.util.find_spec("sglang_router") is not None:
            await stack.enter_async_context(sglang_router(site))
            ways.append(Way("sglang-router"))
        yield ways


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    extremes: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        site = Site(Path(folder), free_ports(HOST, options.endpoints, 24_000))
        (admin,) = free_ports(HOST, 1, site.endpoints[-1] + 1)
        pool = answering_envoy(site.endpoints, admin)
        await stack.enter_async_context(envoy("endpoints", site, pool, site.endpoints[0]))
        await stack.enter_async_context(picker(site, options))
        if options.other is not None:
            other = picker(site, options, "other picker", options.other)
            await stack.enter_async_context(other)
        table = None if options.saturate else Table(*COLUMNS)
        for bodies in options.response_bodies:
            async with started_ways(site, options, bodies) as ways:
                await drive(requests(50.0, 1.0, 1_000, 0), HOST, site.ports["front"])
                if table is None:
                    rows = (await most(site, options, ways)).rows
                    extremes["seen" if bodies else "unseen"] = rows
                    continue
                for size in options.sizes:
                    for rate in options.rates:
                        if rate * size <= MAX_BYTES_PER_SECOND:
                            table.add(**await measure(site, options, rate, size, bodies))
    rows = [] if table is None else table.rows
    return {"rows": rows, "saturation": extremes}


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", type=numbers(float), default=list(RATES))
    parser.add_argument("--sizes", type=numbers(int), default=list(BODY_BYTES))
    parser.add_argument("--seconds", type=float, default=12.0, help="of each row")
    parser.add_argument("--turns", type=int, default=3, help="picker and rival change places")
    parser.add_argument("--endpoints", type=int, default=10)
    parser.add_argument("--request-body", choices=("buffered", "full-duplex"), default="buffered")
    parser.add_argument(
        "--response-bodies",
        type=lambda text: {"off": [False], "on": [True], "both": [False, True]}[text],
        default=[False, True],
        help="off, on or both: whether the picker sees answers",
    )
    parser.add_argument("--picker-args", default="", help="more flags for the picker")
    parser.add_argument(
        "--socket",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Envoy reaches the picker by a unix socket, as in `up`",
    )
    parser.add_argument("--saturate", action="store_true")
    parser.add_argument("--connections", type=numbers(int), default=[1, 16, 64], metavar="N,…")
    parser.add_argument("--rounds", type=int, default=5, help="of --saturate; medians are printed")
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout of this")
    parser.add_argument("--quick", action="store_true", help="one row of two seconds")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.sizes, options.seconds = [50.0], [1_000], 2.0
        options.turns = 1
    write_results(options, **uvloop.run(run(options)))


if __name__ == "__main__":
    main()
