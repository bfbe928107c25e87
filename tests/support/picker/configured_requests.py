"""Requests through a whole configuration, with a clock that tests advance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from base.tracing import Tracer
from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.decisions.decision import Watchers
from picker.errors import RefusedError
from picker.flowcontrol.shell.controller import FlowController
from picker.framework.services import NO_SERVICES, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director, Exchange
from picker.requestcontrol.pipeline import RequestContext, RequestPolicies
from picker.telemetry.plugin_metrics import PluginCollector
from picker.telemetry.request_metrics import RequestMetrics
from picker.telemetry.spans import RequestTracer
from picker.types import (
    Endpoint,
    EndpointMetrics,
    FinishCause,
    RawRequest,
    ResponseHead,
    RouteDecision,
)

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
_TESTS = Path(__file__).parents[2]
# By name; those that name types of a shelf are beside the tests of the shelf.
GOLDEN = {
    path.name.removesuffix(".in.yaml"): path
    for folder in (_TESTS / "golden" / "config", *_TESTS.glob("picker/*/golden"))
    for path in sorted(folder.glob("*.in.yaml"))
}
PROMPT = {"model": "m", "prompt": "tell me a story " * 100}


def golden(name: str) -> str:
    return GOLDEN[name].read_text()


def golden_output(name: str) -> Path:
    return GOLDEN[name].with_name(f"{name}.out.yaml")


@dataclass
class Moment:
    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Routing:
    assembly: Assembly
    director: Director
    metrics: PickerMetrics
    now: Moment = field(default_factory=Moment)
    datastore: Datastore = field(default_factory=Datastore)
    gate: FlowController | None = None

    async def route(
        self, body: Mapping[str, Any] = PROMPT, path: str = "/v1/completions", **headers: str
    ) -> tuple[Exchange, RouteDecision]:
        exchange = self.director.begin()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = RawRequest({":path": path, "x-request-id": "r", **sent}, json.dumps(body).encode())
        try:
            return exchange, await exchange.route(raw)
        except RefusedError as refusal:
            exchange.finish(FinishCause.REFUSED, refusal.status)
            raise

    def answer(
        self, exchange: Exchange, decision: RouteDecision, *pieces: bytes, step: float = 1.0
    ) -> None:
        tap = decision.response
        tap.head(ResponseHead(200, {"content-type": "text/event-stream"}))
        for index, piece in enumerate(pieces):
            self.now.seconds += step
            tap.body(piece, index == len(pieces) - 1)
        exchange.finish(FinishCause.COMPLETED, 200)

    def value(self, series: str, /, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(series, labels)

    def samples(self, series: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == series
        }


def routing(
    config: str,
    endpoints: Sequence[Endpoint] = (),
    *,
    services: Services = NO_SERVICES,
    tracer: Tracer | None = None,
    watchers: Sequence[object] = (),
    gated: bool = False,
    strict: bool = False,
) -> Routing:
    """`config` may lack its head; `gated` requests pass flow control."""
    metrics, now, inflight = PickerMetrics(), Moment(), InflightLoad()
    options = BuildOptions(services, allow_experimental=True, strict_data_scope=strict)
    text = config if "EndpointPickerConfig" in config else HEAD + config
    loaded = load_config(text.encode(), "test.yaml")
    assembly = build(loaded, builtin_plugins(), metrics, now, options)
    datastore = Datastore(assembly.observers)
    pool = endpoints or [Endpoint(name, f"10.0.0.{i}", 8000) for i, name in enumerate("ab", 1)]
    metrics.labels.add_served(["m"])
    datastore.set_endpoints(pool)
    for endpoint in pool:
        datastore.update_metrics(endpoint.key, EndpointMetrics())
    policies = RequestPolicies(tracer=None if tracer is None else RequestTracer(tracer, now))
    watching = Watchers(RequestMetrics(metrics), *watchers)
    context = RequestContext(datastore, inflight, Random(1), watching, now, policies)
    gate = FlowController(
        assembly.flow_control, lambda: datastore.snapshot().candidates, now, metrics
    )
    director = Director(assembly.gated(gate if gated else None), context)
    metrics.register(PluginCollector(lambda: assembly, inflight, metrics))
    return Routing(assembly, director, metrics, now, datastore, gate)
