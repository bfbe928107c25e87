"""Overload in virtual time: the picker's whole director in front of workers' schedulers."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import pytest

from fleet.sim.living_worker import WorkerSettings
from fleet.sim.virtual_fleet import Simulation, VirtualFleet
from fleet.sim.virtual_time import run_in_virtual_time
from picker.decisions.decision import Decision, Watchers
from picker.errors import RefusedError
from picker.flowcontrol.shell.controller import FlowController
from picker.requestcontrol.headers import FAIRNESS_ID, OBJECTIVE
from worker.config import CacheConfig, SchedulerConfig
from worker.sim.config import SimConfig

DECODE_STEP_SECONDS = SimConfig().decode_base_seconds
NUM_PROMPT = 32
RATE = 70.0  # roughly the requests of `MEAN_OUTPUT` that 32 places serve a second
MEAN_OUTPUT = 32
SPREAD = 0.5  # of the lengths of outputs
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: active-request-scorer}}
- {{type: concurrency-detector, parameters: {{maxConcurrency: {slots}}}}}
- {{type: deficit-round-robin-fairness-policy, parameters: {{{turns}}}}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer}}
  - {{pluginRef: active-request-scorer}}
flowControl:
  maxMemory: {max_memory}
  defaultRequestTTL: {ttl}
  saturationDetector: {{pluginRef: concurrency-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: {fairness}, maxRequests: {waiting}}}
"""
FAIR, STRICT = "deficit-round-robin-fairness-policy", "global-strict-fairness-policy"


@dataclass(frozen=True)
class Tenant:
    """Sends `rate` requests a second for about `num_output` tokens, from `since` to `until`."""

    rate: float
    num_output: int = MEAN_OUTPUT
    num_prompt: int = NUM_PROMPT
    objective: str = ""
    since: float = 0.0
    until: float = math.inf

    def calls(self, name: str, seconds: float) -> Iterable[tuple[float, int]]:
        """Poisson arrivals with tokens of their outputs, the same whatever other tenants send."""
        rng, at = Random(f"{name} of {self}"), self.since
        while (at := at + rng.expovariate(self.rate)) < min(seconds, self.until):
            output = self.num_output * math.exp(SPREAD * rng.gauss(0, 1) - SPREAD**2 / 2)
            yield at, max(1, round(output))


@dataclass
class Run:
    requests: list[Decision] = field(default_factory=list)
    most_memory_bytes: int = 0

    def finished(self, decision: Decision) -> None:
        self.requests.append(decision)

    def of(self, tenant: str, since: float = 0.0) -> list[Decision]:
        return [
            one
            for one in self.requests
            if one.fairness_id == tenant and since <= one.received_at_seconds
        ]


def config(fairness: str = FAIR, slots: int = 16, **values: object) -> str:
    chosen = {"turns": "", "max_memory": 0, "ttl": "60s", "waiting": 100}
    chosen |= values
    return CONFIG.format(fairness=fairness, slots=slots, **chosen)


def run(
    text: str,
    tenants: Mapping[str, Tenant],
    seconds: float,
    slots: int = 16,
    objectives: Mapping[str, int] | None = None,
    workers: int = 2,
) -> Run:
    """Run with few workers; returns when all requests are answered and every counter is at zero."""
    worker = WorkerSettings(
        limits=SchedulerConfig(max_num_seqs=slots), cache=CacheConfig(num_blocks=4096)
    )
    settings = Simulation(workers, worker, text, is_fast=True, objectives=objectives or {})
    seen, rng = Run(), Random(0)

    async def ask(fleet: VirtualFleet, name: str, num_output: int) -> None:
        one = tenants[name]
        prompt = rng.choices(range(256, 1280), k=one.num_prompt)
        headers = {FAIRNESS_ID[0]: name, OBJECTIVE[0]: one.objective}
        with suppress(RefusedError):
            await fleet.ask(prompt, num_output, headers)

    async def tenant(fleet: VirtualFleet, name: str) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for at, num_output in tenants[name].calls(name, seconds):
                await asyncio.sleep(max(0.0, at - loop.time()))
                group.create_task(ask(fleet, name, num_output))
                await asyncio.sleep(0)
                view = gate_of(fleet).queues()
                seen.most_memory_bytes = max(seen.most_memory_bytes, view.queued_memory_bytes)

    async def main() -> None:
        async with VirtualFleet(settings) as fleet:
            director = fleet.pickers[0].director
            director.context = replace(director.context, watchers=Watchers(seen))
            async with asyncio.TaskGroup() as group:
                for name in tenants:
                    group.create_task(tenant(fleet, name))
            _check_that_nothing_is_left(fleet, len(seen.requests))

    run_in_virtual_time(main())
    return seen


