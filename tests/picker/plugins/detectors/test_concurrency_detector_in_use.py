"""A concurrency-detector in a configuration counts the real load in flight."""

import json
import time
from random import Random

from picker.config.build import build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.framework.attributes import Attributes
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.types import Endpoint, FinishCause, RawRequest, ResponseHead

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
