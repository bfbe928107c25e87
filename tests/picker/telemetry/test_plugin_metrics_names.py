"""Every extension point is timed, under the name that the configuration gives the plugin."""

import json
from pathlib import Path
from random import Random

from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.decisions.decision import Watchers
from picker.framework.flow import JudgesStaleness
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest, ResponseHead

FOLDER = Path(__file__).parents[2] / "golden" / "config"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 900}]}).encode()
ANSWER = json.dumps({"usage": {"prompt_tokens": 3, "total_tokens": 5}}).encode()


def assembled(case: str, metrics: PickerMetrics) -> Assembly:
    loaded = load_config((FOLDER / f"{case}.in.yaml").read_bytes(), case)
    options = BuildOptions(allow_experimental=True)
    return build(loaded, builtin_plugins(), metrics, lambda: 0.0, options)


async def serve_one(assembly: Assembly, metrics: PickerMetrics, headers: dict[str, str]) -> None:
    datastore = Datastore(assembly.observers)
    labels = {"llm-d.ai/role": "encode-prefill-decode"}
    datastore.set_endpoints([Endpoint(f"w{i}", f"10.0.0.{i}", 80, labels=labels) for i in (1, 2)])
    for key in ("default/w1", "default/w2"):
        datastore.update_metrics(key, EndpointMetrics())
    watchers = Watchers(RequestMetrics(metrics))
    context = RequestContext(datastore, InflightLoad(), Random(1), watchers)
    director = Director(assembly.pipeline, context)
    exchange = director.begin()
    decision = await exchange.route(RawRequest({":path": "/v1/chat/completions", **headers}, CHAT))
    if decision.response is not None:
        kind = {":status": "200", "content-type": "application/json"}
        decision.response.head(ResponseHead(200, kind))
        decision.response.body(ANSWER, True)
    exchange.finish(FinishCause.COMPLETED, 200)


def timed(metrics: PickerMetrics) -> set[tuple[str, ...]]:
    numbers = metrics.plugin_duration_seconds.numbers()
    return {labels for labels, (counts, _) in numbers if sum(counts)}


async def test_every_extension_point_is_timed() -> None:
    metrics = PickerMetrics()
    assembly = assembled("every_way_to_look_at_requests", metrics)
    await serve_one(assembly, metrics, {"x-session": "s", "x-llm-d-inference-fairness-id": "f"})
    points = {labels[0] for labels in timed(metrics)}
    assert points >= {
        *("RequestProcessor", "Screener", "DataProducer", "Admitter", "ProfilePicker", "Scorer"),
        *("Picker", "ProcessProfilesResults", "PreRequest", "ResponseReceived"),
        *("ResponseStreaming", "ResponseComplete"),
    }


async def test_plugins_are_timed_under_their_own_names() -> None:
    metrics = PickerMetrics()
    await serve_one(assembled("published_tiered_prefix_cache_cpu", metrics), metrics, {})
    assert timed(metrics) >= {
        ("Scorer", "prefix-cache-scorer", "gpu-prefix-scorer"),
        ("Scorer", "prefix-cache-scorer", "cpu-prefix-scorer"),
        ("DataProducer", "approx-prefix-cache-producer", "gpu-prefix-producer"),
    }
    hits = {labels for labels, (counts, _) in metrics.prefix_indexer_hit_ratio.numbers()}
    assert ("gpu-prefix-producer", "approx-prefix-cache-producer") in hits


def test_only_a_detector_that_knows_of_old_metrics_says_so() -> None:
    """Otherwise a series would report freshness for a detector without metrics."""
    knows, needs_none = (
        assembled(case, PickerMetrics()).pipeline.saturation
        for case in ("flow_control_defaults", "flow_control_every_policy")
    )
    assert isinstance(knows, JudgesStaleness)
    assert needs_none is not None
    assert not isinstance(needs_none, JudgesStaleness)
