"""What becomes of a fleet's goodput, of latencies and of memory when too much is asked of it.

Starts `pointsman up --engine sim` with flow control: Envoy, one picker, and workers that take few
requests at once. Open-loop Poisson arrivals, first less than the fleet can serve, then about as
much (the most of which is the peak), then a multiple of that, then less again; then two tenants, of
whom one asks for ten times as much as the other. Every request carries a body of some kilobytes
that waits with it, and more come than `maxMemory` has room for; the picker's memory is looked at
when it has served half of what it can for a while (calm), when it has served all that it can and
nobody waits any more (warm), and from the beginning of the flood to its end (most). Prints a table,
the bounds beside what was measured, and writes benchmarks/results/overload.json.

    python benchmarks/overload.py --workers 4 --overload 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from fleet_rate import fleet
from overload_clients import Seen, Site, Watch
from result_files import RESULTS, write_results

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: active-request-scorer}}
- {{type: max-score-picker}}
- {{type: {detector}-detector{parameters}}}
- {{type: {fairness}}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer}}
  - {{pluginRef: active-request-scorer, weight: 2}}
  - {{pluginRef: max-score-picker}}
flowControl:
  maxMemory: {queue_bytes}
  maxRequests: {queue_requests}
  defaultRequestTTL: {ttl}
  saturationDetector: {{pluginRef: {detector}-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: {fairness}}}
"""


def goodput(seen: Sequence[Seen], seconds: float) -> float:
    """Requests served a second, without the first fifth, in which queues fill."""
    since = seconds / 5
    return sum(one.is_good and since <= one.done_at < seconds for one in seen) / (seconds - since)


def quantile(values: Sequence[float], share: float) -> float:
    """In milliseconds; 0 of none."""
    ordered = sorted(values) or [0.0]
    return round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)


def latencies(seen: Sequence[Seen], chosen: Callable[[Seen], bool]) -> dict[str, float]:
    """p50 and p99 in milliseconds, and how many."""
    values = [one.outcome.latency_seconds for one in seen if chosen(one)]
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "number": len(values)}


def recovery_seconds(seen: Sequence[Seen], normal_ms: float) -> float:
    """When the median latency of a half second was normal (1.25 times) for good."""
    halves: dict[int, list[float]] = {}
    for one in seen:
        if one.is_good:
            halves.setdefault(int(one.at_seconds * 2), []).append(one.outcome.latency_seconds)
    slow = [
        half
        for half, values in halves.items()
        if 1e3 * statistics.median(values) > 1.25 * normal_ms
    ]
    return (max(slow) + 1) / 2 if slow else 0.0


def bucket_quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Of a histogram's growth, in milliseconds, interpolated within its bucket."""
    grown = sorted((edge, after[edge] - before.get(edge, 0.0)) for edge in after)
    total, low, below = (grown[-1][1] if grown else 0.0), 0.0, 0.0
    for edge, count in grown:
        if count >= share * total and count > below:
            within = (share * total - below) / (count - below)
            return round(1e3 * (low + (min(edge, 120.0) - low) * within), 2)
        low, below = edge, count
    return 0.0


def jain(shares: Sequence[float]) -> float:
    """1 is equal, 1/n is one who has it all."""
    squares = len(shares) * sum(share * share for share in shares)
    return round(sum(shares) ** 2 / squares, 4) if squares else 1.0


async def overload(site: Site, arguments: argparse.Namespace, nominal: float) -> dict[str, object]:
    """Less than enough, enough, too much, and less again."""
    seconds, seed = arguments.seconds, arguments.seed
    await site.offer({"warm": nominal / 2}, 3.0, seed)
    before = await site.offer({"calm": nominal / 2}, seconds, seed + 1)
    normal = latencies(before, lambda one: one.is_good)
    calm_rss = site.rss_bytes()
    near: dict[str, float] = {}
    for share in (0.8, 1.0, 1.2):
        found = await site.offer({"peak": share * nominal}, seconds, seed + 2)
        near[f"{share:g}"] = round(goodput(found, seconds), 1)
    peak, watch = max(near.values()), Watch()
    warm_rss = site.rss_bytes()
    rate, flood_seconds = arguments.overload * peak, 2 * seconds
    flood = site.offer({"flood": rate}, flood_seconds, seed + 3, watch)
    cpu_before = site.cpu_seconds()
    load = asyncio.create_task(flood)
    await asyncio.sleep(flood_seconds)
    cpu = {kind: used - cpu_before.get(kind, 0.0) for kind, used in site.cpu_seconds().items()}
    after = await site.offer({"after": nominal / 2}, seconds, seed + 4)
    seen = await load
    served = round(goodput(seen, flood_seconds), 1)
    refusals = latencies(seen, lambda one: _reason(one) == "rejected-saturated")
    late = latencies(seen, lambda one: _reason(one) == "rejected-ttl-expired")
    statuses = Counter(one.outcome.error or str(one.outcome.status) for one in seen)
    told = [one for one in seen if one.outcome.status == 429]
    return {
        "normal_latency_ms": normal,
        "goodput_near_capacity": near,
        "peak_goodput": peak,
        "offered": round(rate, 1),
        "goodput": served,
        "goodput_over_peak": round(served / peak, 4),
        "statuses": dict(statuses),
        "told_when_to_come_back": all("retry-after" in one.outcome.headers for one in told),
        "refusal_latency_ms": refusals,
        "timed_out_latency_ms": late,
        "served_latency_ms": latencies(seen, lambda one: one.is_good),
        "most_waiting": max(watch.queue_size, default=0.0),
        "most_bytes_waiting": max(watch.queue_bytes, default=0.0),
        "picker_rss_bytes": {
            "calm": calm_rss,
            "warm": warm_rss,
            "most": max(watch.rss_bytes, default=0),
        },
        "cores": {kind: round(used / flood_seconds, 2) for kind, used in cpu.items()},
        "recovery_seconds": recovery_seconds(after, normal["p50"]),
        "left_behind": await site.at_rest(),
    }


