"""Pool gauges are computed from what is known."""

from __future__ import annotations

import pytest

from picker.admin.pool_metrics import PoolCollector
from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.metrics import PickerMetrics
from picker.types import Endpoint, EndpointMetrics


def test_unknown_load_counts_as_an_endpoint_but_not_in_averages() -> None:
    """Three endpoints, two with metrics."""
    store, inflight, metrics = Datastore(), InflightLoad(), PickerMetrics()
    store.set_endpoints([Endpoint(name, "10.0.0.1", 8000) for name in "abc"])
    store.update_metrics("default/a", EndpointMetrics(2, 1, 0.2))
    store.update_metrics("default/b", EndpointMetrics(4, 3, 0.4))
    inflight.acquire("default/c")
    metrics.register(PoolCollector("p", store, inflight))

    def value(series: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"llm_d_epp_{series}", labels)

    assert value("ready_endpoints", name="p") == 3
    assert value("average_queue_size", name="p") == 3
    assert value("std_dev_queue_size", name="p") == pytest.approx(2**0.5)
    assert value("average_kv_cache_utilization", name="p") == pytest.approx(0.3)
    assert value("average_running_requests", name="p") == 2
    assert value("per_endpoint_queue_size", name="p", model_server_endpoint="b") == 4
    assert value("per_endpoint_queue_size", name="p", model_server_endpoint="c") is None
    labels = {"namespace": "default", "producer_name": "", "fairness_id": "", "priority": ""}
    assert value("inflight_requests", endpoint_name="c", **labels) == 1


def test_an_empty_pool_has_gauges_too() -> None:
    """Zero, not absent."""
    metrics = PickerMetrics()
    metrics.register(PoolCollector("p", Datastore(), InflightLoad()))
    page = metrics.render().decode()
    assert 'llm_d_epp_ready_endpoints{name="p"} 0.0' in page
    assert 'llm_d_epp_std_dev_queue_size{name="p"} 0.0' in page
