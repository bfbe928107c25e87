"""The steps of a decision are spans in sampled traces only."""

from collections.abc import Mapping
from typing import Any

import pytest

from picker.errors import RefusedError
from picker.telemetry.spans import TRACED
from picker.types import Endpoint, FinishCause
from tests.support.picker.configured_requests import routing
from tests.support.picker.span_notes import Noted, Notes

CONFIG = """
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: always-disagg-pd-decider}}
- {type: always-disagg-pd-decider}
- {type: decode-filter}
- {type: prefill-filter}
- {type: queue-scorer, name: queue}
schedulingProfiles:
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: queue, weight: 2}]
- name: prefill
  plugins: [{pluginRef: prefill-filter}]
"""
POOL = [
    Endpoint(f"{role}-{i}", f"10.0.1.{i}", 8000, labels={"llm-d.ai/role": role})
    for role in ("prefill", "decode")
    for i in (1, 2)
]


async def test_the_steps_of_a_decision_are_its_parts() -> None:
    notes = Notes()
    house = routing(CONFIG, POOL, tracer=notes)
    await house.route()
    decision = notes.requests[0].parts[0]
    scoring = {"llm_d.epp.scoring": ["llm_d.epp.scorer.queue-scorer"]}
    assert decision.tree() == {
        "gateway.request_orchestration": [
            "pick_disagg_profile",
            {"run_scheduler_profile": ["filter_endpoints", scoring, "pick_endpoints"]},
            "pick_disagg_profile",
            {"run_scheduler_profile": ["filter_endpoints", "llm_d.epp.scoring", "pick_endpoints"]},
            "pick_disagg_profile",
            "prepare_disaggregation",
        ]
    }
    assert {one.ends for one in decision.everything()} == {1}


async def test_steps_say_what_they_saw_and_decided() -> None:
    notes = Notes()
    await routing(CONFIG, POOL, tracer=notes).route()
    said = {
        (one.name, key): value
        for one in reversed(notes.requests[0].everything())
        for key, value in one.said.items()
    }
    assert said["run_scheduler_profile", "llm_d.epp.scheduling.profile.name"] == "decode"
    assert said["filter_endpoints", "llm_d.epp.filter.candidate_endpoints"] == 4
    assert said["filter_endpoints", "llm_d.epp.filter.filtered_endpoints"] == 2
    assert said["llm_d.epp.scoring", "llm_d.epp.scorer.count"] == 1
    scorer = "llm_d.epp.scorer.queue-scorer"
    assert said[scorer, "llm_d.epp.scorer.name"] == "queue"
    assert said[scorer, "llm_d.epp.scorer.weight"] == 2
    assert said[scorer, "llm_d.epp.scorer.score.max"] == 1
    assert said[scorer, "llm_d.epp.scorer.endpoints_scored"] == 2
    assert said["pick_endpoints", "llm_d.epp.picker.top_scores"] == "2.0000,2.0000"
    assert said["pick_disagg_profile", "llm_d.epp.profile_handler.decision"] == "decode"
    assert said["prepare_disaggregation", "llm_d.epp.pd.disaggregation_used"] is True
    assert said["prepare_disaggregation", "llm_d.epp.pd.prefill_pod_port"] == "8000"
    assert said["prepare_disaggregation", "llm_d.epp.encode.disaggregation_used"] is False


async def test_a_step_that_refuses_has_failed() -> None:
    notes = Notes()
    with pytest.raises(RefusedError):
        await routing(CONFIG, POOL[:2], tracer=notes).route()
    spans = notes.requests[0].parts[0].everything()
    failed = {one.name: one.failure for one in spans if one.failure}
    assert failed["filter_endpoints"] == failed["run_scheduler_profile"]
    assert {one.ends for one in spans} == {1}


async def test_a_trace_that_is_not_sampled_has_no_steps() -> None:
    notes = Notes(sampled=False)
    house = routing(CONFIG, POOL, tracer=notes)
    _, decision = await house.route()
    assert [one.name for one in notes.requests[0].everything()] == [
        "request",
        "gateway.request_orchestration",
    ]
    _, traced = await routing(CONFIG, POOL, tracer=Notes()).route()
    _, plain = await routing(CONFIG, POOL).route()
    assert decision.destination == traced.destination == plain.destination


async def test_a_request_is_a_span_and_the_endpoint_goes_on_with_it() -> None:
    notes = Notes()
    exchange, decision = await routing(CONFIG, POOL, tracer=notes).route(traceparent="up")
    (request,) = notes.requests
    (orchestration,) = request.parts
    assert dict(decision.set_headers)["traceparent"] == "of request"
    assert {key: orchestration.said[key] for key in list(orchestration.said)[:4]} == {
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "r",
        "target_model": "m",
        "request_prio": 0,
    }
    assert (request.ends, orchestration.ends) == (0, 1)
    exchange.finish(FinishCause.COMPLETED)
    exchange.finish(FinishCause.COMPLETED)
    assert (request.ends, request.failure) == (1, None)


async def test_a_refusal_is_a_failed_span() -> None:
    notes = Notes()
    body: Any = ["no object, so that its model cannot be rewritten"]
    with pytest.raises(RefusedError) as refused:
        await routing(CONFIG, POOL, tracer=notes).route(body, x_llm_d_model_name_rewrite="m")
    (request,) = notes.requests
    spans = [request, *request.parts]
    assert [span.failure for span in spans] == [refused.value.message] * 2
    assert [span.ends for span in spans] == [1, 1]


async def test_a_request_whose_headers_cannot_be_made_has_not_left() -> None:
    """Such a request must count as under way nowhere, or its end would bring a count below zero."""

    class Mute(Noted):
        def propagation(self) -> Mapping[str, str]:
            raise ValueError("no header")

    class Notebook(Notes):
        def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Noted:
            return Mute("gateway.request")

    house = routing(CONFIG, POOL, tracer=Notebook())
    with pytest.raises(RefusedError) as refused:
        await house.route()
    assert refused.value.status == 500
    assert house.director.context.inflight.total == 0


async def test_without_a_tracer_no_span_is_begun() -> None:
    house = routing(CONFIG, POOL)
    assert house.director.context.policies.tracer is None
    await house.route()


async def test_steps_are_real_spans_of_opentelemetry() -> None:
    otel = pytest.importorskip("base.otel")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    always = {"OTEL_TRACES_SAMPLER_ARG": "1"}
    tracer = otel.tracing_with(exporter, always, TRACED, in_background=False).tracer
    await routing(CONFIG, POOL, tracer=tracer).route()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    picking, profile = spans["pick_endpoints"], spans["run_scheduler_profile"]
    assert picking.parent.span_id == profile.context.span_id
    orchestration = spans["gateway.request_orchestration"]
    assert profile.parent.span_id == orchestration.context.span_id
    assert spans["llm_d.epp.scorer.queue-scorer"].attributes["llm_d.epp.scorer.type"] == (
        "queue-scorer"
    )
