"""The numbers of flow control: the load of the pool, the drain rate, and the series."""

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.load_estimate import LARGE_POOL, LoadEstimate
from picker.flowcontrol.outcomes import UNKNOWN_RETRY_SECONDS, DrainRate
from picker.flowcontrol.saturation import NOTHING_LET_IN, LetIn, pool_load, spread
from picker.framework.attributes import EndpointLoad
from picker.framework.disaggregation import ROLE_LABEL
from picker.metrics.label_caps import OVERFLOW
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Candidate, EndpointMetrics
from tests.depth import examples
from tests.support.picker.flow_scene import (
    Pool,
    Scene,
    Slots,
    band,
    endpoint,
    inference_request,
    with_settings,
)

pytestmark = pytest.mark.looptime


class Steps(Slots):
    """Counts only requests beyond two per endpoint, like a detector that reads queues."""

    def saturation(self, candidates: Any, attributes: Any, now_seconds: float) -> float:
        self.asked += 1
        waiting = sum(max(0, one.inflight_requests - 2) for one in candidates)
        return waiting / 4 / len(candidates)


@examples(30)
@given(
    st.integers(0, 9),
    st.sampled_from([1, 5, LARGE_POOL, 200]),
    st.booleans(),
    st.sampled_from([Slots, Steps]),
)
def test_an_estimate_agrees_with_a_scan(
    seed: int, size: int, has_roles: bool, kind: type[Slots]
) -> None:
    rng, pool = Random(seed), Pool(size, {ROLE_LABEL: "both"} if has_roles else None)
    estimate, exact = LoadEstimate(pool), LoadEstimate(pool)
    detector = kind(4)
    estimate.use(detector)
    pool.under_way.update({one.key: rng.randrange(4) for one in pool.endpoints})
    let_in, under_way = 0, list(pool.under_way.elements())
    for _ in range(400):
        step = rng.random()
        if step < 0.5:
            let_in += 1
            estimate.entered(5)
        elif step < 0.75 and let_in:
            let_in -= 1
            key = min(pool.endpoints, key=lambda one: pool.under_way[one.key]).key
            under_way.append(key)
            pool.under_way[key] += 1
            estimate.left(5)
        elif under_way:
            pool.under_way[under_way.pop(rng.randrange(len(under_way)))] -= 1
            estimate.ended(5, has_left=True)
        exact.use(kind(4))
        exact.let_in = estimate.let_in
        exact.pool_changed()
        found, expected = estimate.at(0.0), exact.at(0.0)
        weight = 1 / 4 / size
        is_exact = size < LARGE_POOL or kind is Slots  # which grows evenly
        allowed = 0.0 if is_exact else (size / 16 + 1) * weight
        assert found.effective == pytest.approx(expected.effective, abs=allowed + 1e-9)
        assert found.stages.keys() == expected.stages.keys()
    assert estimate.let_in.requests == let_in
    estimate.check_integrity()
    if size >= LARGE_POOL:
        looks = 400 / (size / 16) + 2
        assert detector.asked <= 2 * looks * (2 if has_roles else 1)


def test_an_unchanged_pool_is_not_scanned_again() -> None:
    detector, estimate = Slots(), LoadEstimate(Pool(3))
    estimate.use(detector)
    for _ in range(5):
        estimate.at(10.0)
    assert detector.asked == 1
    estimate.at(10.1)
    assert detector.asked == 2


def test_changes_of_a_large_pool_are_batched() -> None:
    for size, at_once in ((3, True), (1000, False)):
        pool, detector = Pool(size), Slots()
        estimate = LoadEstimate(pool)
        estimate.use(detector)
        estimate.at(1.0)
        pool.under_way.update(one.key for one in pool.endpoints)
        estimate.pool_changed()
        assert (estimate.at(1.001).effective == 1.0) is at_once
        assert estimate.at(1.021).effective == 1.0


def pool(*roles: tuple[str | None, int]) -> list[Candidate]:
    return [
        Candidate(endpoint(i, {} if role is None else {ROLE_LABEL: role}), None, load)
        for i, (role, load) in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("candidates", "effective", "stages"),
    [
        (pool((None, 1), (None, 2)), 1.5, {"decode": 1.5}),
        (pool(("prefill", 3), ("decode", 1)), 3.0, {"prefill": 3.0, "decode": 1.0}),
        (pool(("encode-prefill", 1), (None, 2)), 2.0, {"prefill": 1.0, "decode": 2.0}),
        (pool(("both", 4), ("prefill", 0)), 4.0, {"prefill": 2.0, "decode": 4.0}),
        (pool(("encode-prefill-decode", 2)), 2.0, {"prefill": 2.0, "decode": 2.0}),
        (pool(("prefill-decode", 1), ("encode", 9)), 1.0, {"prefill": 1.0, "decode": 1.0}),
        (pool(("encode", 2), ("strange", 4)), 3.0, {}),
        ([], 1.0, {}),
    ],
)
def test_the_load_of_a_stage_is_that_of_its_endpoints(
    candidates: list[Candidate], effective: float, stages: dict[str, float]
) -> None:
    load = pool_load(Slots(1), candidates, NOTHING_LET_IN, 0.0)
    assert (load.effective, dict(load.stages)) == (effective, stages)
    assert load.num_endpoints == len(candidates)


