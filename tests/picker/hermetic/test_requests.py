"""Requests and responses, message by message, with all that plugins and observers make of them."""

import base64
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from picker.cli.options import ExplainFlags
from tests.support.otlp_collector import Spans, otlp_collector
from tests.support.picker.configured_requests import GOLDEN, golden
from tests.support.picker.ext_proc_stream import (
    DESTINATION,
    REQUEST_ID,
    GatewayStream,
    body_of,
    completion,
    destination_of,
    directed,
    response_head,
    response_pieces,
)
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker
from tests.support.waiting import until


def sorted_body(model: str) -> bytes:
    members = {"max_tokens": 100, "model": model, "prompt": "test", "temperature": 0}
    return json.dumps(members, separators=(",", ":")).encode()


async def test_a_rewritten_request_goes_to_the_idlest_endpoint(tmp_path: Path) -> None:
    """H1: the body has the model of the rewrite header, sorted members and their length."""
    three = pods(page(3, 0.2), page(0, 0.1, model="my-model-12345"), page(10, 0.2))
    async with whole_picker(tmp_path, three, objectives={"my-model": 2}) as picker:
        rewrite = {"x-llm-d-model-name-rewrite": "my-model-12345"}
        said = await picker.ask(completion(), rewrite | {"x-llm-d-inference-objective": "my-model"})
        assert said == directed(three[1].host_port, sorted_body("my-model-12345"))
        names = {"model_name": "my-model", "target_model_name": "my-model-12345"}
        assert await picker.requests(**names, priority="2") == 1
        assert await picker.requests() == 1
        assert await picker.series("llm_d_epp_ready_endpoints", name="default") == 3
        assert await picker.series("inference_pool_ready_pods", name="default") == 3


async def test_the_adapter_of_a_rewrite_decides(tmp_path: Path) -> None:
    two = pods(page(0, 0.1, ("T",)), page(0, 0.1, ("my-model",)))
    async with whole_picker(tmp_path, two) as picker:
        said = await picker.ask(completion(), {"x-llm-d-model-name-rewrite": "T"})
        assert said == directed(two[0].host_port, sorted_body("T"))
        assert await picker.ask(completion()) == directed(two[1].host_port, completion())


async def test_a_list_of_fallbacks_is_routed(tmp_path: Path) -> None:
    four = pods(page(3, 0.2), page(0, 0.1), page(10, 0.2), page(10, 0.9))
    config = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}
"""
    async with whole_picker(tmp_path, four, config) as picker:
        ordered = ",".join(four[index].host_port for index in (1, 0, 2))
        assert await picker.ask(completion()) == directed(ordered, completion())
        async with picker.stream() as stream:
            await stream.ask(completion())
            assert (await picker.endpoints())["pod-1"]["inflight_requests"] == 1
            assert (await picker.endpoints())["pod-0"]["inflight_requests"] == 0


USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
EVENTS = [
    b'data: {"id":"1","choices":[{"text":"a"}],"usage":null}\n\n',
    b'data: {"id":"1","choices":[],"usage":'
    + json.dumps(USAGE).encode()
    + b"}\n\ndata: [DONE]\n\n",
]
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


async def tokens_of(picker: WholePicker) -> tuple[float | None, float | None]:
    asked = await picker.series("llm_d_epp_request_input_tokens_sum")
    return asked, await picker.series("llm_d_epp_request_output_tokens_sum")


async def test_a_stream_of_events_is_passed_through(tmp_path: Path) -> None:
    """H19: every chunk is echoed, the last one with the end; usage is counted once."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(stream=True))
        assert await stream.response_headers(STREAM) == response_head()
        for event in EVENTS:
            await stream.response_body(event)
            assert await stream.read(1) == response_pieces(event, ends=False)
        await stream.response_body(b"", ends=True)
        assert await stream.read(1) == response_pieces(b"")
        assert await tokens_of(picker) == (7, 10)
        assert await picker.series("llm_d_epp_request_ttft_seconds_count", streaming="true") == 1
        assert await picker.series("llm_d_epp_request_streaming_tpot_seconds_count") == 1


# Everything that holds something for a request while it is under way.
HOLDING = (
    HEAD
    + """
plugins:
- {type: inflight-load-producer}
- {type: active-request-scorer}
- {type: token-load-scorer}
- {type: prefix-cache-scorer}
- {type: session-affinity-scorer}
"""
)
Step = Callable[[GatewayStream], Awaitable[object]]


async def after_the_decision(stream: GatewayStream) -> None:
    await stream.ask(completion(stream=True))


async def after_a_request_without_body(stream: GatewayStream) -> None:
    await stream.request_headers(path="/v1/models", ends=True)
    await stream.read(1)


async def within_the_response(stream: GatewayStream) -> None:
    await after_the_decision(stream)
    await stream.response_headers()
    await stream.response_body(b'data: {"x":1}\n\n')
    await stream.read(1)


async def after_the_response(stream: GatewayStream) -> None:
    await after_the_decision(stream)
    await stream.response_headers()
    await stream.response_body(b"{}", ends=True)
    await stream.read(1)


