"""A tenant finds free slots beside a flooding tenant as if it were alone; in virtual time.

The production core of flow control (queue, deficit round robin, headroom) guards pools of slots.
One tenant sends a Poisson stream that uses a share of the pool, alone for three seconds; then
another sends ten times as much. Requests take about 0.64 s, and end one by one (`lengths` differ)
or in the steps of workers (`steps`: equally long, ending every 80 ms). Only events after the first
three seconds count.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from picker.flowcontrol.core import FlowCore
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.saturation import EMPTY_POOL
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.flowcontrol.tickets import FlowTicket
from picker.flowcontrol.waiting import Waiting
from picker.framework.attributes import Attributes
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    Usage,
)
from tests.support.picker.plugin_scenes import configured

SECONDS, SEEDS = 12.0, range(3)
SERVICE_SECONDS = 0.64
STEP_SECONDS, WORKERS = 0.08, 4
FLOOD = 10.0  # times the calm tenant, and at least twice the pool
SINCE = 3.0
WAITED_SECONDS = 0.001
BODY = ParsedBody(Api.COMPLETIONS, "m")
ENDPOINT = Endpoint("pool", "10.0.0.1", 8000)
# The sources of gauges, which are not collected here.
NOT_READ: Any = SimpleNamespace(
    pool_load=lambda: EMPTY_POOL,
    num_stale=lambda: 0,
    queued=lambda: (0, 0),
    pending_reclaim=lambda: 0.0,
)


@dataclass(slots=True)
class Places:
    number: int
    settle_seconds: float = 0.01

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        return sum(candidate.inflight_requests for candidate in candidates) / self.number


@dataclass(slots=True)
class Run:
    """Waits of the calm tenant in one run, and slots that were free while requests waited."""

    waits: list[float] = field(default_factory=list)
    unused: float = 0.0
    seconds: float = 0.0
    _at: float = 0.0

    def pass_to(self, now: float, free: float, is_wanted: bool) -> None:
        if self._at >= SINCE and is_wanted:
            self.unused += free * (now - self._at)
            self.seconds += now - self._at
        self._at = now


class Gate:
    """Flow control for a pool of slots; `service` returns the end of a request that starts now."""

    def __init__(self, places: int, service: Callable[[float], float]) -> None:
        self.now = 0.0
        self.waits: list[tuple[str, float, float]] = []  # tenant, start, duration
        self._service = service
        self._left = 0
        self._number = count()
        self.ends: list[tuple[float, int, FlowTicket]] = []
        parameters = DeficitRoundRobinFairnessPolicyParameters()
        fairness = DeficitRoundRobinFairnessPolicy(parameters)
        band = BandSettings(fairness, configured("fcfs-ordering-policy"), max_requests=200)
        settings = FlowControlSettings(
            default_band=band,
            default_negative_band=band,
            usage_limits=configured("static-usage-limit-policy"),
            detector=Places(places),  # type: ignore[arg-type]
            detector_name="places",
        )
        reporter = FlowReporter(PickerMetrics(), "pool", NOT_READ)
        self.core = FlowCore(self._pool, reporter, self)
        self.core.use(settings, 0.0)

    def _pool(self) -> list[Candidate]:
        return [Candidate(ENDPOINT, None, self._left)]

    def ticket_left(self, ticket: FlowTicket) -> None:
        self._left += 1
        self.core.left(ticket)

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None:
        self._left -= 1
        self.core.closed(ticket, usage, self.now)

    def arrive(self, name: str) -> None:
        request = InferenceRequest("r", {}, BODY, "m", "m", fairness_id=name)
        waiting = self.core.arrive(request, None, self.now)
        if waiting.is_resolved:
            self._begin(waiting)
        else:
            waiting.wake = lambda: self._begin(waiting)

    def run_passes(self) -> None:
        self.core.run_pass(self.now)
        while self.core.has_more:
            self.core.run_pass(self.now)

    def _begin(self, waiting: Waiting) -> None:
        ticket = waiting.ticket
        if ticket is not None:
            since = waiting.item.enqueued_at_seconds
            self.waits.append((waiting.item.flow, since, self.now - since))
            ticket.left(ENDPOINT.key)
            heapq.heappush(self.ends, (self._service(self.now), next(self._number), ticket))


def steps(rng: Random, now: float) -> float:
    """Return the end of a request that starts now, at a step of a random worker."""
    phase = rng.randrange(WORKERS) * STEP_SECONDS / WORKERS
    return math.ceil((now + SERVICE_SECONDS - phase) / STEP_SECONDS) * STEP_SECONDS + phase


def lengths(rng: Random, now: float) -> float:
    return now + SERVICE_SECONDS * math.exp(0.5 * rng.gauss(0, 1) - 0.125)


KINDS: dict[str, Callable[[Random, float], float]] = {"lengths": lengths, "steps": steps}


def run(
    places: int, rates: dict[str, tuple[float, float]], kind: str, seed: int, seconds: float
) -> Run:
    """Run tenants, each with (requests per second, start); measure the waits of `calm`."""
    rng = {name: Random(f"{name} {seed}") for name in (*rates, "service")}
    gate = Gate(places, partial(KINDS[kind], rng["service"]))
    core, found = gate.core, Run()
    due = [
        (at if name == "calm" else at + rng[name].expovariate(rate), name)
        for name, (rate, at) in rates.items()
    ]
    heapq.heapify(due)

    while gate.now < seconds:
        end = gate.ends[0][0] if gate.ends else math.inf
        timer = core.next_due_seconds() or math.inf
        at = max(gate.now, min(end, due[0][0], timer))
        found.pass_to(at, places - len(core.under_way), core.num_waiting > 0)
        gate.now = at
        if end <= at:
            heapq.heappop(gate.ends)[2].closed(FinishCause.COMPLETED, Usage(32, 32))
        elif due[0][0] <= at:
            _, name = heapq.heappop(due)
            gate.arrive(name)
            heapq.heappush(due, (at + rng[name].expovariate(rates[name][0]), name))
        else:
            core.tick(at)
        gate.run_passes()
    core.check_integrity()
    found.waits = [took for name, at, took in gate.waits if name == "calm" and at >= SINCE]
    return found


@pytest.mark.parametrize("ends", ["lengths", "steps"])
@pytest.mark.parametrize(
    ("places", "shares"), [(12, (0.25,)), (16, (0.15, 0.33, 0.4)), (20, (0.15, 0.33, 0.4))]
)
def test_fewer_than_one_request_in_two_hundred_waits(
    places: int, shares: tuple[float, ...], ends: str
) -> None:
    waits: list[float] = []
    for share in shares:
        calm = share * places / SERVICE_SECONDS
        flood = max(FLOOD * calm, 2.0 * places / SERVICE_SECONDS)
        rates = {"calm": (calm, 0.0), "flood": (flood, SINCE)}
        for seed in SEEDS:
            waits += run(places, rates, ends, seed, SECONDS).waits
    assert sum(took > WAITED_SECONDS for took in waits) / len(waits) < 0.005


def test_the_reserve_leaves_slots_for_the_flood() -> None:
    places, calm = 20, 0.2
    rate = calm * places / SERVICE_SECONDS
    rates = dict.fromkeys(("calm", "second", "third"), (rate, 0.0))
    rates["flood"] = (2 * places / SERVICE_SECONDS, SINCE)
    runs = [run(places, rates, "lengths", seed, 20.0) for seed in range(6)]
    unused = sum(run.unused / run.seconds / places for run in runs) / len(runs)
    assert unused < 1 - 3 * calm - 0.09
    late = [took > WAITED_SECONDS for run in runs for took in run.waits]
    assert sum(late) / len(late) < 0.05
