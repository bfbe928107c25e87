"""Small tenants find room beside a flooding tenant."""

import asyncio
import heapq
import math
from collections.abc import Callable
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
from picker.flowcontrol.shell.controller import FlowController
from picker.flowcontrol.waiting import FlowTicket, Waiting
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import Api, Candidate, Endpoint, FinishCause, InferenceRequest, ParsedBody, Usage
from tests.support.picker.flow_scene import (
    Ceilings,
    Client,
    Pool,
    Scene,
    Slots,
    band,
    settle,
    with_settings,
)
from tests.support.picker.plugin_scenes import configured

pytestmark = pytest.mark.looptime
SLOTS, RESERVED = 10, 3


def turns(headroom: float = RESERVED / SLOTS, **values: object) -> object:
    values = {"min_headroom": headroom, "max_headroom": headroom, **values}
    parameters = DeficitRoundRobinFairnessPolicyParameters(**values)  # type: ignore[arg-type]
    return band(fairness=DeficitRoundRobinFairnessPolicy(parameters), max_requests=20)


def scene(headroom: float = RESERVED / SLOTS, **values: object) -> Scene:
    return Scene(Pool(1), detector=Slots(SLOTS), default_band=turns(headroom), **values)


async def arrive(one: Scene, flow: str, number: int, **values: object) -> list[Client]:
    return [await one.arrive(fairness_id=flow, **values) for _ in range(number)]


def let_in(clients: list[Client]) -> int:
    return sum(client.ticket is not None for client in clients)


async def test_a_lone_flow_fills_the_pool() -> None:
    pool = scene()
    assert let_in(await arrive(pool, "flood", 15)) == SLOTS


async def test_slots_are_reserved_for_a_flow_that_uses_little() -> None:
    pool = scene()
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 15)
    assert let_in(flood) == SLOTS - RESERVED
    calm = await arrive(pool, "calm", RESERVED)
    assert let_in(calm) == RESERVED
    await pool.done(flood[0])
    assert let_in(flood) == SLOTS - RESERVED
    for client in calm:
        await pool.done(client)
    assert let_in(flood) == SLOTS - RESERVED + 1
    pool.gate.check_integrity()


async def test_no_slots_are_reserved_for_an_idle_flow() -> None:
    pool = scene()
    calm = (await arrive(pool, "calm", 1))[0]
    flood = await arrive(pool, "flood", 15)
    await asyncio.sleep(9.0)
    assert let_in(flood) == SLOTS - RESERVED - 1
    await asyncio.sleep(1.5)
    assert let_in(flood) == SLOTS - 1
    await pool.done(calm)
    await asyncio.sleep(9.0)
    assert let_in(flood) == SLOTS - 1
    await asyncio.sleep(1.5)
    assert let_in(flood) == SLOTS


async def test_an_open_gate_is_open_to_all_flows() -> None:
    pool = scene()
    calm = (await arrive(pool, "calm", 1))[0]
    await arrive(pool, "flood", SLOTS - RESERVED - 2)
    assert pool.gate.is_open
    assert let_in(await arrive(pool, "flood", 1)) == 1
    assert not pool.gate.is_open
    await pool.done(calm)
    assert pool.gate.is_open
    assert let_in(await arrive(pool, "flood", 1)) == 1


async def test_flows_that_all_wait_fill_the_pool() -> None:
    pool = scene()
    clients = [
        client for _ in range(20) for name in "abc" for client in await arrive(pool, name, 1)
    ]
    usage = Usage(50, 103)
    while waiting := [client for client in clients if client.waits]:
        assert pool.gate.num_under_way == SLOTS, len(waiting)
        oldest = next(one for one in pool.order if not one.is_over)
        await pool.done(oldest, usage)
        if len({one.request.fairness_id for one in waiting}) < 3:
            break
    shares = [sum(one.request.fairness_id == name for one in pool.order) for name in "abc"]
    assert max(shares) - min(shares) <= 4