@pytest.mark.parametrize(
    ("reach", "is_held", "cause"),
    [
        (after_the_decision, True, "client-gone"),
        (after_a_request_without_body, True, "client-gone"),
        (within_the_response, True, "client-gone"),
        (after_the_response, False, "completed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_cancelled_stream_releases_its_state(
    tmp_path: Path, reach: Step, is_held: bool, cause: str
) -> None:
    async with whole_picker(tmp_path, pods(page(), page()), HOLDING) as picker:
        stream = GatewayStream(picker.channel)
        await stream.call.wait_for_connection()
        await reach(stream)
        assert await picker.is_idle() is not is_held
        stream.call.cancel()

        async def is_over() -> bool:
            return await picker.outcomes() == {cause: 1} and await picker.is_idle()

        await until(is_over)


NAMED_ANSWER = json.dumps({"id": "cmpl-1", "model": "my-model", "usage": USAGE}).encode()


async def listed(picker: WholePicker) -> list[dict[str, Any]]:
    return json.loads((await picker.get("/decisions"))[1])["decisions"]


async def found(picker: WholePicker, request_id: str = "last") -> dict[str, Any]:
    status, text = await picker.get(f"/decisions/{request_id}")
    assert status == 200, text
    return json.loads(text)


async def over(picker: WholePicker) -> dict[str, Any]:
    async def is_over() -> bool:
        return [one["outcome"] not in ("waiting", "under-way") for one in await listed(picker)] == [
            True
        ]

    await until(is_over)
    return (await listed(picker))[0]


async def test_a_record_has_the_decision_and_the_response(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(page(), page(queue=3))) as picker:
        async with picker.stream() as stream:
            await stream.ask(completion())
            record = await found(picker)
            assert record["summary"]["outcome"] == "under-way"
            await stream.response_headers(served="127.0.0.1:1")
            await stream.response_body(NAMED_ANSWER, ends=True)
            await stream.read(1)
        summary = await over(picker)
        assert summary["request_id"] == REQUEST_ID
        assert (summary["outcome"], summary["status"]) == ("completed", 200)
        assert summary["ttft_seconds"] is not None
        record = await found(picker, REQUEST_ID)
        assert (record["prompt_tokens"], record["completion_tokens"]) == (7, 10)
        assert record["served_by"] == "127.0.0.1:1"
        (profile,) = record["profiles"]
        first, second = profile["candidates"]
        assert profile["picked"] == [first["endpoint"]]
        assert first["total"] > second["total"]
        assert first["metrics_age_seconds"] is not None
        assert {one["scorer"]: one["weight"] for one in first["scores"]} == dict.fromkeys(
            (
                "queue-scorer",
                "kv-cache-utilization-scorer",
                "prefix-cache-scorer",
                "lora-affinity-scorer",
            ),
            1.0,
        )


@pytest.mark.parametrize("served", [None, "the other", "10.9.9.9:1"])
async def test_a_header_names_the_serving_endpoint_where_configured(
    tmp_path: Path, served: str | None
) -> None:
    backends = pods(page(), page(queue=9))
    flags = ExplainFlags(decision_header=True)
    async with whole_picker(tmp_path, backends, explain=flags) as picker, picker.stream() as stream:
        await stream.ask(completion())
        second = backends[1].host_port
        address = second if served == "the other" else served
        names = {None: backends[0].name, second: backends[1].name, "10.9.9.9:1": "10.9.9.9:1"}
        shown = {"x-request-id": REQUEST_ID, "x-pointsman-endpoint": names[address]}
        assert await stream.response_headers(served=address) == response_head(shown)
        await stream.response_body(NAMED_ANSWER, ends=True)
        await stream.read(1)


ANSWER = json.dumps({"usage": USAGE}).encode()
SESSIONS = HEAD + "plugins: [{type: session-affinity-%s}, {type: max-score-picker}]"


def token_of(pod: Pod) -> str:
    return base64.b64encode(f"default/{pod.name}".encode()).decode()


async def token_in(stream: GatewayStream) -> str:
    (said,) = await stream.response_headers()
    options = said.response_headers.response.header_mutation.set_headers
    (token,) = [o.header.raw_value for o in options if o.header.key == "x-session-token"]
    return str(token.decode())


# H34–H40: sessions


@pytest.mark.parametrize("kind", ["filter", "scorer"], ids=["H34", "H35"])
async def test_a_token_pins_a_session(tmp_path: Path, kind: str) -> None:
    three = pods(page(), page(), page())
    async with whole_picker(tmp_path, three, SESSIONS % kind) as picker:
        for pod in three:
            hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [pod.host_port]}}
            async with picker.stream() as stream:
                assert destination_of(await stream.ask(completion(), metadata=hint))
                assert await token_in(stream) == token_of(pod)
            for _ in range(4):
                headers = {"x-session-token": token_of(pod)}
                async with picker.stream() as stream:
                    said = await stream.ask(completion(), headers)
                    assert said == directed(pod.host_port, completion())
                    expected = response_head({"x-session-token": token_of(pod)})
                    assert await stream.response_headers() == expected


