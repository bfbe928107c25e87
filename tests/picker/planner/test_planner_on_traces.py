"""The planner on traces in virtual time: a day, bursts and a ramp.

Workers take a minute to start. An oracle that knows the arrivals gives the minimum cost.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from picker.planner.capacity import LatencyObjective, Stage, WorkerCapacity
from picker.planner.planner import Mode, Observation, Planner, Scaling, Sums
from tests.support.picker.queueing_fleet import Ask, QueueingFleet

WORKER = WorkerCapacity(
    prefill_tokens_per_second=5000, decode_base_seconds=0.020, decode_per_sequence_seconds=0.0015
)
OBJECTIVE = LatencyObjective(ttft_seconds=5.0, itl_seconds=0.060)
STARTUP_SECONDS = 60.0
SCALING = Scaling(
    Mode.SLO, Stage.BOTH, WORKER, OBJECTIVE, startup_seconds=STARTUP_SECONDS, max_replicas=12
)
DAY_SECONDS = 86_400.0
ORACLE_SECONDS = 300.0
# Of the requests of each interval of the oracle: of 0.94, 0.96 and 0.98 the least that keeps the
# day's share at 99 %.
ORACLE_SHARE = 0.96
DRAIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    within: float
    replica_hours: float


def a_day(at: float) -> float:
    return 0.66 - 0.54 * math.cos(2 * math.pi * (at - 4 * 3600) / DAY_SECONDS)


def bursts(at: float) -> float:
    return 1.25 if at % 7200 < 600 else 0.25


def a_ramp(at: float) -> float:
    return 0.2 + min(1.0, max(0.0, (at - 3600) / 600))


def trace(rate: Callable[[float], float], seconds: float, top: float) -> list[Ask]:
    """Return Poisson arrivals of log-normal lengths; `top` is the greatest rate."""
    rng, at, asks = Random(1), 0.0, []
    while (at := at + rng.expovariate(top)) < seconds:
        if rng.random() * top < rate(at):
            prompt = rng.lognormvariate(math.log(4000) - 0.18, 0.6)
            answer = rng.lognormvariate(math.log(700) - 0.18, 0.6)
            asks.append(Ask(at, min(24_000, int(prompt) + 1), int(answer) + 2))
    return asks


def share_within(asks: list[Ask]) -> float:
    return sum(one.ended_at > 0 and one.is_within(OBJECTIVE) for one in asks) / max(1, len(asks))


def planned(asks: list[Ask], seconds: float, scaling: Scaling) -> Outcome:
    planner, fleet = Planner(scaling), QueueingFleet(WORKER, scaling.startup_seconds, 1)
    every = coming = [copy.copy(one) for one in asks]
    interval, known = scaling.interval_seconds, 0
    for number in range(1, round(seconds / interval) + 1):
        until = number * interval
        num = next((i for i, one in enumerate(coming) if one.at >= until), len(coming))
        mine, coming = coming[:num], coming[num:]
        fleet.serve(mine, until)
        ended, known = fleet.served[known:], len(fleet.served)
        gaps = sum(one.output - 1 for one in ended)
        decoding = sum(one.ended_at - one.first_at for one in ended)
        seen = Observation(
            seconds=interval,
            arrivals=len(mine),
            replicas=fleet.replicas,
            ready=fleet.replicas,
            cached=Sums(len(mine)),
            fresh=Sums.of(one.prompt for one in mine),
            output=Sums.of(one.output for one in ended),
            waiting=fleet.waiting,
            running=fleet.running,
            itl_seconds=decoding / gaps if gaps else None,
        )
        fleet.scale(planner.next(seen).replicas)
    hours = fleet.total_replica_seconds() / 3600
    fleet.run_until(seconds + DRAIN_SECONDS)
    return Outcome(share_within(every), hours)


def foreseen(asks: list[Ask], seconds: float) -> Outcome:
    """Return the fewest replicas of each interval that keep `ORACLE_SHARE` in the objective."""
    fleet, replicas, num_starts = QueueingFleet(WORKER, 0.0, 1), 1, 0
    every: list[Ask] = []
    coming = asks
    for number in range(1, round(seconds / ORACLE_SECONDS) + 1):
        until = number * ORACLE_SECONDS
        num = next((i for i, one in enumerate(coming) if one.at >= until), len(coming))
        mine, coming = coming[:num], coming[num:]
        every += fleet.served
        fleet.served.clear()
        before = replicas
        replicas = max(1, before - 1)
        while True:
            trial, tried = copy.deepcopy(fleet), [copy.copy(one) for one in mine]
            trial.scale(replicas)
            trial.serve(tried, until)
            served = copy.deepcopy(trial)
            trial.run_until(until + 90)
            if not tried or share_within(tried) >= ORACLE_SHARE:
                break
            replicas += 1
        num_starts += max(0, replicas - before)
        fleet = served
    paid = fleet.total_replica_seconds() + num_starts * STARTUP_SECONDS
    fleet.run_until(seconds + DRAIN_SECONDS)
    return Outcome(share_within(every + fleet.served), paid / 3600)


@pytest.mark.full
def test_a_day_keeps_its_objective_at_the_cost_of_an_oracle_plus_15_percent(
    record_property: Callable[[str, object], None],
) -> None:
    day = trace(a_day, DAY_SECONDS, 1.2)
    ours, oracle = planned(day, DAY_SECONDS, SCALING), foreseen(day, DAY_SECONDS)
    record_property("figures", f"{len(day)} requests, {ours}, oracle {oracle}")
    assert ours.within >= 0.99
    assert oracle.within >= 0.99
    assert ours.replica_hours <= 1.15 * oracle.replica_hours


@pytest.mark.parametrize(
    ("rate", "hours", "least"), [(bursts, 8, 0.90), (a_ramp, 3, 0.98)], ids=["bursts", "a ramp"]
)
def test_an_unforeseeable_burst_costs_its_first_requests(
    rate: Callable[[float], float],
    hours: int,
    least: float,
    record_property: Callable[[str, object], None],
) -> None:
    """Late are the requests of the interval that detects the burst, and of the start-up."""
    asks, seconds = trace(rate, hours * 3600.0, 1.25), hours * 3600.0
    ours, oracle = planned(asks, seconds, SCALING), foreseen(asks, seconds)
    record_property("figures", f"{len(asks)} requests, {ours}, oracle {oracle}")
    assert ours.within >= least
    assert ours.replica_hours <= 1.5 * oracle.replica_hours
