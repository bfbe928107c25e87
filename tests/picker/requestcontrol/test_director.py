"""The director: every step of a request, and the accounting of its end."""

import asyncio
import json
import uuid
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from picker.decisions.steps import BoundPlugin
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import DataKey
from picker.types import Candidate, Endpoint, FinishCause, RawRequest, RouteDecision

POOL = tuple(Candidate(Endpoint(f"pod-{n}", f"10.0.0.{n}", 8000)) for n in (1, 2, 3))
BODY = b'{ "model": "m", "prompt": "hello" }'
HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
SEEN: DataKey[str] = DataKey("Seen", "test")


def raw(body: bytes | None = BODY, **changes: object) -> RawRequest:
    return msgspec.structs.replace(RawRequest(HEADERS, body), **changes)  # type: ignore[arg-type]


async def test_a_request_is_parsed_enriched_scheduled_prepared_and_counted(house: Any) -> None:
    exchange, decision = await house.route(raw())
    assert decision == RouteDecision("10.0.0.1:8000", response=decision.response)
    assert decision.response is not None
    (request, candidates, attributes), *others = house.scheduler.calls
    assert others == []
    assert (request.request_id, request.incoming_model, request.target_model) == ("id-1", "m", "m")
    assert (request.size_bytes, request.prompts) == (len(BODY), (b"tokens",))
    assert candidates == list(POOL)
    assert attributes.get(SEEN) == "3 candidates"
    ((prepared, result, finding),) = house.recorder.prepared
    assert (prepared, finding) == (request, "3 candidates")
    assert result.endpoints == (POOL[0].endpoint,)
    assert dict(house.inflight.counts) == {"default/pod-1": 1}
    exchange.finish(FinishCause.COMPLETED, 200, "10.0.0.1:8000")
    assert house.inflight.total == 0


async def test_the_next_request_sees_the_load_of_the_ones_under_way(house: Any) -> None:
    """The picker's own counts spread a burst before any scrape does."""
    decisions = [(await house.route(raw()))[1].destination for _ in range(4)]
    assert decisions[:3] == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    assert [c.inflight_requests for c in house.scheduler.calls[-1][1]] == [1, 1, 1]
    house.inflight.check_integrity()


async def test_the_end_is_recorded_once_even_if_it_is_reported_twice(house: Any) -> None:
    exchange, _ = await house.route(raw())
    exchange.finish(FinishCause.CLIENT_GONE, 200)
    exchange.finish(FinishCause.COMPLETED, 200)
    (outcome,) = house.recorder.outcomes
    assert (outcome.request_id, outcome.incoming_model, outcome.target_model) == ("id-1", "m", "m")
    assert (outcome.cause, outcome.response_status) == (FinishCause.CLIENT_GONE, 200)
    assert (outcome.endpoint_key, outcome.fairness_id) == ("default/pod-1", "default-flow")
    assert (outcome.served_by, outcome.refusal, outcome.usage, outcome.response) == (None,) * 4
    assert outcome.seconds > 0
    assert house.inflight.total == 0


async def test_an_exchange_that_never_routed_has_an_outcome_too(house: Any) -> None:
    house.director.begin().finish(FinishCause.CLIENT_GONE)
    (outcome,) = house.recorder.outcomes
    assert (outcome.cause, outcome.endpoint_key) == (FinishCause.CLIENT_GONE, None)


async def test_the_decision_can_be_explained_afterwards(house: Any) -> None:
    await house.route(raw())
    (decision,) = house.recorder.decisions
    assert decision.destination == "10.0.0.1:8000"
    assert decision.decision_seconds > 0
    assert list(decision.candidates) == list(POOL)
    assert decision.request == house.scheduler.calls[0][0]
    assert decision.result is not None


async def test_several_endpoints_become_a_fallback_list(house: Any) -> None:
    house.pool_of(Candidate(Endpoint("six", "::1", 80)), *POOL)
    house.scheduler.fallbacks = 2
    _, decision = await house.route(raw())
    assert decision.destination == "[::1]:80,10.0.0.1:8000"
    assert dict(house.inflight.counts) == {"default/six": 1}


@pytest.mark.parametrize(
    ("headers", "model"),
    [
        ({"x-llm-d-model-name-rewrite": "new", "x-gateway-model-name-rewrite": "old"}, "new"),
        ({"x-gateway-model-name-rewrite": "old"}, "old"),
        ({"x-llm-d-model-name-rewrite": "", "x-gateway-model-name-rewrite": "old"}, "old"),
    ],
)
async def test_a_rewrite_header_renames_the_model_in_the_body(
    house: Any, headers: dict[str, str], model: str
) -> None:
    _, decision = await house.route(raw(headers={**HEADERS, **headers}))
    assert decision.body is not None
    assert json.loads(decision.body) == {"model": model, "prompt": "hello"}
    request = house.scheduler.calls[0][0]
    assert (request.incoming_model, request.target_model) == ("m", model)


async def test_a_rewrite_to_the_same_model_leaves_the_body_alone(house: Any) -> None:
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "m"}
    assert (await house.route(raw(headers=headers)))[1].body is None


async def test_a_body_without_a_model_goes_on_as_it_came(house: Any) -> None:
    body = b'{"prompt":"hello"}'
    assert (await house.route(raw(body)))[1].body is None
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "given"}
    _, decision = await house.route(raw(body, headers=headers))
    assert decision.body == b'{"model":"given","prompt":"hello"}'