def test_requests_on_their_way_count_in_every_stage() -> None:
    candidates = pool(("prefill", 0), ("decode", 0), ("decode", 0))
    load = pool_load(Slots(1), candidates, LetIn(2, 0), 0.0)
    assert load.stages == {"prefill": 2.0, "decode": 1.0}


@examples(200)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=8), st.integers(0, 40))
def test_admitted_requests_spread_as_if_placed_one_by_one(loads: list[int], count: int) -> None:
    candidates = pool(*((None, load) for load in loads))
    one_by_one = list(loads)
    for _ in range(count):
        one_by_one[one_by_one.index(min(one_by_one))] += 1
    loaded, added = spread(candidates, LetIn(count, 10 * count))
    assert sorted(one.inflight_requests for one in loaded) == sorted(one_by_one)
    assert [one.endpoint for one in loaded] == [one.endpoint for one in candidates]
    gains = {
        one.key: one.inflight_requests - before
        for one, before in zip(loaded, loads, strict=True)
        if one.inflight_requests != before
    }
    assert added == {key: EndpointLoad(gain, 10 * gain) for key, gain in gains.items()}


def test_admitted_requests_avoid_an_endpoint_that_reports_load() -> None:
    busy = Candidate(endpoint(0), EndpointMetrics(waiting_requests=5, running_requests=2), 0)
    idle = Candidate(endpoint(1), EndpointMetrics(), 3)
    loaded, _ = spread([busy, idle], LetIn(4, 0))
    assert [one.inflight_requests for one in loaded] == [0, 7]


async def test_a_change_of_a_large_pool_survives_other_events() -> None:
    """A pass with the old estimate, before the next scan, must not discard the change."""
    scene = Scene(Pool(100))
    running = [await scene.arrive() for _ in range(100)]
    waiting = [await scene.arrive() for _ in range(10)]
    scene.settings.detector.slots = 2  # type: ignore[attr-defined]
    scene.gate.pool_changed()
    assert waiting[0].waits
    await scene.done(running[0])
    assert [one.ticket is not None for one in waiting] == [True] + [False] * 9
    await asyncio.sleep(0.004)
    assert all(one.ticket is not None for one in waiting)


async def test_a_large_pool_is_not_scanned_for_each_request() -> None:
    detector = Slots(10)
    scene = Scene(Pool(1000), detector=detector)
    tickets = 0
    while scene.gate.is_open:
        ticket = await scene.gate.admit(inference_request(), None)
        key = f"default/e{tickets % 1000}"
        scene.pool.under_way[key] += 1
        ticket.left(key)
        tickets += 1
    assert tickets == pytest.approx(10_000, abs=1000 / 16)
    assert detector.asked < 1000


@pytest.mark.parametrize("seconds", [2, 20, 200])
@pytest.mark.parametrize("rate", [0.5, 10, 200])
def test_a_steady_stream_has_its_rate_from_the_beginning(rate: float, seconds: int) -> None:
    """The short history at the start causes no bias."""
    drained = DrainRate()
    for step in range(int(rate * seconds)):
        drained.count(100 + step / rate)
    assert drained.per_second(100 + seconds) == pytest.approx(rate, rel=0.15, abs=0.3)


def test_a_rate_decays_without_events() -> None:
    drained = DrainRate()
    for step in range(1000):
        drained.count(step / 10)
    assert drained.per_second(100 + 6.93) == pytest.approx(5, rel=0.05)
    assert drained.retry_after_seconds(1000, 300) == UNKNOWN_RETRY_SECONDS


def test_a_retry_after_is_whole_seconds_within_a_minute() -> None:
    drained = DrainRate()
    assert drained.retry_after_seconds(10**9, 0.0) == UNKNOWN_RETRY_SECONDS
    for step in range(1000):
        drained.count(step / 10)
    found = [drained.retry_after_seconds(ahead, 100.0) for ahead in (0, 1, 95, 105, 10**9)]
    assert found == [1, 1, 10, 11, 60]


POOL = "inference_pool"
WAITING = ("fairness_id", "priority", POOL, "model_name", "target_model_name")
ENDED = ("fairness_id", "priority", "outcome", POOL, "model_name", "target_model_name")
# (name, labels, whether the deprecated name exists too); source: the reference's table.
SERIES = [
    ("request_queue_duration_seconds", ENDED, True),
    ("dispatch_cycle_duration_seconds", (), True),
    ("request_enqueue_duration_seconds", ("fairness_id", "priority", "outcome"), True),
    ("queue_size", WAITING, True),
    ("queue_bytes", WAITING, True),
    ("pool_saturation", (POOL, "stage"), True),
    ("stale_endpoints", ("detector",), False),
    ("capacity_utilization_requests", ("priority", POOL), False),
    ("capacity_utilization_bytes", ("priority", POOL), False),
    ("global_capacity_utilization_requests", (POOL,), False),
    ("global_capacity_utilization_bytes", (POOL,), False),
    ("requests_total", ("outcome", "priority", POOL), False),
    ("revocations_issued_total", ("priority", POOL), False),
    ("revocations_total", ("outcome", POOL), False),
    ("reclaim_target", (POOL,), False),
    ("pending_reclaim", (POOL,), False),
    ("revocation_confirmation_seconds", (POOL,), False),
]


