"""What a tenant waits at the gate beside another that floods, and what keeping room for it costs.

    python benchmarks/headroom.py [--seeds 3] [--seconds 12 20 60] [--processes 2]

The production core of flow control (queue, deficit round robin, headroom) before pools of places,
in virtual time. One tenant asks, at random (Poisson, after a first request at once), for a share of
what the pool can serve, alone for three seconds; then another asks for ten times as much. Requests
take about 0.64 s, and end one by one (`lengths` differ) or in the steps of workers (`steps`: all
equally long, ended every 80 ms). Looked at is what comes after the first three seconds:

    beside        the calm tenant's 99th percentile in the queue, over all seeds
    alone         the same when nobody else comes
    waited        the part of its requests that waited longer than a millisecond
    bad_runs      the part of runs in which the 99th percentile was more than 1.3 times that alone
                  in the same run, and more than a millisecond
    alone_bad     the part of runs in which it waited longer than a millisecond by itself
    unused        the part of the places that nobody had while others waited

Runs of 12, 20 and 60 seconds, the long ones in the smaller pools, with other seeds each. With
`--fixed 0.1` a fixed part of the pool is kept instead. Prints a table and its sums, and writes
benchmarks/results/headroom.json.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing import Pool
from random import Random

from result_files import RESULTS, write_results

from picker.flowcontrol.core import FlowCore
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.saturation import EMPTY_POOL, PoolLoad
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.flowcontrol.tickets import FlowTicket
from picker.flowcontrol.waiting import Waiting
from picker.framework.attributes import Attributes
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.plugins.ordering_policies import fcfs_ordering_policy
from picker.plugins.usage_limits import static_usage_limit_policy
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    Usage,
)

POOLS = (8, 12, 16, 20, 24, 32, 48, 64, 200)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.33, 0.35, 0.4, 0.45)
SECONDS = (12.0, 20.0, 60.0)
LONG_SECONDS, LONG_POOL = 20.0, 24  # longer runs than that are for pools up to that
LARGE_POOL = 64  # in larger ones one seed is enough, of the shortest runs
SERVICE_SECONDS = 0.64
STEP_SECONDS, WORKERS = 0.08, 4
FLOOD = 10.0  # times the calm tenant, and at least twice the pool
SINCE = 3.0
WAITED_SECONDS = 0.001
BODY = ParsedBody(Api.COMPLETIONS, "m")
ENDPOINT = Endpoint("pool", "10.0.0.1", 8000)
RESULTS_FILE = RESULTS / "headroom.json"


@dataclass(slots=True)
class Places:
    """Full when so many requests are under way."""

    number: int
    settle_seconds: float = 0.01

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        """Requests under way by places."""
        return sum(candidate.inflight_requests for candidate in candidates) / self.number


@dataclass(slots=True)
class Told:
    """What was seen of one run."""

    waits: list[float] = field(default_factory=list)
    unused: float = 0.0
    seconds: float = 0.0
    _at: float = 0.0

    def pass_to(self, now: float, free: float, is_wanted: bool) -> None:
        """So many places were free until now."""
        if self._at >= SINCE and is_wanted:
            self.unused += free * (now - self._at)
            self.seconds += now - self._at
        self._at = now


class Gate:
    """Flow control before a pool of places; owns the clock and who is under way.

    `service` says when a request ends that begins now.
    """

    def __init__(
        self,
        places: int,
        parameters: DeficitRoundRobinFairnessPolicyParameters,
        service: Callable[[float], float],
    ) -> None:
        self.now = 0.0
        self.waits: list[tuple[str, float, float]] = []  # of whom, since when, for how long
        self._service = service
        self._left = 0
        self._number = count()
        self.ends: list[tuple[float, int, FlowTicket]] = []
        settings = FlowControlSettings(
            default_band=self._band(parameters),
            default_negative_band=self._band(parameters),
            usage_limits=_made(static_usage_limit_policy),
            detector=Places(places),  # type: ignore[arg-type]
            detector_name="places",
        )
        self.core = FlowCore(self._pool, FlowReporter(PickerMetrics(), "pool", self), self)
        self.core.use(settings, 0.0)

    def _band(self, parameters: DeficitRoundRobinFairnessPolicyParameters) -> BandSettings:
        return BandSettings(
            DeficitRoundRobinFairnessPolicy(parameters),
            _made(fcfs_ordering_policy),
            max_requests=200,
        )

    def _pool(self) -> list[Candidate]:
        return [Candidate(ENDPOINT, None, self._left)]

    def ticket_left(self, ticket: FlowTicket) -> None:
        """It is at the pool."""
        self._left += 1
        self.core.left(ticket)

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None:
        """It is over."""
        self._left -= 1
        self.core.closed(ticket, usage, self.now)

    def arrive(self, name: str) -> None:
        """A request of somebody comes now."""
        request = InferenceRequest("r", {}, BODY, "m", "m", fairness_id=name)
        waiting = self.core.arrive(request, None, self.now)
        if waiting.is_resolved:
            self._begin(waiting)
        else:
            waiting.wake = lambda: self._begin(waiting)

    def look(self) -> None:
        """Let in whoever may go."""
        self.core.look(self.now)
        while self.core.has_more:
            self.core.look(self.now)

    def _begin(self, waiting: Waiting) -> None:
        ticket = waiting.ticket
        if ticket is not None:
            since = waiting.item.enqueued_at_seconds
            self.waits.append((waiting.item.flow, since, self.now - since))
            ticket.left(ENDPOINT.key)
            heapq.heappush(self.ends, (self._service(self.now), next(self._number), ticket))

    # Read by gauges

    def pool_load(self) -> PoolLoad:
        """Nobody looks."""
        return EMPTY_POOL

    def num_stale(self) -> int:
        """None."""
        return 0

    def queued(self) -> tuple[int, int]:
        """Nobody looks."""
        return 0, 0

    def pending_reclaim(self) -> float:
        """Nothing."""
        return 0.0


def _made(module: object) -> object:
    plugin = module.PLUGIN  # type: ignore[attr-defined]
    return plugin.make(plugin.name, plugin.parameters())


def steps(rng: Random, now: float) -> float:
    """When one ends that begins now: at the end of a step of one of the workers."""
    phase = rng.randrange(WORKERS) * STEP_SECONDS / WORKERS
    return math.ceil((now + SERVICE_SECONDS - phase) / STEP_SECONDS) * STEP_SECONDS + phase


def lengths(rng: Random, now: float) -> float:
    """The same for requests of different lengths."""
    return now + SERVICE_SECONDS * math.exp(0.5 * rng.gauss(0, 1) - 0.125)


KINDS: dict[str, Callable[[Random, float], float]] = {"lengths": lengths, "steps": steps}


def run(
    places: int,
    rates: dict[str, tuple[float, float]],
    kind: str,
    seed: int,
    seconds: float,
    parameters: DeficitRoundRobinFairnessPolicyParameters,
) -> Told:
    """Tenants with (requests a second, from when); `calm` is looked at."""
    rng = {name: Random(f"{name} {seed}") for name in (*rates, "service")}
    gate = Gate(places, parameters, partial(KINDS[kind], rng["service"]))
    core, told = gate.core, Told()
    due = [
        (at if name == "calm" else at + rng[name].expovariate(rate), name)
        for name, (rate, at) in rates.items()
    ]
    heapq.heapify(due)

    while gate.now < seconds:
        end = gate.ends[0][0] if gate.ends else math.inf
        timer = core.next_due_seconds() or math.inf
        at = max(gate.now, min(end, due[0][0], timer))
        told.pass_to(at, places - len(core.under_way), core.num_waiting > 0)
        gate.now = at
        if end <= at:
            heapq.heappop(gate.ends)[2].closed(FinishCause.COMPLETED, Usage(32, 32))
        elif due[0][0] <= at:
            _, name = heapq.heappop(due)
            gate.arrive(name)
            heapq.heappush(due, (at + rng[name].expovariate(rates[name][0]), name))
        else:
            core.tick(at)
        gate.look()
    core.check_integrity()
    told.waits = [took for name, at, took in gate.waits if name == "calm" and at >= SINCE]
    return told


def p99(waits: list[float]) -> float:
    """Seconds."""
    ordered = sorted(waits)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """One pool and one share, for so many seeds."""

    places: int
    share: float
    ends: str
    seconds: float
    seeds: range
    fixed: float | None = None


def row(case: Case) -> dict[str, float | str]:
    """All seeds of a case."""
    parameters, places = DeficitRoundRobinFairnessPolicyParameters(), case.places
    if (kept := case.fixed) is not None:
        parameters = DeficitRoundRobinFairnessPolicyParameters(min_headroom=kept, max_headroom=kept)
    calm = case.share * places / SERVICE_SECONDS
    flood = max(FLOOD * calm, 2.0 * places / SERVICE_SECONDS)
    alone: list[float] = []
    beside: list[float] = []
    unused, bad, alone_bad = 0.0, 0, 0
    for seed in case.seeds:
        by_itself = run(places, {"calm": (calm, 0.0)}, case.ends, seed, case.seconds, parameters)
        rates = {"calm": (calm, 0.0), "flood": (flood, SINCE)}
        told = run(places, rates, case.ends, seed, case.seconds, parameters)
        alone += by_itself.waits
        beside += told.waits
        unused += told.unused / max(1e-9, told.seconds) / places / len(case.seeds)
        bad += p99(told.waits) > max(WAITED_SECONDS, 1.3 * p99(by_itself.waits))
        alone_bad += p99(by_itself.waits) > WAITED_SECONDS
    late = sum(one > WAITED_SECONDS for one in beside) / max(1, len(beside))
    return {
        "places": places,
        "share": case.share,
        "ends": case.ends,
        "seconds": case.seconds,
        "alone_ms": round(1e3 * p99(alone), 1),
        "beside_ms": round(1e3 * p99(beside), 1),
        "waited": round(late, 4),
        "bad_runs": round(bad / len(case.seeds), 3),
        "alone_bad": round(alone_bad / len(case.seeds), 3),
        "unused": round(unused, 4),
        "requests": len(beside),
    }


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The sweep."""
    found = []
    for places in arguments.places:
        for at, seconds in enumerate(arguments.seconds):
            seeds = range(at * arguments.seeds, (at + 1) * arguments.seeds)
            if seconds > LONG_SECONDS and places > LONG_POOL:
                continue
            if places > LARGE_POOL:
                if at:
                    continue
                seeds = range(1)
            found += [
                Case(places, share, ends, seconds, seeds, arguments.fixed)
                for share in arguments.shares
                for ends in KINDS
            ]
    return found


