"""In virtual time, the bench reports an endpoint's known latency, or says that it cannot."""

from dataclasses import replace

import numpy as np
import pytest

from fleet.bench.client import Record
from fleet.bench.driver import ClientPulse
from fleet.bench.report import lines_of
from fleet.bench.slo import Slo, read_bounds
from fleet.bench.summary import Observed, Summary, stage_of, summary
from fleet.sim.virtual_time import run_in_virtual_time
from tests.support.fleet.virtual_endpoint import Times, VirtualEndpoint, bench_stage

RATE = 10.0
FLAGS = ("--seed", "3", "--duration", "100", "--input-tokens", "1", "--output-tokens", "8")
SLO = Slo(read_bounds("ttft<0.5s,e2e_p95<1s"))
one_or_more = pytest.mark.parametrize("processes", [1, 2])


def measured(
    endpoint: VirtualEndpoint, load: tuple[str, ...] = ("--rate", "10"), processes: int = 1
) -> Summary:
    run = bench_stage(endpoint, *FLAGS, *load, processes=processes)
    return summary(run_in_virtual_time(run)[1], SLO)


def close(value: float) -> object:
    return pytest.approx(value, rel=0.02)


@one_or_more
@pytest.mark.parametrize("load", [("--rate", "10"), ("--concurrency", "5")])
def test_a_constant_latency_is_reported(load: tuple[str, ...], processes: int) -> None:
    one = measured(VirtualEndpoint(lambda number, now: Times(0.2, 0.05)), load, processes)
    for spread, seconds in ((one.ttft, 0.2), (one.itl, 0.05), (one.e2e, 0.2 + 7 * 0.05)):
        assert spread is not None
        assert (spread.mean, spread.p50, spread.p99, spread.max) == (close(seconds),) * 4
    expected = 100 * RATE if load[0] == "--rate" else 100 * 5 / 0.55
    assert one.requests == pytest.approx(expected, rel=0.1)  # the spread of 1,000 arrivals
    assert (one.output_tokens, one.cached_tokens) == (8 * one.requests, 3 * one.requests)
    assert one.output_tokens_per_second == close(8 * one.requests / one.seconds)
    assert (one.errors, one.goodput, one.missed) == ({}, 1.0, ())
    assert one.client.saturation is None


def test_a_stage_of_nothing_is_no_table() -> None:
    endpoint = VirtualEndpoint(lambda number, now: Times(0.1))
    one = measured(endpoint, ("--rate", "10", "--warmup", "90", "--requests", "3"))
    [line] = lines_of(one, SLO)
    assert line == "s: no request was counted: none was due after the warm-up"


def test_prompt_tokens_without_usage_are_unknown() -> None:
    endpoint = VirtualEndpoint(lambda number, now: Times(0.1))
    one = replace(measured(endpoint), prompt_tokens=0)
    assert "prompt tokens unknown (no usage in the answers)" in "".join(lines_of(one, SLO))


@one_or_more
def test_two_modes_are_both_reported(processes: int) -> None:
    endpoint = VirtualEndpoint(lambda number, now: Times(0.9 if number % 4 == 0 else 0.1))
    one = measured(endpoint, processes=processes)
    assert one.ttft is not None
    assert (one.ttft.p50, one.ttft.p95) == (close(0.1), close(0.9))
    assert one.ttft.mean == close(0.3)
    assert one.goodput == close(0.75)
    assert len(one.missed) == 1


@one_or_more
def test_a_stall_counts_in_every_request_that_is_due_in_it(processes: int) -> None:
    """The endpoint stops for a second in every ten: the arrival times determine each latency."""

    def stalls(_: int, now: float) -> Times:
        return Times(0.05 + (1.0 - now % 10 if now % 10 < 1 else 0.0))

    endpoint = VirtualEndpoint(stalls)
    one = measured(endpoint, processes=processes)
    truth = [stalls(0, at).ttft for at in endpoint.came_at]
    assert one.ttft is not None
    for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        assert getattr(one.ttft, name) == close(float(np.quantile(truth, quantile)))
    assert one.goodput == close(float(np.mean(np.asarray(truth) < 0.5)))


def test_overload_shows_as_latency_and_not_as_a_smaller_rate() -> None:
    """The endpoint serves one request in 150 ms, and ten a second arrive: a queue that grows. A
    client that waited for answers before it sent would report 150 ms.
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


@one_or_more
def test_a_client_that_cannot_keep_up_says_so_and_counts_its_lateness(processes: int) -> None:
    """A send costs the client 150 ms, so it falls behind its schedule; the endpoint is instant."""
    endpoint = VirtualEndpoint(lambda number, now: Times(0.01, 0.001), write_seconds=0.15)
    one = measured(endpoint, processes=processes)
    text = "\n".join(lines_of(one, None))
    assert "client was saturated" in text
    assert "late" in text
    assert f"--processes {processes + 1} " in text
    assert one.ttft is not None
    assert one.ttft.p50 > 5  # from its intended time


def test_one_process_without_cpu_to_spare_or_late_is_enough_to_say_so() -> None:
    """The observations of the three others do not hide it."""
    good = Observed(
        [Record(0.0, sent=0.0) for _ in range(1000)], [ClientPulse(1.0, 0.0, 2)] * 1000, 0, 0, 1.0
    )
    for bad, word in (
        (replace(good, cpu_seconds=95.0), "CPU"),
        (replace(good, outcomes=[*good.outcomes[:-20], *[Record(0.0, sent=0.1)] * 20]), "sends"),
        (replace(good, pulses=[*good.pulses[:-20], *[ClientPulse(1.0, 0.1, 2)] * 20]), "timers"),
    ):
        load = stage_of("s", 0.0, 100.0, 0.0, [good, bad, good, good]).client
        assert load is not None
        assert "one process's" in (load.saturation or "")
        assert word in (load.saturation or "")
