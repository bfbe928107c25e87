"""utilization-filter: endpoints that are not too busy, as far as known."""

from functools import partial
from typing import Any

import pytest

from picker.framework.attributes import Attributes, EndpointLoad, InFlightLoad, inflight_load_key
from picker.types import EndpointMetrics
from tests.support.picker.plugin_scenes import configured, passed, placed

make = partial(configured, "utilization-filter")


def limits(fallback: bool = False, **limits: float) -> dict[str, Any]:
    conditions = [
        {"metric": metric.replace("_", "-"), "maxValue": value} for metric, value in limits.items()
    ]
    return {"conditions": conditions, "fallbackOnEmpty": fallback}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"waiting_queue": 5}, ["idle", "full-cache"]),
        ({"waiting_queue": 6}, ["idle", "queue", "full-cache"]),
        ({"running_requests": 9}, ["idle", "queue"]),
        ({"kv_cache_utilization": 0.9}, ["idle", "queue"]),
        ({"kv_cache_utilization": 1}, ["idle", "queue", "full-cache"]),
        ({"waiting_queue": 5, "kv_cache_utilization": 0.9}, ["idle"]),
        ({"waiting_queue": 0, "running_requests": 0, "kv_cache_utilization": 0}, ["idle"]),
    ],
)
def test_every_metric_has_to_be_within_its_limit(
    limit: dict[str, float], expected: list[str]
) -> None:
    candidates = [
        placed("idle"),
        placed("queue", metrics=EndpointMetrics(6, 9, 0.5)),
        placed("full-cache", metrics=EndpointMetrics(0, 10, 0.95)),
    ]
    assert passed(make(limits(**limit)), candidates) == expected


def test_own_requests_count_before_a_scrape_sees_them() -> None:
    burst = placed("burst", inflight_requests=4)
    seen = placed("seen", inflight_requests=4, metrics=EndpointMetrics(0, 4))
    assert passed(make(limits(waiting_queue=3)), [burst, seen]) == ["seen"]
    waiting = placed("waiting", inflight_requests=4, metrics=EndpointMetrics(4, 0))
    assert passed(make(limits(running_requests=3)), [burst, waiting]) == ["waiting"]


@pytest.mark.parametrize("metric", ["active-requests", "waiting-queue"])
def test_two_limits_of_one_metric_both_hold(metric: str) -> None:
    candidates = [placed("calm", inflight_requests=1), placed("busy", inflight_requests=5)]
    conditions = [{"metric": metric, "maxValue": limit} for limit in (2, 9)]
    for written in (conditions, conditions[::-1]):
        assert passed(make({"conditions": written}), candidates) == ["calm"]


def test_active_requests_are_the_greater_of_both_counts() -> None:
    """The in-flight finding may include requests of other pickers."""
    plugin = make(limits(active_requests=2))
    candidates = [
        placed("own", inflight_requests=3),
        placed("found"),
        placed("calm", inflight_requests=2, metrics=None),
        placed("queued", metrics=EndpointMetrics(99, 99, 1.0)),
    ]
    assert passed(plugin, candidates) == ["found", "calm", "queued"]
    attributes = Attributes()
    loads = {"default/found": EndpointLoad(3), "default/calm": EndpointLoad(1)}
    attributes[inflight_load_key()] = InFlightLoad(loads, {})
    assert passed(plugin, candidates, attributes) == ["calm", "queued"]
    assert plugin.consumes == (inflight_load_key(),)
    assert make(limits(waiting_queue=1)).consumes == ()
    named = {**limits(active_requests=1), "inFlightLoadProducerName": "mine"}
    assert make(named).consumes == (inflight_load_key("mine"),)


def test_unknown_load_passes_only_when_no_known_load_does() -> None:
    plugin = make(limits(waiting_queue=5, active_requests=2))
    calm, unknown = placed("calm"), placed("unknown", metrics=None)
    full = placed("full", metrics=EndpointMetrics(9))
    busy = placed("busy", metrics=None, inflight_requests=3)
    assert passed(plugin, [unknown, calm, full, busy]) == ["calm"]
    assert passed(plugin, [full, unknown, busy]) == ["unknown"]
    assert passed(plugin, [unknown]) == ["unknown"]
    assert passed(plugin, [full, busy]) == []


@pytest.mark.parametrize(
    ("seen", "passes"),
    [
        (EndpointMetrics(4, 1, None), True),
        (EndpointMetrics(60, 1, None), False),
        (EndpointMetrics(None, 1, 0.5), True),
        (EndpointMetrics(None, 1, 0.95), False),
        (EndpointMetrics(None, 1, None), False),
    ],
)
def test_a_missing_signal_passes_and_the_others_decide(seen: EndpointMetrics, passes: bool) -> None:
    plugin = make(limits(waiting_queue=5, kv_cache_utilization=0.9))
    candidates = [placed("calm"), placed("gap", metrics=seen)]
    assert passed(plugin, candidates) == (["calm", "gap"] if passes else ["calm"])
    full = placed("full", metrics=EndpointMetrics(9))
    is_unknown = seen.waiting_requests is None and seen.kv_cache_usage is None
    assert passed(plugin, [full, candidates[1]]) == (["gap"] if passes or is_unknown else [])


def test_all_pass_instead_of_none_with_the_fallback() -> None:
    full = [placed(name, metrics=EndpointMetrics(9)) for name in "ab"]
    assert passed(make(limits(waiting_queue=5)), full) == []
    assert passed(make(limits(True, waiting_queue=5)), full) == ["a", "b"]