def sums(rows: Sequence[dict[str, float | str]]) -> list[dict[str, float]]:
    """Of each pool, over shares, ends and lengths of runs."""
    pools: dict[float, list[dict[str, float]]] = {}
    for one in rows:
        numbers = {name: value for name, value in one.items() if not isinstance(value, str)}
        pools.setdefault(numbers["places"], []).append(numbers)
    return [
        {
            "places": places,
            "waited": round(
                sum(one["waited"] * one["requests"] for one in of_pool)
                / sum(one["requests"] for one in of_pool),
                4,
            ),
            **{
                name: round(sum(one[name] for one in of_pool) / len(of_pool), 4)
                for name in ("bad_runs", "alone_bad", "unused")
            },
        }
        for places, of_pool in pools.items()
    ]


def main() -> int:
    """Every pool and share; a table and a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs="*", default=SECONDS)
    parser.add_argument("--fixed", type=float, help="the part that is kept, whoever asks for what")
    parser.add_argument("--places", type=int, nargs="*", default=POOLS)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    with Pool(arguments.processes) as processes:
        for one in processes.imap(row, cases(arguments)):
            rows.append(one)
            print(*(f"{k} {v}" for k, v in one.items()), sep="  ", flush=True)
    totals = sums(rows)
    for total in totals:
        print(*(f"{k} {v}" for k, v in total.items()), sep="  ")
    document = {"arguments": vars(arguments), "rows": rows, "pools": totals}
    write_results(RESULTS_FILE, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
