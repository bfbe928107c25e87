"""The series of flow control have the reference's names and current values."""

import asyncio

import pytest

from picker.framework.disaggregation import ROLE_LABEL
from picker.metrics.label_caps import OVERFLOW
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Candidate
from tests.support.picker.flow_scene import (
    Pool,
    Scene,
    Slots,
    band,
    inference_request,
    with_settings,
)

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


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
async def test_endpoints_without_fresh_metrics_are_counted() -> None:
    class Stale(Slots):
        def stale(self, candidates: list[Candidate], now_seconds: float) -> int:
            return len(candidates) // 2

    scene = Scene(Pool(6), detector=Stale(), detector_name="mine")
    assert scene.gauge("stale_endpoints", detector="mine") == 3
    assert scene.gate.queues().stale_endpoints == 3
    scene.gate.use(with_settings(scene.settings, detector=Slots()))
    assert scene.gauge("stale_endpoints", detector="mine") is None