def gate_of(fleet: VirtualFleet) -> FlowController:
    gate = fleet.pickers[0].gate
    assert gate is not None
    return gate


def _check_that_nothing_is_left(fleet: VirtualFleet, num_requests: int) -> None:
    gate = gate_of(fleet)
    view = gate.queues()
    assert (fleet.pickers[0].inflight.total, gate.num_waiting, gate.num_under_way) == (0, 0, 0)
    assert (view.queued_requests, view.queued_memory_bytes, view.under_way) == (0, 0, 0)
    assert not any(band.queued_requests or band.flows for band in view.bands)
    assert sum(view.outcomes.values()) == num_requests
    gate.check_integrity()


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def p99_ttft(requests: Iterable[Decision]) -> float:
    times = [one.response.ttft_seconds for one in requests if one.response is not None]
    return p99(time for time in times if time is not None)


def served_tokens(requests: Iterable[Decision]) -> int:
    used = [one.usage for one in requests if one.usage is not None]
    return sum(one.prompt_tokens + one.completion_tokens for one in used)


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 is equal shares, 1/n is a single owner."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


CALM = Tenant(0.27 * 2 * RATE)
FLOOD = Tenant(2.7 * 2 * RATE)


def queue_time(text: str, workers: int = 2, **others: Tenant) -> tuple[float, float, int]:
    """The calm tenant's p99 queue time and time to first token, and refusals, after 3 seconds; in a
    pool of 16 places a worker.
    """
    tenants = {
        name: replace(one, rate=one.rate * workers / 4)
        for name, one in {"calm": CALM, **others}.items()
    }
    requests = run(text, tenants, 7.0, workers=workers).of("calm", since=3.0)
    routed = [one for one in requests if one.destination]
    queued = p99(one.queue_seconds for one in routed)
    return queued, p99_ttft(requests), len(requests) - len(routed)


def test_a_flood_costs_a_calm_tenant_no_time_in_the_queue() -> None:
    """Another tenant sends ten times as much, from the beginning or all at once: the calm one waits
    at most 1.3 times as long as alone.
    """
    alone, _, refused_alone = queue_time(config())
    assert (alone, refused_alone) == (0.0, 0)
    for since in (0.0, 4.0):
        flood = replace(FLOOD, since=since)
        flooded, ttft, refused = queue_time(config(), flood=flood)
        assert flooded <= 1.3 * alone
        assert refused == 0
        assert ttft < 0.15


def test_first_come_first_served_lets_a_flood_block_others() -> None:
    """The test above would fail without turns, without room in the queue, or in the pool."""
    waited, _, refused = queue_time(config(STRICT), flood=FLOOD)
    assert waited > 0.5
    assert refused > 30
    waited, _, refused = queue_time(config(turns="maxHeadroom: 0"), flood=FLOOD)
    assert waited > 3 * DECODE_STEP_SECONDS
    assert refused == 0


def served(text: str) -> tuple[int, int]:
    """The tokens of two tenants that want more, one in requests of ten times the size."""
    seconds, since = 8.0, 3.0
    tenants = {"small": Tenant(160.0, 8, 8), "large": Tenant(40.0, 80, 80)}
    seen = run(text, tenants, seconds, slots=8)
    small, large = (
        served_tokens(one for one in seen.of(name) if since <= one.ended_at_seconds < seconds)
        for name in tenants
    )
    return small, large


def test_equal_tenants_are_served_equally_whatever_the_size_of_their_requests() -> None:
    assert jain(served(config(slots=8))) >= 0.95
    assert jain(served(config(STRICT, slots=8))) < 0.95


