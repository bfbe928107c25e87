"""The load in flight is reported by flow, and every extension point is timed."""

import json

import pytest

from picker.framework.flow import JudgesStaleness
from picker.metrics.picker_metrics import PickerMetrics
from picker.telemetry.plugin_metrics import MAX_ROWS
from picker.types import Endpoint, FinishCause
from tests.support.picker.configured_requests import GOLDEN, PROMPT, golden, routing

REQUESTS, TOKENS = "llm_d_epp_inflight_requests", "llm_d_epp_inflight_tokens"
ONE = [Endpoint("a", "10.0.0.1", 8000, "ns")]
COUNTED = "plugins: [{type: active-request-scorer}]\n"
PLAIN = "plugins: [{type: queue-scorer}]\n"


async def test_requests_are_reported_by_flow() -> None:
    house = routing(COUNTED, ONE)
    first, _ = await house.route(x_gateway_inference_fairness_id="tenant")
    second, _ = await house.route(x_gateway_inference_fairness_id="tenant")
    third, _ = await house.route()
    producer = "inflight-load-producer"
    labels = {"endpoint_name": "a", "namespace": "ns", "producer_name": producer, "priority": "0"}
    tokens = len(str(PROMPT["prompt"])) / 4
    assert house.value(REQUESTS, fairness_id="tenant", **labels) == 2
    assert house.value(TOKENS, fairness_id="tenant", **labels) == 2 * tokens
    assert house.value(REQUESTS, fairness_id="default-flow", **labels) == 1
    first.finish(FinishCause.COMPLETED, 200)
    assert house.value(TOKENS, fairness_id="tenant", **labels) == tokens
    second.finish(FinishCause.RESET)
    assert house.value(REQUESTS, fairness_id="tenant", **labels) is None
    assert sum(house.samples(REQUESTS).values()) == 1
    third.finish(FinishCause.COMPLETED, 200)
    assert house.samples(REQUESTS) == {}


async def test_without_a_producer_the_picker_itself_counts() -> None:
    house = routing(PLAIN, ONE)
    exchange, _ = await house.route()
    assert house.samples(REQUESTS) == {("a", "", "ns", "", ""): 1}
    assert house.samples(TOKENS) == {}
    exchange.finish(FinishCause.COMPLETED, 200)
    assert house.samples(REQUESTS) == {}


async def test_tenants_that_are_too_many_fall_together() -> None:
    house = routing(COUNTED, ONE)
    exchanges = [
        await house.route({"model": "m", "prompt": "hi"}, x_gateway_inference_fairness_id=f"t{n}")
        for n in range(50)
    ]
    rows = house.samples(REQUESTS)
    counted = {labels[2] for labels, _ in house.metrics.request_total.numbers()}
    assert {"t0", "other"} < {labels[1] for labels in rows} == counted
    assert sum(rows.values()) == len(exchanges)


async def test_tenants_at_too_many_endpoints_at_once_fall_together() -> None:
    pool = [Endpoint(f"e{n}", f"10.0.{n // 250}.{n % 250}", 8000) for n in range(300)]
    house = routing(COUNTED, pool)
    exchanges = [
        await house.route({"model": "m", "prompt": "hi"}, x_gateway_inference_fairness_id=f"t{n}")
        for n in range(5)
        for _ in pool
    ]
    rows = house.samples(REQUESTS)
    own = [labels for labels in rows if labels[1] != "other"]
    assert len(own) == MAX_ROWS
    assert len(rows) <= MAX_ROWS + len(pool)
    assert sum(rows.values()) == len(exchanges)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 900}]}
ANSWER = json.dumps({"usage": {"prompt_tokens": 3, "total_tokens": 5}}).encode()


async def served(case: str, **headers: str) -> PickerMetrics:
    labels = {"llm-d.ai/role": "encode-prefill-decode"}
    pool = [Endpoint(f"w{i}", f"10.0.0.{i}", 80, labels=labels) for i in (1, 2)]
    house = routing(golden(case), pool)
    exchange, decision = await house.route(CHAT, "/v1/chat/completions", **headers)
    house.answer(exchange, decision, ANSWER)
    return house.metrics


def timed(metrics: PickerMetrics) -> set[tuple[str, ...]]:
    numbers = metrics.plugin_duration_seconds.numbers()
    return {labels for labels, (counts, _) in numbers if sum(counts)}


@pytest.mark.parametrize("case", [name for name in GOLDEN if name.startswith("every_way_")])
async def test_every_extension_point_is_timed(case: str) -> None:
    named = {"x_session": "s", "x_llm_d_inference_fairness_id": "f"}
    points = {labels[0] for labels in timed(await served(case, **named))}
    assert ("Screener" in points) is case.endswith("_of_the_shelf")
    assert points >= {
        *("RequestProcessor", "DataProducer", "Admitter", "ProfilePicker", "Scorer"),
        *("Picker", "ProcessProfilesResults", "PreRequest", "ResponseReceived"),
        *("ResponseStreaming", "ResponseComplete"),
    }


async def test_plugins_are_timed_under_their_own_names() -> None:
    metrics = await served("published_tiered_prefix_cache_cpu")
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
        routing(golden(case)).assembly.pipeline.saturation
        for case in ("flow_control_defaults", "flow_control_every_policy")
    )
    assert isinstance(knows, JudgesStaleness)
    assert needs_none is not None
    assert not isinstance(needs_none, JudgesStaleness)