# Prefill and decode at different endpoints, each stage with a token of its own.
STAGED = (
    HEAD
    + """
plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: always-disagg-pd-decider}
- {type: random-picker}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- {name: decode-token, type: session-affinity-filter, parameters: {profileName: decode}}
- name: prefill-token
  type: session-affinity-filter
  parameters:
    profileName: prefill
    encodedEndpointHeaderConfig: {header: x-prefill-session-token}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: prefill-token}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: decode-token}]
"""
)


ROLES = [{"llm-d.ai/role": role} for role in ("prefill", "prefill", "decode", "decode")]


async def test_both_stages_of_a_session_are_pinned(tmp_path: Path) -> None:
    """H36: a request header names the prefill endpoint."""
    four = pods(*[page()] * 4, labels=ROLES)
    prefill, decode = four[1], four[2]
    tokens = {"x-session-token": token_of(decode), "x-prefill-session-token": token_of(prefill)}
    async with whole_picker(tmp_path, four, STAGED) as picker:
        for _ in range(4):
            async with picker.stream() as stream:
                said = await stream.ask(completion(), tokens)
                headers = {"x-prefiller-host-port": prefill.host_port}
                assert said == directed(decode.host_port, completion(), headers=headers)
                assert await stream.response_headers() == response_head(tokens)


async def test_a_request_is_under_way_at_each_endpoint_until_it_has_done_its_part(
    tmp_path: Path,
) -> None:
    four = pods(*[page()] * 4, labels=ROLES)
    tokens = {"x-session-token": token_of(four[2]), "x-prefill-session-token": token_of(four[1])}

    async def counts() -> list[int]:
        rows = await picker.endpoints()
        return [rows[pod.name]["inflight_requests"] for pod in four]

    async with whole_picker(tmp_path, four, STAGED) as picker:
        async with picker.stream() as stream:
            await stream.ask(completion(), tokens)
            assert await counts() == [0, 1, 1, 0]
            await stream.response_headers()
            await stream.response_body(b'{"id":', ends=False)
            await until(lambda: _is(counts, [0, 0, 1, 0]))
            await stream.response_body(b'"x"}', ends=True)
            await stream.read_response()
        assert await counts() == [0, 0, 0, 0]
        async with picker.stream() as stream:
            await stream.ask(completion(), tokens)
        await until(lambda: _is(counts, [0, 0, 0, 0]))


async def _is(counts: Callable[[], Awaitable[list[int]]], expected: list[int]) -> bool:
    return await counts() == expected


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    pytest.importorskip("base.otel")
    with otlp_collector() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        yield spans


async def test_a_request_and_its_decision_are_spans(tmp_path: Path, collected: Spans) -> None:
    async with whole_picker(tmp_path, pods(page()), tracing=True) as picker:
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with picker.stream() as stream:
            said = await stream.ask(completion(), sent)
            options = said[0].request_headers.response.header_mutation.set_headers
            (traceparent,) = [o.header.raw_value for o in options if o.header.key == "traceparent"]
            await stream.respond([b"{}"])
    named = {span["name"]: span for span in collected}
    request, decision = named["gateway.request"], named["gateway.request_orchestration"]
    assert (request["traceId"], request["parentSpanId"]) == (TRACE, PARENT)
    assert decision["parentSpanId"] == request["spanId"]
    assert traceparent.decode() == f"00-{TRACE}-{request['spanId']}-01"
    attributes = {one["key"]: one["value"] for one in decision["attributes"]}
    assert attributes["gen_ai.request.model"] == {"stringValue": "my-model"}


PUBLISHED = (
    "published_flow_control",
    "published_optimized_baseline",
    "published_payload_agnostic",
    "published_pd_disaggregation",
    "published_predicted_latency_slo",
    "published_tiered_prefix_cache_cpu",
    "published_wide_ep_lws",
    "published_wide_ep_lws_dp_aware",
)
SMOKE = [name for name in GOLDEN if name.startswith("smoke_")]
WAITING = {"published_flow_control"}
AT_ONE_PORT = {"published_wide_ep_lws_dp_aware"}  # the rank is named in a header
READS_NOTHING = {"published_payload_agnostic"}
ALL_ROLES = [{"llm-d.ai/role": role} for role in ("encode", "prefill", "decode", "both")]


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *SMOKE} & GOLDEN.keys() - WAITING))
async def test_a_known_configuration_serves(tmp_path: Path, name: str) -> None:
    text = golden(name)
    four = pods(*[page()] * 4, labels=ALL_ROLES)
    async with whole_picker(tmp_path, four, text) as picker, picker.stream() as stream:
        body = completion(prompt="a long story " * 100)
        said = await stream.ask(body)
        address, _, port = destination_of(said).rpartition(":")
        assert address in [pod.address for pod in four]
        assert body_of(said) == body
        assert int(port) in ([8000] if name in AT_ONE_PORT else [pod.port for pod in four])
        assert await stream.respond([b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'])
        reported = await picker.series("llm_d_epp_request_output_tokens_sum")
        assert reported == (None if name in READS_NOTHING else 4)
        assert await picker.series("pointsman_plugin_failures_total") is None
        assert await picker.is_idle()