async def test_a_band_with_reserved_slots_blocks_lower_bands() -> None:
    """Otherwise a lower priority would take the reserve of a higher one."""
    pool = scene(bands={5: turns()})
    await pool.done((await arrive(pool, "calm", 1, priority=5))[0])
    high = await arrive(pool, "flood", SLOTS, priority=5)
    low = await arrive(pool, "other", 2)
    assert let_in(high) == SLOTS - RESERVED
    assert let_in(low) == 0
    for client in high:
        if client.waits and client.task is not None:
            client.task.cancel()
    await settle()
    assert let_in(low) == 2


async def test_the_reserve_is_a_share_of_the_bands_ceiling() -> None:
    pool = Scene(
        Pool(1), detector=Slots(20), default_band=turns(), usage_limits=Ceilings(default=0.5)
    )
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 15)) == SLOTS - RESERVED
    assert let_in(await arrive(pool, "calm", 5)) == RESERVED


async def test_a_policy_without_headroom_reserves_no_slots() -> None:
    pool = scene(headroom=0.0)
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 12)
    assert let_in(flood) == SLOTS
    assert let_in(await arrive(pool, "calm", 1)) == 0
    pool.gate.use(with_settings(pool.settings, default_band=turns()))
    for client in flood[:RESERVED]:
        await pool.done(client)
    assert pool.gate.num_under_way == SLOTS - RESERVED + 1  # no usage was recorded


async def test_an_unknown_tenant_waits_for_its_turn() -> None:
    """Otherwise invented names would delay others; known tenants enter out of turn."""
    pool = scene()
    await pool.done((await arrive(pool, "known", 1))[0])
    flood = await arrive(pool, "flood", 15)
    new = await arrive(pool, "new", 1)
    assert let_in(new) == 0
    assert let_in(await arrive(pool, "known", 1)) == 1
    while not let_in(new):
        await pool.done(next(one for one in flood if one.ticket and not one.is_over))
    assert let_in(flood) < 15


def follows(slots: int, **values: object) -> Scene:
    fairness = DeficitRoundRobinFairnessPolicy(
        DeficitRoundRobinFairnessPolicyParameters(**values)  # type: ignore[arg-type]
    )
    shared = band(fairness=fairness, max_requests=50)
    return Scene(Pool(1), detector=Slots(slots), default_band=shared)


async def test_one_slot_is_reserved_for_an_occasional_tenant() -> None:
    pool = follows(40)
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 45)
    assert let_in(flood) == 39
    for _ in range(5):
        (calm,) = await arrive(pool, "calm", 1)
        assert calm.ticket is not None
        assert let_in(flood) == 39
        await pool.done(calm)


async def test_the_reserve_is_within_its_bounds() -> None:
    pool = follows(20, max_headroom=0.1)
    await arrive(pool, "calm", 9)
    assert let_in(await arrive(pool, "flood", 30)) == 20 - 9 - 2
    pool = follows(20, min_headroom=0.25)
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 30)) == 20 - 5


async def test_an_average_load_counts_if_a_detector_cannot_see_new_requests() -> None:

    class Unmoved(Slots):
        """Counts requests only after they left for an endpoint."""

        def saturation(self, candidates: object, attributes: object, now_seconds: float) -> float:
            return sum(pool.pool.under_way.values()) / self.slots

    pool = follows(20)
    pool.gate.use(with_settings(pool.settings, detector=Unmoved(20)))
    await pool.done((await arrive(pool, "calm", 1))[0])
    assert let_in(await arrive(pool, "flood", 30)) == 19


async def test_a_request_admitted_on_arrival_has_a_queue_time_of_0() -> None:
    pool = follows(20)
    clock = (place / 1000 for place in count())
    pool.gate = FlowController(pool.settings, pool.pool, lambda: next(clock), PickerMetrics())
    await pool.done((await arrive(pool, "calm", 1))[0])
    flood = await arrive(pool, "flood", 30)
    assert any(client.waits for client in flood)
    (calm,) = await arrive(pool, "calm", 1)
    assert calm.ticket.queue_seconds == 0


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

    def saturation(self, candidates: Any, attributes: Any, now_seconds: float) -> float:
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
