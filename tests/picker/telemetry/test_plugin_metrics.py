"""The load in flight is reported by flow, each request once."""

from picker.framework.flow import QueuedRequest
from picker.telemetry.plugin_metrics import MAX_ROWS
from picker.types import Api, Endpoint, FinishCause, InferenceRequest, ParsedBody, Usage
from tests.support.picker.configured_requests import PROMPT, routing

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


PROGRAMS = """
featureGates: [flowControl]
plugins: [{type: program-aware-fairness}]
flowControl: {defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}}
"""


def test_the_service_of_programs_is_reported() -> None:
    house = routing(PROGRAMS)
    names = ("attained_service_tokens", "avg_wait_time_milliseconds", "jains_fairness_index")
    tokens, waits, index = (f"llm_d_epp_program_aware_{name}" for name in names)
    assert house.samples(tokens) == house.samples(waits) == house.samples(index) == {}
    settings = house.assembly.flow_control
    band = settings.default_band.fairness.for_band(0)
    for sequence, (program, used) in enumerate((("a", 300), ("b", 100))):
        house.metrics.labels.of("m", "m", program)
        request = InferenceRequest("r", {}, ParsedBody(Api.RAW), "m", "m", fairness_id=program)
        item = QueuedRequest(request, sequence, 1.0)
        band.dispatched(item, 1.5)
        band.completed(item, Usage(used), 2.0)
    assert house.samples(tokens) == {("a",): 300, ("b",): 100}
    assert house.samples(waits) == {("a",): 500, ("b",): 500}
    assert house.samples(index) == {(): 400**2 / (2 * (300**2 + 100**2))}