def test_tenants_are_served_by_their_weights() -> None:
    small, large = served(config(slots=8, turns="weights: {large: 3}"))
    assert large / small == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("fairness", [FAIR, STRICT])
def test_a_lower_priority_waits_for_all_higher_ones(fairness: str) -> None:
    tenants = {"high": Tenant(2 * RATE, objective="urgent"), "low": Tenant(0.1 * RATE, since=1.0)}
    seen = run(config(fairness), tenants, 6.0, objectives={"urgent": 10})
    routed = {
        name: [one.at_seconds for one in seen.of(name) if one.destination] for name in tenants
    }
    assert len(routed["low"]) > 20
    assert min(routed["low"]) >= max(routed["high"]) > 6.5


def reason(request: Decision) -> str | None:
    return None if request.refused is None else request.refused.reason


def retry_after(request: Decision) -> int | None:
    return None if request.refused is None else request.refused.retry_after_seconds


def test_no_request_waits_beyond_its_time() -> None:
    """A low priority under a flood of a higher one is refused exactly at its time."""
    tenants = {
        "high": Tenant(2 * RATE, objective="urgent"),
        "low": Tenant(0.2 * RATE, since=1.0, until=4.0),
    }
    text = config(ttl="1500ms", waiting=200)
    seen = run(text, tenants, 7.0, objectives={"urgent": 10})
    refused = [one for one in seen.requests if reason(one) == "rejected-ttl-expired"]
    assert len(seen.of("low")) > 20
    assert all(reason(one) == "rejected-ttl-expired" for one in seen.of("low"))
    assert any(one.fairness_id == "high" for one in refused)
    assert all(one.response_status == 429 and retry_after(one) for one in refused)
    assert all(one.seconds == pytest.approx(1.5, abs=0.002) for one in refused)
    assert all(one.decision_seconds <= 1.502 for one in seen.requests)


def test_an_occasional_tenant_costs_a_place() -> None:
    """Beside a flood, at least 95 % of the peak is served. The occasional tenant waits for another
    request's end only when it asks twice within the time that one request takes.
    """
    tenants = {"rare": Tenant(0.5), "flood": Tenant(3 * RATE, since=3.0)}
    seen = run(config(), tenants, 12.0)
    assert goodput(seen, 5.0, 12.0) >= 0.95 * peak()
    assert sum(one.decision_seconds > 0 for one in seen.of("rare", since=3.0)) <= 1


def goodput(seen: Run, since: float, until: float) -> float:
    served = served_tokens(one for one in seen.requests if since <= one.ended_at_seconds < until)
    return served / (until - since)


@cache
def peak() -> float:
    loads = [{"all": Tenant(share * RATE)} for share in (1.0, 1.2)]
    return max(goodput(run(config(STRICT), load, 8.0), 3.0, 8.0) for load in loads)


@pytest.mark.parametrize("fairness", [STRICT, FAIR])
def test_an_overloaded_fleet_serves_as_much_as_it_can(fairness: str) -> None:
    """At three times its peak it serves at least 95 % of that, also just after another tenant has
    stopped; the rest is refused at once, for a reason, and the queue stays within its memory. When
    the load falls, everything is as before within five seconds.
    """
    cap = 1_000_000
    tenants = {
        "before": Tenant(0.5 * RATE, until=5.0),
        "flood": Tenant(3 * RATE, since=5.0, until=12.0),
        "after": Tenant(0.5 * RATE, since=12.0),
    }
    seen = run(config(fairness, max_memory=cap), tenants, 22.0)
    assert goodput(seen, 7.0, 12.0) >= 0.95 * peak()
    refused = [one for one in seen.requests if one.refused is not None]
    assert len(refused) > 3 * RATE
    assert {(one.response_status, reason(one)) for one in refused} == {(429, "rejected-saturated")}
    assert all(1 <= (retry_after(one) or 0) <= 60 for one in refused)
    assert {one.seconds for one in refused} == {0.0}
    assert 0.9 * cap < seen.most_memory_bytes <= cap
    before, after = seen.of("before", since=1.0), seen.of("after", since=17.0)
    assert p99_ttft(after) <= 1.3 * p99_ttft(before)
