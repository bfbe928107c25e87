"""Recent requests by endpoint, their hits, failures and times."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.telemetry.traffic import (
    WINDOW_SAMPLES,
    EndpointTraffic,
    PoolRecent,
    Recent,
    Served,
    ServedWindow,
    Wait,
    expected_hits,
    longest_wait,
    percentiles,
    percentiles_after,
)
from picker.types import FinishCause, Percentiles, ServedTotals
from tests.support.picker.admin_scene import decision


def test_rates_and_hits_are_those_of_the_last_ten_seconds() -> None:
    traffic = EndpointTraffic()
    for _ in range(5):
        traffic.decided(decision("a", 64, 32))
    assert traffic.sample(["default/a"], 1.0).endpoints == {"default/a": Recent(5.0, 320, 160)}
    for _ in range(WINDOW_SAMPLES - 1):
        recent = traffic.sample(["default/a"], 1.0).endpoints
    assert recent == {"default/a": Recent(0.5, 320, 160)}
    assert recent["default/a"].prefix_hit_share == 0.5
    assert traffic.sample(["default/a"], 1.0).endpoints == {"default/a": Recent()}


def test_a_prompt_without_a_look_up_does_not_count_for_hits() -> None:
    traffic = EndpointTraffic()
    traffic.decided(decision("a", 64, None))
    recent = traffic.sample(["default/a"], 1.0).endpoints["default/a"]
    assert recent == Recent(1.0)
    assert recent.prefix_hit_share is None


def test_endpoints_that_left_are_forgotten() -> None:
    traffic = EndpointTraffic()
    traffic.decided(decision("a", 64, 64))
    assert traffic.sample(["default/b"], 1.0).endpoints == {"default/b": Recent()}
    assert traffic.sample(["default/a"], 1.0).endpoints == {"default/a": Recent()}


def test_a_request_that_may_go_anywhere_counts_nowhere() -> None:
    traffic = EndpointTraffic()
    traffic.decided(replace(decision("a", 64, 64), result=None))
    assert traffic.sample(["default/a"], 1.0).endpoints["default/a"].requests_per_second == 0


def test_the_last_block_of_a_prompt_is_not_counted_beyond_its_end() -> None:
    assert expected_hits(decision("a", 20, 32), "default/a") == (20, 20)
    assert expected_hits(decision("a", 20, 16), "default/a") == (20, 16)
    assert expected_hits(decision("a", 20, 16), "default/b") == (20, 0)


def test_the_highest_expectation_of_several_indexes_counts() -> None:
    one = decision("a", 64, 16)
    assert one.attributes is not None
    more = PrefixCacheMatchInfo(2, 32, {"default/a": 1})
    one.attributes[match_info_key("other")] = more
    assert expected_hits(one, "default/a") == (64, 32)


def test_refusals_and_failures_are_rates_of_the_pool() -> None:
    traffic = EndpointTraffic()
    traffic.sample(["default/a"], 1.0)
    sent = replace(decision("a", 64, None), endpoint_key="default/a")
    for _ in range(3):
        traffic.decided(sent)
    traffic.finished(replace(sent, cause=FinishCause.COMPLETED, response_status=200))
    traffic.finished(replace(sent, cause=FinishCause.COMPLETED, response_status=503))
    traffic.finished(replace(sent, cause=FinishCause.EVICTED))
    traffic.finished(replace(sent, cause=FinishCause.REFUSED, result=None, endpoint_key=None))
    recent = traffic.sample(["default/a"], 1.0)
    assert recent.pool == PoolRecent(2.0, 1.0, 0.5)
    assert recent.endpoints["default/a"].failures_per_second == 0.5


def totals(at: float, tokens: float, *counts: float) -> ServedTotals:
    return ServedTotals(at, tokens, (0.1, 1.0), counts)


def test_percentiles_and_tokens_are_those_that_endpoints_report() -> None:
    window = ServedWindow()
    assert window.sample({"a": totals(0, 50, 7, 7, 7), "b": None}) == ({"a": Served()}, Served())
    each, whole = window.sample({"a": totals(1, 60, 17, 7, 7), "b": totals(1, 0, 0, 0, 0)})
    assert each["a"] == Served(Percentiles(0.05, 0.095, 0.099), 10.0)
    assert each["b"] == Served()
    assert whole == each["a"]
    _, whole = window.sample({"a": totals(2, 70, 17, 7, 7), "b": totals(2, 8, 0, 0, 10)})
    assert whole == Served(Percentiles(0.1, 1.0, 1.0), 18.0)  # beyond the last edge: that edge


def test_a_client_waits_in_the_picker_too() -> None:
    window = ServedWindow()
    window.sample({"a": totals(0, 0, 0, 0, 0)})
    waits = (Wait(0.0, 0.5), Wait(2.0, 0.5))
    each, whole = window.sample({"a": totals(1, 0, 100, 0, 0)}, waits)
    assert each["a"].ttft == Percentiles(0.05, 0.095, 0.099)
    assert whole.ttft is not None
    assert whole.ttft.p50 == pytest.approx(0.1)
    assert whole.ttft.p95 == pytest.approx(2.09)
    assert whole.ttft.p99 == pytest.approx(2.098)


def test_waits_are_those_of_the_last_ten_seconds() -> None:
    traffic = EndpointTraffic()
    for seconds in (0.0004, 0.93, 0.95, 7.0):
        traffic.decided(replace(decision("a", 64, None), decision_seconds=seconds))
    waits = traffic.sample([], 1.0).waits
    assert [(round(one.seconds, 3), one.share) for one in waits] == [
        *((0.0, 0.25), (0.94, 0.5), (7.0, 0.25))
    ]
    assert [longest_wait(waits, share) for share in (0.25, 0.95)] == [0.0, 7.0]
    for _ in range(WINDOW_SAMPLES - 1):
        assert traffic.sample([], 1.0).waits == waits
    assert traffic.sample([], 1.0).waits == (Wait(0.0, 1.0),)


@pytest.mark.parametrize(
    ("mean", "often"), [(0.9, 0.9), (0.02, 0.5), (4.0, 0.1)], ids=["full", "busy", "rare"]
)
def test_the_sum_of_both_waits_is_what_a_client_would_measure(mean: float, often: float) -> None:
    rng, traffic, seen = Random(7), EndpointTraffic(), list[float]()
    edges = [0.01 * 1.3**number for number in range(16)]
    counts = dict.fromkeys([*edges, math.inf], 0.0)
    for _ in range(4000):
        wait = rng.expovariate(1 / mean) if rng.random() < often else 0.0003
        there = rng.lognormvariate(math.log(0.04), 0.6)
        traffic.decided(replace(decision("a", 64, None), decision_seconds=wait))
        counts[next(edge for edge in counts if there <= edge)] += 1
        seen.append(wait + there)
    found = percentiles_after(traffic.sample([], 1.0).waits, counts)
    assert found is not None
    seen.sort()
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert value == pytest.approx(seen[int(share * len(seen))], rel=0.1)


def test_an_endpoint_that_restarted_counts_anew() -> None:
    window = ServedWindow()
    window.sample({"a": totals(0, 50, 7, 7, 7)})
    assert window.sample({"a": totals(1, 3, 1, 0, 0)}) == ({"a": Served()}, Served())
    each, _ = window.sample({"a": totals(2, 5, 1, 1, 0)})
    assert each["a"].tokens_per_second == 2.0


def test_old_samples_are_dropped() -> None:
    window = ServedWindow()
    window.sample({"a": totals(0, 0, 0, 0, 0)})
    for second in range(1, WINDOW_SAMPLES + 2):
        each, _ = window.sample({"a": totals(second, 9, 3, 0, 0)})
    assert each["a"] == Served(None, 0.0)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8).filter(any))
def test_percentiles_are_within_the_buckets_that_they_fall_into(counts: list[int]) -> None:
    edges = [*map(float, range(1, len(counts))), math.inf]
    found = percentiles(dict(zip(edges, map(float, counts), strict=True)))
    assert found is not None
    times = [at for at, count in enumerate(counts) for _ in range(count)]
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        bucket = times[max(0, math.ceil(share * len(times) - 1e-9) - 1)]
        assert min(bucket, len(counts) - 1) <= value + 1e-9
        assert value <= min(bucket + 1, len(counts) - 1) + 1e-9
    assert percentiles({1.0: 0.0, math.inf: 0.0}) is None


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_percentiles_after_waits_are_in_order_and_in_range(
    counts: list[int], shares: list[int]
) -> None:
    edges = [*map(float, range(1, len(counts))), math.inf]
    buckets = dict(zip(edges, map(float, counts), strict=True))
    at_once = percentiles_after((Wait(0.0, 1.0),), buckets)
    alone = percentiles(buckets)
    assert at_once is not None
    assert alone is not None
    for one, other in zip(at_once.__struct_fields__, alone.__struct_fields__, strict=True):
        assert getattr(at_once, one) == pytest.approx(getattr(alone, other))
    waits = [Wait(float(at), one / sum(shares)) for at, one in enumerate(shares)]
    found = percentiles_after(waits, buckets)
    assert found is not None
    assert all(a <= b + 1e-9 for a, b in pairwise((found.p50, found.p95, found.p99)))
    assert alone.p50 <= found.p50 + 1e-6
    assert found.p99 <= alone.p99 + waits[-1].seconds + 1e-6
    assert percentiles_after(waits, {1.0: 0.0, math.inf: 0.0}) is None