def _reason(one: Seen) -> str:
    return one.outcome.headers.get("x-llm-d-request-dropped-reason", "")


async def fairness(site: Site, arguments: argparse.Namespace, peak: float) -> dict[str, object]:
    """A modest tenant alone and beside one that floods, and two that both want more than half."""
    seconds, seed = arguments.seconds, arguments.seed + 10
    modest, told = 0.25 * peak, {}
    for name, flood in (("alone", 0.0), ("beside a flood", arguments.flood * modest)):
        before = await site.queue_times("modest")
        load = {"modest": modest} | ({"flood": flood} if flood else {})
        seen = await site.offer(load, 2 * seconds, seed)
        after = await site.queue_times("modest")
        own = [one for one in seen if one.tenant == "modest"]
        told[name] = {
            "queue_ms_p99": bucket_quantile(before, after, 0.99),
            "latency_ms": latencies(own, lambda one: one.is_good),
            "served": round(sum(one.is_good for one in own) / len(own), 4),
        }
    both = await site.offer({"left": 1.5 * peak, "right": 3 * peak}, 2 * seconds, seed + 1)
    tokens = {
        tenant: arguments.max_tokens
        * sum(one.is_good for one in both if one.tenant == tenant and one.at_seconds > seconds / 5)
        for tenant in ("left", "right")
    }
    return {**told, "served_tokens": tokens, "jain": jain(list(tokens.values()))}


def checks(
    flood: dict[str, object], shares: dict[str, object], queue_bytes: int
) -> dict[str, object]:
    """What is asked of flow control, beside what was measured."""
    refusals, memory = flood["refusal_latency_ms"], flood["picker_rss_bytes"]
    assert isinstance(refusals, dict)
    assert isinstance(memory, dict)
    growth = memory["most"] - memory["warm"]
    return {
        "goodput at overload / peak": (flood["goodput_over_peak"], ">= 0.95"),
        "refusal p99, ms": (refusals["p99"], "< 50"),
        "picker's memory grew by, bytes": (growth, f"< {queue_bytes}"),
        "recovery, s": (flood["recovery_seconds"], "<= 5"),
        "left behind": (flood["left_behind"], "all 0"),
        "jain of served tokens": (shares["jain"], ">= 0.95"),
    }


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """One fleet, both runs; the document to write."""
    service_seconds = arguments.max_tokens * arguments.token_ms / 1e3
    nominal = arguments.workers * arguments.slots / service_seconds
    parameters = ""
    if arguments.detector == "concurrency":
        parameters = f", parameters: {{maxConcurrency: {arguments.slots + arguments.ahead}}}"
    config = CONFIG.format(parameters=parameters, **vars(arguments))
    arguments.worker_args = (
        f"--max-num-seqs {arguments.slots} --sim-decode-base-ms {arguments.token_ms}"
        " --sim-decode-per-seq-ms 0"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(config)
        file.flush()
        arguments.config = file.name
        async with fleet(arguments, "--trust-control-headers") as running:
            site = Site(running, arguments)
            flood = await overload(site, arguments, nominal)
            show(f"overload (nominal {nominal:.0f}/s)", flood)
            peak = flood["peak_goodput"]
            assert isinstance(peak, float)
            shares = await fairness(site, arguments, peak)
            show("tenants", shares)
            shares["left_behind"] = await site.at_rest()
    bounds = checks(flood, shares, arguments.queue_bytes)
    show("asked for", bounds)
    return {
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("config", "out")},
        "cores": len(os.sched_getaffinity(0)),
        "overload": flood,
        "tenants": shares,
        "checks": bounds,
    }


def show(name: str, told: dict[str, object]) -> None:
    """One part as a few lines."""
    print(name)
    for key, value in told.items():
        print(f"  {key:28} {value}", flush=True)


def main() -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4, help="requests that a worker runs at once")
    parser.add_argument("--ahead", type=int, default=1, help="more that may wait at a worker")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each part of the load")
    parser.add_argument("--overload", type=float, default=3.0, help="times the peak")
    parser.add_argument("--flood", type=float, default=10.0, help="times the other tenant")
    parser.add_argument("--body-bytes", type=int, default=16_384)
    parser.add_argument("--queue-bytes", type=int, default=16 * 2**20, help="maxMemory")
    parser.add_argument("--queue-requests", type=int, default=0, help="maxRequests; 0: no limit")
    parser.add_argument("--ttl", default="5s")
    parser.add_argument("--detector", choices=("concurrency", "utilization"), default="concurrency")
    parser.add_argument("--fairness", default="deficit-round-robin-fairness-policy")
    parser.add_argument("--envoy-concurrency", type=int, default=1)
    parser.add_argument("--request-body", choices=("buffered", "full-duplex"), default="buffered")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    document = uvloop.run(run(arguments))
    write_results(arguments.out / "overload.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
