"""The cost of an endpoint picker: latency and CPU beside an Envoy without one.

    python benchmarks/picker_ext_proc.py                       # rates and sizes, about ten minutes
    python benchmarks/picker_ext_proc.py --quick               # does it work?
    python benchmarks/picker_ext_proc.py --saturate            # the most requests a second

One real Envoy with the picker, one without that balances round robin, both in front of the same ten
endpoints. Requests arrive at Poisson times and do not wait for each other; the same requests go
through both, in turns. `added` is the difference between the quantiles of the two. CPU is user and
system time of each process over its requests. The picker's includes its scrapes, two hundred a
second while requests come, which weigh little at high rates; `beyond_idle` leaves out the CPU of a
picker without requests, which scrapes once a second.

The endpoints are listeners of one more Envoy, which answers everything itself: at 2,000 requests a
second ten simulated workers would need several cores for themselves. Fixed seed. Writes
benchmarks/results/picker_ext_proc.json.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from ext_proc_load import Shot, drive, saturate
from ext_proc_site import HOST, Site, answering_envoy, envoy, front_envoy, picker, without_picker
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


async def most(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """The requests a second of `--connections` clients that ask again at once, both ways."""
    shots = requests(1000.0, 1.0, 1_000, SEED)
    found: dict[str, Any] = {}
    for way in ("front", "plain"):
        await saturate(shots, HOST, site.ports[way], options.connections, 1.0)
        before = {name: site.cpu_seconds(name) for name in ("picker", way, "endpoints")}
        own = time.process_time()
        answered, latencies = await saturate(
            shots, HOST, site.ports[way], options.connections, options.seconds
        )
        used = {name: site.cpu_seconds(name) - value for name, value in before.items()}
        used["load generator"] = time.process_time() - own
        found[way] = {
            "per_second": round(answered / options.seconds, 1),
            "latency_ms": quantiles(latencies),
            "cpu_ms_per_request": {k: round(1e3 * v / answered, 3) for k, v in used.items()},
        }
        print(f"{way}: {found[way]}", flush=True)
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    extremes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), free_ports(HOST, options.endpoints, 24_000))
        (admin,) = free_ports(HOST, 1, site.endpoints[-1] + 1)
        pool = answering_envoy(site.endpoints, admin)
        async with envoy("endpoints", site, pool, site.endpoints[0]), picker(site, options):
            table = None if options.saturate else Table(*COLUMNS)
            for bodies in options.response_bodies:
                front, plain = free_ports(HOST, 1, 26_000)[0], free_ports(HOST, 1, 26_500)[0]
                document = front_envoy(site, options, bodies, front)
                rival = without_picker(front_envoy(site, options, bodies, plain))
                async with (
                    envoy("front", site, document, front),
                    envoy("plain", site, rival, plain),
                ):
                    await drive(requests(50.0, 1.0, 1_000, 0), HOST, front)
                    if table is None:
                        extremes["seen" if bodies else "unseen"] = await most(site, options)
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
    parser.add_argument("--saturate", action="store_true")
    parser.add_argument("--connections", type=int, default=64, help="with --saturate")
    parser.add_argument("--quick", action="store_true", help="one row of two seconds")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.sizes, options.seconds = [50.0], [1_000], 2.0
        options.turns = 1
    write_results(options, **uvloop.run(run(options)))


if __name__ == "__main__":
    main()
