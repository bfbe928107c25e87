"""The gate agrees with a simple model over random sequences of events."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import looptime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import DropReason
from picker.flowcontrol.queue import FLOW_MEMORY_SECONDS
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.framework.flow import SharesCapacity
from tests.depth import by_depth, examples
from tests.support.picker.flow_scene import (
    Ceilings,
    Client,
    Pool,
    Scene,
    Sharing,
    Sheddable,
    Slots,
    band,
    flow_settings,
    settle,
)

MAX_DISPLACED = 64
CAPS = (
    "bytes in all",
    "requests in all",
    "memory in all",
    "bytes of its priority",
    "requests of its priority",
)


@dataclass(frozen=True)
class Place:
    number: int
    band: int
    flow: str
    size_bytes: int
    held_bytes: int = 0

    def takes(self, cap: str) -> int:
        of = {"bytes": self.size_bytes, "memory": self.held_bytes, "requests": 1}
        return of[cap.split()[0]]


def settings_of(chosen: FlowControlSettings, band: int) -> BandSettings:
    default = chosen.default_negative_band if band < 0 else chosen.default_band
    return chosen.bands.get(band, default)


def exceeded(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place
) -> Sequence[str]:
    """List the caps that the newcomer would exceed, in the order of their messages."""
    own = [one for one in waiting if one.band == newcomer.band]
    band = settings_of(chosen, newcomer.band)
    found = (
        (waiting, chosen.max_bytes),
        (waiting, chosen.max_requests),
        (waiting, chosen.max_memory_bytes),
        (own, band.max_bytes),
        (own, band.max_requests),
    )
    return [
        cap
        for cap, (others, most) in zip(CAPS, found, strict=True)
        if most is not None and sum(one.takes(cap) for one in (*others, newcomer)) > most
    ]


def displaced(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place
) -> Sequence[Place] | None:
    """List the requests that the newcomer displaces; None if it is refused."""
    left, gone = list(waiting), list[Place]()
    while caps := exceeded(chosen, left, newcomer):
        last = _last(chosen, left, newcomer, caps[-1]) if len(gone) < MAX_DISPLACED else None
        if last is None:
            return None
        left.remove(last)
        gone.append(last)
    return gone


def _last(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place, cap: str
) -> Place | None:
    lower = [one.band for one in waiting if one.band < newcomer.band]
    losing = min(lower) if lower and cap.endswith("all") else newcomer.band
    members = [one for one in waiting if one.band == losing]
    fairness: object = settings_of(chosen, losing).fairness.for_band(losing)
    if not isinstance(fairness, SharesCapacity):
        return None if losing == newcomer.band else max(members, key=lambda one: one.number)
    held: Mapping[str, float] = {
        flow: sum(one.takes(cap) for one in members if one.flow == flow) / fairness.weight(flow)
        for flow in {one.flow for one in members}
    }
    if not held:
        return None
    greatest = min(held, key=lambda flow: (-held[flow], flow))
    if losing == newcomer.band:
        more = newcomer.takes(cap) / fairness.weight(newcomer.flow)
        if held.get(newcomer.flow, 0.0) + more >= held[greatest]:
            return None
    return max((one for one in members if one.flow == greatest), key=lambda one: one.number)


TICK = 0.003


VARIANTS: list[FlowControlSettings | None] = [
    flow_settings(request_ttl_seconds=4.0, no_endpoint_ttl_seconds=7.0),
    flow_settings(
        detector=Slots(2),
        max_requests=6,
        max_bytes=500,
        bands={4: band(max_requests=2, request_ttl_seconds=6.0), -3: band(max_bytes=150)},
        request_ttl_seconds=2.0,
        no_endpoint_ttl_seconds=None,
    ),
    flow_settings(
        usage_limits=Ceilings({0: 0.5, 4: 0.75}),
        detector=Slots(3),
        bands={4: band(), 1: band()},
        default_negative_band=band(max_requests=1),
        request_ttl_seconds=None,
        eviction=(Sheddable(), Sheddable()),
    ),
    None,
    flow_settings(
        max_requests=7,
        max_bytes=400,
        max_memory_bytes=900,
        default_band=band(fairness=Sharing(), max_requests=5, max_bytes=260),
        default_negative_band=band(fairness=Sharing(), max_requests=4),
        request_ttl_seconds=9.0,
    ),
]


def held(size_bytes: int) -> int:
    return 100 + 2 * size_bytes


class Walk(Scene):
    def __init__(self) -> None:
        super().__init__(Pool(2))
        self.chosen: FlowControlSettings | None = None
        self.wanted: set[int] = set()
        self.turned_at = 0.0
        self.reloaded_at = 0.0
        self.is_empty = False
        self.items: dict[int, tuple[float, float | None]] = {}  # arrival, time to live
        self.bands: dict[int, int] = {}  # of waiting requests
        self.turned_away: set[int] = set()

    # Events

    async def arrives(self, flow: str, priority: int, size_bytes: int, leaves: bool) -> None:
        predicted, number = self._predict(flow, priority, size_bytes), len(self.clients)
        ttl = None
        if self.chosen is not None:
            ttl = settings_of(self.chosen, self._band(priority)).request_ttl_seconds
        self.items[number] = (self.loop.time(), ttl)
        client = await self.arrive(
            str(number),
            fairness_id=flow,
            priority=priority,
            size_bytes=size_bytes,
            held_bytes=held(size_bytes),
            leaves=leaves,
        )
        for one in self.clients:
            mine = int(one.request.request_id)
            cap = predicted.get(mine)
            if cap is None:
                assert mine != number or one.refusal is None
                continue
            assert one.refusal is not None, self.waiting()
            assert cap in one.refusal.message
            empty = not self.pool.endpoints
            reason = DropReason.NO_ENDPOINTS if empty else DropReason.SATURATED
            assert one.refusal.drop_reason is reason
        self.turned_away.update(predicted)
        if client.waits:
            self._note_bands([client])
        assert self.turned_away == {
            int(one.request.request_id)
            for one in self.clients
            if one.refusal is not None and "queue of requests is full" in one.refusal.message
        }

    async def quits(self, index: int) -> None:
        waiting = self.waiting()
        if waiting and (task := waiting[index % len(waiting)].task):
            task.cancel()
            await settle()

    async def ends(self, index: int) -> None:
        if under_way := self.under_way():
            await self.done(under_way[index % len(under_way)])

    async def ends_while_another_quits(self, index: int) -> None:
        waiting = self.waiting()
        if under_way := self.under_way():
            self.close(under_way[index % len(under_way)])
        await asyncio.sleep(0)
        if waiting and (task := waiting[0].task):
            task.cancel()
        await settle()

    async def leaves(self) -> None:
        for client in self.under_way():
            if client.endpoint_key is None:
                self.leave(client)
        await settle()

    async def changes_size(self, size: int) -> None:
        if (size == 0) is not self.is_empty:
            self.is_empty, self.turned_at = size == 0, self.loop.time()
        await self.resize(size)

    async def reloads(self, index: int) -> None:
        self.chosen = VARIANTS[index % len(VARIANTS)]
        self.reloaded_at = self.loop.time()
        self.gate.use(self.chosen)
        self._note_bands(self.waiting())
        await settle()

    async def wants(self, priorities: set[int]) -> None:
        self.wanted = priorities
        self.gate.set_priorities(priorities)
        await settle()

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await settle()

    # Checks

    def let_in(self, client: Client) -> None:
        ticket, view = client.ticket, self.gate.queues()
        assert not any(one.queued_requests for one in view.bands if one.priority > ticket.priority)

    def waiting(self) -> list[Client]:
        return [client for client in self.clients if client.waits]

    def under_way(self) -> list[Client]:
        return [client for client in self.clients if client.ticket and not client.is_over]

    def check(self) -> None:
        self.gate.check_integrity()
        waiting = self.waiting()
        assert self.gate.num_waiting == len(waiting)
        assert self.gate.num_under_way == len(self.under_way())
        if self.chosen is None:
            assert not waiting
            return
        self._check_that_waiting_requests_are_blocked()
        self._check_times()
        self._check_pages(waiting)

    def _check_that_waiting_requests_are_blocked(self) -> None:
        waiting_bands = [one.priority for one in self.gate.queues().bands if one.queued_requests]
        if not waiting_bands or not self.pool.endpoints:
            return
        assert isinstance(self.chosen, FlowControlSettings)
        detector, limits = self.chosen.detector, self.chosen.usage_limits
        assert isinstance(detector, Slots)
        assert isinstance(limits, Ceilings)
        keys = {one.key for one in self.pool.endpoints}
        held = sum(one.endpoint_key in (None, *keys) for one in self.under_way())
        saturation = held / (detector.slots * len(keys))
        assert saturation >= limits.by_priority.get(waiting_bands[0], limits.default)

    def _check_times(self) -> None:
        assert self.chosen is not None
        for client in self.waiting():
            came, ttl = self.items[int(client.request.request_id)]
            budget = self.chosen.no_endpoint_ttl_seconds if self.is_empty else ttl
            if budget is not None:
                due = max(max(came, self.turned_at) + budget, self.reloaded_at)
                assert self.loop.time() <= due + TICK  # a shorter time holds from the reload on

    def _check_pages(self, waiting: list[Client]) -> None:
        shown = Counter[str]()
        for metric in self.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name.startswith("llm_d_epp_flow_control_queue_"):
                    shown[sample.name.rpartition("_")[2]] += int(sample.value)
        assert shown["size"] == len(waiting)
        assert shown["bytes"] == sum(one.request.size_bytes for one in waiting)
        view = self.gate.queues()
        assert (view.queued_requests, view.queued_bytes) == (shown["size"], shown["bytes"])

    def check_order(self) -> None:
        for flow in "abcdef":
            for priority in (-5, 0, 2, 6):
                mine = [
                    int(one.request.request_id)
                    for one in self.order
                    if (one.request.fairness_id, one.request.priority) == (flow, priority)
                ]
                assert all(one < other for one, other in pairwise(mine))

    async def end(self) -> None:
        for client in self.clients:
            if client.waits and client.task is not None:
                client.task.cancel()
        await settle()
        for client in self.clients:
            self.close(client)
        await settle()
        self.check()
        tasks = [client.task for client in self.clients if client.task is not None]
        assert all(task.done() for task in tasks)
        assert not any(task.exception() for task in tasks if not task.cancelled())
        quit_early = sum(task.cancelled() for task in tasks)
        refused = sum(one.refusal is not None for one in self.clients)
        assert quit_early + refused + len(self.order) == len(self.clients)
        outcomes = self.gate.queues().outcomes
        assert sum(outcomes.values()) == len(self.clients)
        given_back = outcomes.get("Dispatched", 0) - len(self.order)
        assert given_back == quit_early - outcomes.get("EvictedContextCancelled", 0) >= 0
        self._check_totals(outcomes)

    def _check_totals(self, outcomes: Any) -> None:
        totals, durations = Counter[str](), Counter[str]()
        for metric in self.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name == "llm_d_epp_flow_control_requests_total":
                    totals[sample.labels["outcome"]] += int(sample.value)
                if sample.name == "llm_d_epp_flow_control_request_queue_duration_seconds_count":
                    durations[sample.labels["outcome"]] += int(sample.value)
        assert totals == Counter(outcomes)
        if self.loop.time() < FLOW_MEMORY_SECONDS:
            assert durations == totals
        assert durations <= totals
        assert self.gauge("pending_reclaim", inference_pool="pool") == 0

    def _predict(self, flow: str, priority: int, size_bytes: int) -> dict[int, str]:
        """Map the requests that an arrival turns away to the exceeded cap."""
        if self.chosen is None:
            return {}
        where = (len(self.clients), self._band(priority), flow)
        newcomer = Place(*where, size_bytes, held(size_bytes))
        waiting = [self._place(one) for one in self.waiting()]
        caps = exceeded(self.chosen, waiting, newcomer)
        if not caps:
            return {}
        gone = displaced(self.chosen, waiting, newcomer)
        return {one.number: caps[0] for one in ([newcomer] if gone is None else gone)}

    def _place(self, client: Client) -> Place:
        request = client.request
        number = int(request.request_id)
        sizes = (request.size_bytes, request.held_bytes)
        return Place(number, self.bands[number], request.fairness_id, *sizes)

    def _band(self, priority: int) -> int:
        """Return the band in which a request waits: its own if no band is lower."""
        lower = [one.priority for one in self.gate.queues().bands if one.priority <= priority]
        return max(lower, default=priority)

    def _note_bands(self, clients: Iterable[Client]) -> None:
        for one in clients:
            self.bands[int(one.request.request_id)] = self._band(one.request.priority)


PRIORITIES = (-5, 0, 2, 6)
ARRIVES = st.tuples(
    st.just("arrives"),
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(PRIORITIES),
        st.sampled_from((0, 40, 100)),
        st.booleans(),
    ),
)
INDEX = st.tuples(st.integers(0, 20))
STEPS = st.one_of(
    ARRIVES,
    ARRIVES,
    ARRIVES,
    st.tuples(st.sampled_from(("ends", "quits", "ends_while_another_quits")), INDEX),
    st.tuples(st.just("ends"), INDEX),
    st.tuples(st.just("leaves"), st.just(())),
    st.tuples(st.just("changes_size"), st.tuples(st.integers(0, 3))),
    st.tuples(st.just("reloads"), st.tuples(st.integers(0, 4))),
    st.tuples(st.just("wants"), st.tuples(st.sets(st.sampled_from((-5, 2, 6))))),
    st.tuples(st.just("passes"), st.tuples(st.sampled_from((0.01, 1.0, 3.0, 301.0)))),
)


Steps = list[tuple[str, tuple[Any, ...]]]


def walk(first: int, steps: Steps) -> None:
    with closing(looptime.new_event_loop()) as loop:
        loop.run_until_complete(_walk(first, steps))


async def _walk(first: int, steps: Steps) -> None:
    scene = Walk()
    await scene.reloads(first)
    for name, arguments in steps:
        step: Callable[..., Any] = getattr(scene, name)
        await step(*arguments)
        scene.check()
    scene.check_order()
    await scene.end()


@examples(100)
@given(st.sampled_from((0, 1, 2, 4)), st.lists(STEPS, min_size=10, max_size=40))
def test_every_request_has_one_end_and_leaves_nothing_behind(first: int, steps: Steps) -> None:
    walk(first, steps)


def crowded(rng: Random) -> Steps:
    """Draw steps with more arrivals than ends, so that the queue is mostly full."""
    flows, sizes = rng.choice(("ab", "abbbbb", "abcdef")), rng.choice(((40, 90), (1, 20, 200)))
    steps: Steps = []
    for _ in range(200):
        draw = rng.random()
        if draw < 0.7:
            who = (rng.choice(flows), rng.choice(PRIORITIES), rng.choice(sizes), draw < 0.6)
            steps.append(("arrives", who))
        elif draw < 0.85:
            steps.append((rng.choice(("ends", "quits", "leaves")), (rng.randrange(20),)))
        elif draw < 0.9:
            steps.append(("passes", (rng.choice((0.01, 1.0)),)))
        elif draw < 0.94:
            steps.append(("changes_size", (rng.randrange(3),)))
        elif draw < 0.97:
            steps.append(("wants", (set(rng.sample((-5, 2, 6), rng.randrange(3))),)))
        else:
            steps.append(("reloads", (rng.choice((1, 4, 4)),)))
    return [(name, () if name == "leaves" else arguments) for name, arguments in steps]


@pytest.mark.parametrize("seed", range(by_depth(2, 6)))
def test_a_full_queue_turns_away_the_newcomer_or_those_it_displaces(seed: int) -> None:
    walk(4 if seed % 2 else 1, crowded(Random(seed)))


def test_a_shorter_time_to_live_expires_longer_waits_at_the_reload() -> None:
    arrives = ("arrives", ("a", -5, 0, False))
    steps = [arrives] * 7 + [
        ("changes_size", (0,)),
        ("reloads", (1,)),
        arrives,
        ("passes", (301.0,)),
        ("reloads", (0,)),
        ("passes", (0.01,)),
        ("passes", (1.0,)),
    ]
    walk(0, steps)
