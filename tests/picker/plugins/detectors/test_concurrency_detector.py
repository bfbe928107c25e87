"""concurrency-detector: own counts against limits, inside and outside of decisions."""

import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from picker.config.build import build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.framework.attributes import (
    LET_IN_LOAD_KEY,
    Attributes,
    EndpointLoad,
    InFlightLoad,
    inflight_load_key,
)
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.detectors.concurrency_detector import (
    PLUGIN,
    ConcurrencyDetector,
    ConcurrencyDetectorParameters,
)
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.types import Endpoint, FinishCause, RawRequest, ResponseHead
from tests.support.picker.plugin_scenes import candidate, request_for

NAME = "inflight-load-producer"


class _Counter:
    def __init__(self, loads: Mapping[str, EndpointLoad]) -> None:
        self.loads = loads


def _detector(loads: Mapping[str, tuple[int, int]], **parameters: Any) -> ConcurrencyDetector:
    detector = ConcurrencyDetector(ConcurrencyDetectorParameters(**parameters))
    counted = {f"default/{key}": EndpointLoad(*load) for key, load in loads.items()}
    detector.connect({NAME: _Counter(counted)})
    return detector


LIMITS: dict[str, Any] = {"max_concurrency": 10, "max_token_concurrency": 1000}


@pytest.mark.parametrize(
    ("mode", "loads", "expected"),
    [
        ("requests", {"a": (5, 0), "b": (10, 0)}, 0.75),
        ("requests", {"a": (30, 0)}, 1.5),
        ("requests", {}, 0.0),
        ("tokens", {"a": (99, 500), "b": (0, 100)}, 0.3),
        ("hybrid", {"a": (5, 900), "b": (8, 100)}, 0.85),
    ],
)
def test_saturation_is_the_share_of_the_limits_in_use(
    mode: str, loads: dict[str, tuple[int, int]], expected: float
) -> None:
    detector = _detector(loads, concurrency_mode=mode, **LIMITS)
    candidates = [candidate("a"), candidate("b")]
    assert detector.saturation(candidates, Attributes(), 0.0) == pytest.approx(expected)
    assert detector.saturation([], Attributes(), 0.0) == 1.0


@pytest.mark.parametrize(
    ("mode", "loads", "expected"),
    [
        ("requests", {"a": (5, 0)}, 0.7),
        ("requests", {}, 0.2),
        ("tokens", {"a": (5, 500)}, 0.9),
        ("tokens", {}, 0.4),
    ],
)
def test_dispatched_requests_count_before_they_leave(
    mode: str, loads: dict[str, tuple[int, int]], expected: float
) -> None:
    """The candidate's own count has the requests; only flow control knows their tokens."""
    attributes = Attributes({LET_IN_LOAD_KEY: {"default/a": EndpointLoad(2, 400)}})
    detector = _detector(loads, concurrency_mode=mode, **LIMITS)
    known = loads.get("a", (0, 0))[0]
    found = detector.saturation([candidate("a", inflight=known + 2)], attributes, 0.0)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"), [("requests", "abd"), ("tokens", "abc"), ("hybrid", "ab")]
)
def test_the_filter_passes_endpoints_below_their_limit(mode: str, expected: str) -> None:
    loads = {"b": (11, 1249), "c": (12, 0), "d": (0, 1250)}
    detector = _detector(loads, concurrency_mode=mode, headroom=0.25, **LIMITS)
    candidates = [candidate(name) for name in "abcd"]
    passed = detector.filter(request_for(), candidates, Attributes(), Random(0))
    assert "".join(one.endpoint.name for one in passed) == expected


def test_no_endpoint_of_a_full_pool_passes() -> None:
    detector = _detector({"a": (10, 0)}, **LIMITS)
    candidates = [candidate("a"), candidate("b", inflight=10)]
    assert list(detector.filter(request_for(), candidates, Attributes(), Random(0))) == []
    assert detector.saturation(candidates, Attributes(), 0.0) == 1.0


def test_an_unconnected_detector_uses_the_finding() -> None:
    parameters = ConcurrencyDetectorParameters(in_flight_load_producer_name="mine", **LIMITS)
    detector = ConcurrencyDetector(parameters)
    attributes = Attributes()
    attributes[inflight_load_key("mine")] = InFlightLoad({"default/a": EndpointLoad(5, 0)}, {})
    assert detector.saturation([candidate("a")], attributes, 0.0) == 0.5
    assert detector.saturation([candidate("a")], Attributes(), 0.0) == 0.0


def test_the_detector_names_its_producer() -> None:
    plugin = PLUGIN.make("d", ConcurrencyDetectorParameters())
    assert plugin.consumes == (inflight_load_key(NAME),)
    assert plugin.references == {"inFlightLoadProducerName": NAME}
    with pytest.raises(ValueError, match="does not count"):
        plugin.connect({NAME: object()})


CONFIG = b"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: active-request-scorer}
- {type: concurrency-detector, parameters: {maxTokenConcurrency: 100, concurrencyMode: tokens}}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
"""


async def test_saturation_follows_tokens_from_departure_to_first_piece() -> None:
    loaded = load_config(CONFIG, "test")
    assembly = build(loaded, builtin_plugins(), PickerMetrics(), time.monotonic)
    datastore = Datastore()
    datastore.set_endpoints([Endpoint("a", "10.0.0.1", 1), Endpoint("b", "10.0.0.2", 1)])
    counts = InflightLoad()
    director = Director(assembly.pipeline, RequestContext(datastore, counts, Random(3)))
    detector = assembly.pipeline.saturation

    def saturation() -> float:
        return detector.saturation(datastore.snapshot().candidates, Attributes(), 0.0)

    assert saturation() == 0.0
    body = json.dumps({"model": "m", "prompt": "abcd" * 100}).encode()
    exchanges = []
    for _ in range(2):
        exchange = director.begin()
        exchanges.append(
            (exchange, await exchange.route(RawRequest({":path": "/v1/completions"}, body)))
        )
    destinations = {decision.destination for _, decision in exchanges}
    assert destinations == {"10.0.0.1:1", "10.0.0.2:1"}
    assert saturation() == 1.0
    tap = exchanges[0][1].response
    tap.head(ResponseHead(200))
    tap.body(b"data: {}\n\n", False)
    assert saturation() == 0.5
    for exchange, _ in exchanges:
        exchange.finish(FinishCause.COMPLETED)
    assert saturation() == 0.0
    assert counts.total == 0
