"""Pool gauges are computed from what is known."""

import pytest

from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.telemetry.pool_metrics import PoolCollector
from picker.types import Endpoint, EndpointMetrics


def test_unknown_load_counts_as_an_endpoint_but_not_in_averages() -> None:
    store, metrics = Datastore(), PickerMetrics()
    store.set_endpoints([Endpoint(name, "10.0.0.1", 8000) for name in "abcd"])
    store.update_metrics("default/d", EndpointMetrics(None, None, 0.9))
    store.update_metrics("default/a", EndpointMetrics(2, 1, 0.2))
    store.update_metrics("default/b", EndpointMetrics(4, 3, 0.4))
    metrics.register(PoolCollector("p", store))

    def value(series: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"llm_d_epp_{series}", labels)

    assert value("ready_endpoints", name="p") == 4
    assert value("average_queue_size", name="p") == 3
    assert value("std_dev_queue_size", name="p") == pytest.approx(2**0.5)
    assert value("average_kv_cache_utilization", name="p") == pytest.approx(0.5)
    assert value("average_running_requests", name="p") == 2
    assert value("per_endpoint_queue_size", name="p", model_server_endpoint="b") == 4
    for name in "cd":
        assert value("per_endpoint_queue_size", name="p", model_server_endpoint=name) is None


def test_an_empty_pool_has_gauges_too() -> None:
    metrics = PickerMetrics()
    metrics.register(PoolCollector("p", Datastore()))
    page = metrics.render().decode()
    assert 'llm_d_epp_ready_endpoints{name="p"} 0.0' in page
    assert 'llm_d_epp_std_dev_queue_size{name="p"} 0.0' in page


def test_endpoints_that_share_a_name_are_one_series() -> None:
    """Prometheus refuses a page on which a series appears twice."""
    store, metrics = Datastore(), PickerMetrics()
    store.set_endpoints([Endpoint("a", "10.0.0.1", 8000, ns) for ns in ("x", "y")])
    store.update_metrics("x/a", EndpointMetrics(2))
    store.update_metrics("y/a", EndpointMetrics(3))
    metrics.register(PoolCollector("p", store))
    page = metrics.render().decode()
    samples = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert 'per_endpoint_queue_size{model_server_endpoint="a",name="p"} 5.0' in page


def test_the_age_of_metrics_is_reported_even_if_they_are_stale() -> None:
    store, metrics = Datastore(), PickerMetrics()
    store.set_endpoints([Endpoint(name, "10.0.0.1", 8000) for name in "ab"])
    store.update_metrics("default/a", EndpointMetrics(updated_at_seconds=10.0))
    store.mark_stale("default/a")
    metrics.register(PoolCollector("p", store, lambda: 12.5))
    ages = [line for line in metrics.render().decode().splitlines() if "age_seconds{" in line]
    assert len(ages) == 1
    assert 'model_server_endpoint="a"' in ages[0]
    assert ages[0].endswith(" 2.5")