@pytest.mark.parametrize(("name", "labels", "has_twin"), SERIES)
def test_names_and_labels_are_the_references(
    name: str, labels: tuple[str, ...], has_twin: bool
) -> None:
    """Dashboards with either name find their series."""
    declared = getattr(PickerMetrics().flow, name).declaration
    assert declared.name == f"llm_d_epp_flow_control_{name}"
    assert declared.labels == labels
    twins = [(twin.name, twin.labels) for twin in declared.twins]
    expected = (f"inference_extension_flow_control_{name}", labels)
    assert twins == ([expected] if has_twin else [])


async def test_gauges_have_current_values() -> None:
    scene = Scene(Pool(2), max_requests=4, max_bytes=1000, default_band=band(max_requests=10))
    where = {POOL: "pool"}
    saturation = {**where, "stage": "effective"}
    assert scene.gauge("pool_saturation", **saturation) == 0
    clients = [await scene.arrive() for _ in range(5)]
    assert scene.gauge("pool_saturation", **saturation) == 1
    assert scene.gauge("pool_saturation", **where, stage="decode") == 1
    assert scene.gauge("pool_saturation", **where, stage="prefill") is None
    assert scene.gauge("capacity_utilization_requests", priority="0", **where) == 0.3
    assert scene.gauge("global_capacity_utilization_requests", **where) == 0.75
    assert scene.gauge("global_capacity_utilization_bytes", **where) == 0.3
    labels = dict(zip(WAITING, ("t", "0", "pool", "m", "m"), strict=True))
    assert scene.gauge("queue_size", **labels) == 3
    assert scene.gauge("queue_bytes", **labels) == 300
    scene.pool.under_way.clear()
    await asyncio.sleep(0.3)  # without an event
    assert scene.gauge("queue_size", **labels) == 1
    assert sum(client.ticket is not None for client in clients) == 4


async def test_gauges_without_a_value_are_absent() -> None:
    scene = Scene(Pool(1, {ROLE_LABEL: "both"}), bands={3: band()}, max_requests=1)
    where = {POOL: "pool"}
    await scene.arrive()
    assert scene.gauge("pool_saturation", **where, stage="prefill") == 1
    assert scene.gauge("capacity_utilization_bytes", priority="3", **where) == 0
    assert scene.gauge("global_capacity_utilization_bytes", **where) is None
    scene.gate.use(with_settings(scene.settings, bands={}, max_requests=None))
    await scene.resize(1)
    await scene.arrive()
    assert scene.gauge("capacity_utilization_bytes", priority="3", **where) is None
    assert scene.gauge("global_capacity_utilization_requests", **where) is None
    assert scene.gauge("pool_saturation", **where, stage="prefill") is None
    scene.gate.use(None)
    assert scene.gauge("pool_saturation", **where, stage="effective") is None
    assert scene.gauge("capacity_utilization_bytes", priority="0", **where) is None


async def test_series_of_an_idle_tenant_are_removed() -> None:
    scene = Scene(Pool(2))
    for name in ("gone", "stays"):
        await scene.done(await scene.arrive(fairness_id=name))
    await asyncio.sleep(200)
    await scene.done(await scene.arrive(fairness_id="stays"))
    assert 'fairness_id="gone"' in scene.metrics.render().decode()
    await asyncio.sleep(101)
    page = scene.metrics.render().decode()
    assert 'fairness_id="gone"' not in page
    assert 'fairness_id="stays"' in page
    total = scene.gauge("requests_total", outcome="Dispatched", priority="0", inference_pool="pool")
    assert total == 3


async def test_excess_tenants_share_one_series() -> None:
    scene = Scene(Pool(5000))
    for index in range(1500):
        await scene.gate.admit(inference_request(fairness_id=f"tenant-{index}"), None)
    durations = scene.metrics.flow.request_queue_duration_seconds
    tenants = {labels[0]: sum(counts) for labels, (counts, _) in durations.numbers()}
    assert tenants["tenant-0"] == 1
    assert tenants[OVERFLOW] == 1500 - (len(tenants) - 1)
    assert len(scene.metrics.render()) < 1_500_000
    await asyncio.sleep(301)
    assert f'fairness_id="{OVERFLOW}"' in scene.metrics.render().decode()


async def test_endpoints_without_fresh_metrics_are_counted() -> None:
    class Stale(Slots):
        def stale(self, candidates: list[Candidate], now_seconds: float) -> int:
            return len(candidates) // 2

    scene = Scene(Pool(6), detector=Stale(), detector_name="mine")
    assert scene.gauge("stale_endpoints", detector="mine") == 3
    assert scene.gate.queues().stale_endpoints == 3
    scene.gate.use(with_settings(scene.settings, detector=Slots()))
    assert scene.gauge("stale_endpoints", detector="mine") is None
