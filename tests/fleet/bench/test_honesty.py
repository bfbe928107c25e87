"""Against an endpoint whose latency is known, the bench reports it; where it cannot, it says so.

All in virtual time: nothing here depends on how busy the machine is.
"""

from __future__ import annotations

from itertools import repeat
from random import Random

import numpy as np
import pytest
from virtual_endpoint import Times, VirtualEndpoint

from fleet.bench.arrivals import Ramp, intended_times
from fleet.bench.slo import Slo, read_bounds
from fleet.bench.summary import Stage, Summary, summary
from fleet.bench.workload import Exchange, Session
from fleet.sim.virtual_time import run_in_virtual_time

SESSION = Session("", (Exchange("hello", 8),))
SECONDS, RATE = 100.0, 10.0
SLO = Slo(read_bounds("ttft<0.5s,e2e_p95<1s"))


async def stage_of(endpoint: VirtualEndpoint, concurrency: int | None = None) -> Stage:
    driver = endpoint.driver()
    if concurrency is None:
        times = intended_times(Ramp(RATE, RATE), SECONDS, 1.0, Random(3))
        await driver.open_loop(zip(times, repeat(SESSION), strict=False))
    else:
        await driver.closed_loop(repeat(SESSION), concurrency, SECONDS)
    return Stage("s", driver.begun, driver.clock(), 0.0, driver.outcomes, driver.pulses, 0.0)


def measured(endpoint: VirtualEndpoint, concurrency: int | None = None) -> Summary:
    return summary(run_in_virtual_time(stage_of(endpoint, concurrency)), SLO)


def close(value: float) -> object:
    return pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("concurrency", [None, 5])
def test_a_constant_latency_is_reported(concurrency: int | None) -> None:
    """In both loops, with all quantiles, rates and counts."""
    one = measured(VirtualEndpoint(lambda number, now: Times(0.2, 0.05)), concurrency)
    for spread, seconds in ((one.ttft, 0.2), (one.itl, 0.05), (one.e2e, 0.2 + 7 * 0.05)):
        assert spread is not None
        assert (spread.mean, spread.p50, spread.p99, spread.max) == (close(seconds),) * 4
    expected = RATE * SECONDS if concurrency is None else 5 * SECONDS / 0.55
    assert one.requests == pytest.approx(expected, rel=0.1)  # the spread of 1,000 arrivals
    assert (one.output_tokens, one.cached_tokens) == (8 * one.requests, 3 * one.requests)
    assert one.output_tokens_per_second == close(8 * one.requests / one.seconds)
    assert (one.errors, one.goodput, one.missed) == ({}, 1.0, ())
    assert one.client.saturation is None


def test_two_modes_are_both_reported() -> None:
    """Three quarters of the answers are fast."""
    endpoint = VirtualEndpoint(lambda number, now: Times(0.9 if number % 4 == 0 else 0.1))
    one = measured(endpoint)
    assert one.ttft is not None
    assert (one.ttft.p50, one.ttft.p95) == (close(0.1), close(0.9))
    assert one.ttft.mean == close(0.3)
    assert one.goodput == close(0.75)
    assert len(one.missed) == 1


def test_a_stall_is_felt_by_every_request_that_is_due_in_it() -> None:
    """Every ten seconds the endpoint does nothing for one second: what comes then waits. The times
    of the arrivals alone say what each latency has to be.
    """

    def stalls(_: int, now: float) -> Times:
        return Times(0.05 + (1.0 - now % 10 if now % 10 < 1 else 0.0))

    one = measured(VirtualEndpoint(stalls))
    arrivals = list(intended_times(Ramp(RATE, RATE), SECONDS, 1.0, Random(3)))
    truth = [stalls(0, at).ttft for at in arrivals]
    assert one.ttft is not None
    for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        assert getattr(one.ttft, name) == close(float(np.quantile(truth, quantile)))
    assert one.goodput == close(float(np.mean(np.asarray(truth) < 0.5)))


def test_what_the_endpoint_cannot_carry_is_latency_and_no_smaller_rate() -> None:
    """One request at a time for 150 ms, ten a second: a queue that grows. A client that waited
    for answers before it sent would report 150 ms.
    """
    free_at = [0.0]

    def queue(_: int, now: float) -> Times:
        free_at[0] = max(free_at[0], now) + 0.15
        return Times(free_at[0] - now, 0.001)

    one = measured(VirtualEndpoint(queue))
    assert one.offered_rate == pytest.approx(RATE, rel=0.1)
    assert one.completed_rate == close(1 / 0.15)
    assert one.ttft is not None
    assert one.ttft.max > 30
    assert one.client.saturation is None


def test_a_client_that_cannot_keep_up_says_so_and_counts_its_lateness() -> None:
    """A send costs it 150 ms, so it falls behind its own schedule; the endpoint is instant."""
    one = measured(VirtualEndpoint(lambda number, now: Times(0.01, 0.001), write_seconds=0.15))
    assert one.client.saturation is not None
    assert "late" in one.client.saturation
    assert one.ttft is not None
    assert one.ttft.p50 > 5  # from when it should have been sent


def test_a_client_without_cpu_to_spare_says_so() -> None:
    """Even if it was never late."""
    stage = run_in_virtual_time(stage_of(VirtualEndpoint(lambda number, now: Times(0.1))))
    seen = Stage("s", stage.begun, stage.ended, 0.0, stage.outcomes, [], 0.95 * SECONDS)
    assert "of a core" in (summary(seen, None).client.saturation or "")