async def test_a_raw_body_needs_no_model_and_is_never_changed(house: Any) -> None:
    headers = {":path": "/v1/rerank", "x-llm-d-model-name-rewrite": "other"}
    _, decision = await house.route(raw(b"\xff\x00", headers=headers))
    assert decision.body is None
    assert house.scheduler.calls[0][0].target_model == "other"


async def test_a_missing_request_id_is_made_and_set(house: Any) -> None:
    exchange, decision = await house.route(raw(headers={":path": "/v1/completions"}))
    ((name, value),) = decision.set_headers
    assert name == "x-request-id"
    assert uuid.UUID(value).version == 4
    exchange.finish(FinishCause.COMPLETED)
    assert house.recorder.outcomes[0].request_id == value
    assert house.scheduler.calls[0][0].request_id == value


@pytest.mark.parametrize("body", [BODY, None])
async def test_the_subset_hint_is_honoured(house: Any, body: bytes | None) -> None:
    _, decision = await house.route(raw(body, subset_hint=("10.0.0.3:8000",)))
    assert decision.destination == "10.0.0.3:8000"


@pytest.mark.parametrize("body", [BODY, None])
@pytest.mark.parametrize("hint", [("192.168.1.99",), ()])
async def test_a_subset_without_endpoints_is_a_503_with_its_reason(
    house: Any, body: bytes | None, hint: tuple[str, ...]
) -> None:
    refusal = await house.refusal(raw(body, subset_hint=hint))
    assert refusal.status == 503
    assert refusal.drop_reason is DropReason.NO_ENDPOINTS
    assert "failed to find endpoint candidates for serving the request" in refusal.reference_body


@pytest.mark.parametrize("body", [BODY, None])
async def test_an_empty_pool_is_a_503(house: Any, body: bytes | None) -> None:
    house.pool_of()
    assert (await house.refusal(raw(body))).status == 503


async def test_requests_without_a_body_go_anywhere_and_are_counted(house: Any) -> None:
    routed = [await house.route(raw(None)) for _ in range(60)]
    destinations = [decision.destination for _, decision in routed]
    assert all(destinations.count(c.endpoint.host_port) > 5 for c in POOL)
    assert house.scheduler.calls == []
    assert house.inflight.total == 60
    for exchange, _ in routed:
        exchange.finish(FinishCause.COMPLETED)
    assert house.inflight.total == 0


async def test_a_refusal_of_the_scheduler_is_the_answer(house: Any) -> None:
    house.scheduler.error = RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.SATURATED)
    assert (await house.refusal(raw())).status == 429
    assert house.recorder.prepared == []


async def test_a_scheduler_that_breaks_is_a_429(house: Any) -> None:
    house.scheduler.error = ZeroDivisionError("by zero")
    refusal = await house.refusal(raw())
    text = "no endpoint could be chosen: a plugin failed; see the endpoint picker's log"
    assert (refusal.status, refusal.message) == (429, text)
    assert refusal.drop_reason is None
    assert house.recorder.failed == ["TakeLeastLoaded"]


async def test_a_refusal_within_a_group_of_errors_is_the_answer(house: Any) -> None:
    typed = RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.SATURATED)
    inner = ExceptionGroup("inner", [ZeroDivisionError(), typed])
    house.scheduler.error = ExceptionGroup("all profiles failed", [ValueError(), inner])
    assert await house.refusal(raw()) is typed


@pytest.mark.parametrize("error", [ZeroDivisionError(), RefusedError(Code.FORBIDDEN, "no")])
async def test_a_producer_that_breaks_does_not_fail_the_request(
    house: Any, error: Exception
) -> None:
    house.fail_in("producers", error)
    _, decision = await house.route(raw())
    assert decision.destination == "10.0.0.1:8000"
    assert house.scheduler.calls[0][2].get(SEEN) is None
    assert house.recorder.failed == ["Failing"]


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([RefusedError(Code.PRECONDITION_FAILED, "cold")], 412),
        ([ZeroDivisionError()], 500),
        ([RefusedError(Code.PRECONDITION_FAILED, "a")] * 2, 500),
        ([RefusedError(Code.PRECONDITION_FAILED, "a"), ZeroDivisionError()], 500),
    ],
)
async def test_hooks_all_run_and_one_refusal_alone_is_the_answer(
    house: Any, errors: list[Exception], status: int
) -> None:
    house.fail_in("hooks", *errors)
    assert (await house.refusal(raw())).status == status
    assert len(house.recorder.prepared) == 1


async def test_a_new_pipeline_is_for_new_requests_only(house: Any) -> None:
    before = house.director.begin()
    other = type(house.scheduler)()
    house.director.use(replace(house.pipeline(), scheduler=BoundPlugin(other)))
    await before.route(raw())
    assert (len(house.scheduler.calls), len(other.calls)) == (1, 0)
    await house.route(raw())
    assert (len(house.scheduler.calls), len(other.calls)) == (1, 1)


async def test_the_same_seed_decides_the_same(make_house: Any) -> None:
    async def draws() -> list[str]:
        house = make_house()
        return [(await house.route(raw(None)))[1].destination for _ in range(20)]

    first, second = await asyncio.gather(draws(), draws())
    assert first == second
