"""The director: every step of a request, producers, failed endpoints, and its end."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from dataclasses import replace as changed
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from picker.decisions.decision import Decision, Watchers
from picker.decisions.steps import BoundPlugin
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import DataKey
from picker.framework.services import HttpError
from picker.outliers.breaker import Answer, EndpointState
from picker.outliers.burst_wait import BurstWait
from picker.outliers.detector import OutlierDetector
from picker.plugins.parsers.http_parsers import OpenAIParser
from picker.pool.datastore import EndpointChanges
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import ParserTable, RequestContext, RequestPipeline
from picker.requestcontrol.responses import answer_of
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    RawRequest,
    ResponseHead,
    RouteDecision,
    SchedulingResult,
)

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
    house.director.use(changed(house.pipeline(), scheduler=BoundPlugin(other)))
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


COMPLETION = RawRequest({":path": "/v1/completions"}, b'{"model":"m","prompt":"p"}')


class Unsure(OutlierDetector):
    unsure = True

    def __init__(self) -> None:
        super().__init__()
        self.held.add("another endpoint")

    def is_unsure(self, now_seconds: float) -> bool:
        return self.unsure


async def test_all_that_wait_go_on_when_the_answers_are_there() -> None:
    burst = BurstWait(1e6)
    waiting = [asyncio.create_task(burst.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    burst.wake()
    await asyncio.gather(*waiting)
    later = asyncio.create_task(burst.settled())
    await asyncio.sleep(0)
    assert not later.done()
    burst.wake()
    await later


async def test_a_wait_ends() -> None:
    await BurstWait(0.001).settled()


async def test_a_request_that_would_wait_is_not_decided_at_once(house: Any) -> None:
    house.pool_of(Candidate(Endpoint("pod-0", "10.0.0.1", 8000)))
    unsure = Unsure()
    burst = BurstWait(1e6)
    around = changed(house.director.context, health=unsure, burst_wait=burst)
    director = Director(house.pipeline(), around)
    waits, gone = director.begin(), director.begin()
    assert not waits.decides_at_once(COMPLETION)
    tasks = [asyncio.create_task(one.route(COMPLETION)) for one in (waits, gone)]
    await asyncio.sleep(0)
    assert around.inflight.total == 0
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    gone.finish(FinishCause.CLIENT_GONE)
    unsure.unsure = False
    burst.wake()
    assert (await tasks[0]).destination == "10.0.0.1:8000"
    assert around.inflight.total == 1
    waits.finish(FinishCause.COMPLETED, 200)
    assert around.inflight.total == 0
    assert director.begin().decides_at_once(COMPLETION)


RAW = RawRequest(
    {":path": "/v1/completions", "x-request-id": "id-1"}, b'{"model":"m","prompt":"hello"}'
)
ASKED: DataKey[str] = DataKey("Asked", "test")


@dataclass
class Asks:
    wait_seconds: float = 0.0
    timeout_seconds: float = 0.4
    error: Exception | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    async def look_up(self, request: Any, candidates: Any, attributes: Any) -> InferenceRequest:
        self.began.set()
        try:
            await asyncio.sleep(self.wait_seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        attributes[ASKED] = "answer"
        return replace(request, prompts=(b"asked",))


@pytest.mark.looptime
async def test_an_answer_within_the_timeout_is_a_finding(house: Any) -> None:
    house.use(producers=[Asks(wait_seconds=0.3)])
    await house.route(RAW)
    request, _, attributes = house.scheduler.calls[0]
    assert (attributes.get(ASKED), attributes.get(SEEN)) == ("answer", "3 candidates")
    assert request.prompts == (b"tokens",)
    assert house.recorder.failed == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    "producer",
    [
        Asks(wait_seconds=0.5),
        Asks(error=HttpError("refused")),
        Asks(error=ZeroDivisionError()),
        Asks(error=TimeoutError()),
        Asks(error=RefusedError(Code.FORBIDDEN, "no")),
    ],
    ids=["too late", "server", "bug", "its own timeout", "refusal"],
)
async def test_a_producer_that_fails_ends_the_finding_out(house: Any, producer: Asks) -> None:
    """Later producers may need the findings of the one that failed."""
    house.use(producers=[producer])
    _, decision = await house.route(RAW)
    assert decision.destination == "10.0.0.1:8000"
    request, _, attributes = house.scheduler.calls[0]
    assert (attributes.get(ASKED), attributes.get(SEEN), request.prompts) == (None, None, ())
    assert house.recorder.failed == ["Asks"]


@pytest.mark.looptime
async def test_the_loads_are_those_from_before_the_question(house: Any) -> None:
    slow = Asks(wait_seconds=0.3)
    house.use(producers=[slow])
    asking = asyncio.create_task(house.route(RAW))
    await slow.began.wait()
    house.use()
    await house.route(RAW)
    _, decision = await asking
    assert decision.destination == "10.0.0.1:8000"
    assert house.inflight.total == 2


@pytest.mark.looptime
async def test_a_client_that_leaves_while_a_server_is_asked_ends_the_question(house: Any) -> None:
    slow = Asks(wait_seconds=0.3)
    house.use(producers=[slow])
    exchange = house.director.begin()
    asking = asyncio.create_task(exchange.route(RAW))
    await slow.began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    exchange.finish(FinishCause.CLIENT_GONE)
    assert slow.cancelled
    assert house.inflight.total == 0
    assert [outcome.cause for outcome in house.recorder.outcomes] == [FinishCause.CLIENT_GONE]
    assert house.recorder.failed == []


async def test_failures_are_counted_each_and_logged_with_moderation(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A producer that fails with every request would fill the disk with its log."""
    house.fail_in("producers", ZeroDivisionError("by zero"))
    house.step = 0.001
    for _ in range(10):
        await house.route(RAW)
    house.now += 10
    await house.route(RAW)
    assert house.recorder.failed == ["Failing"] * 11
    assert len(caplog.records) == 2
    assert caplog.records[0].getMessage() == (
        "Failing failed; scheduling continues with what is known"
    )
    assert caplog.records[0].exc_info is not None


async def test_failures_are_reported_under_the_configured_name(house: Any) -> None:

    @dataclass
    class Timed:
        inner: object
        name: str = "my-index"

        def produce(self, request: object, candidates: object, attributes: object) -> Any:
            raise ZeroDivisionError

    house.use(producers=[Timed(object())])
    await house.route(RAW)
    assert house.recorder.failed == ["my-index"]


THREE = tuple(Candidate(Endpoint(f"pod-{n}", f"10.0.0.{n}", 8000)) for n in range(3))
FIRST, *OTHERS = THREE


@dataclass
class FirstThatMay:
    serving: frozenset[str] = frozenset(one.key for one in THREE)
    asked: list[list[str]] = field(default_factory=list)
    fails_on: str | None = None

    def schedule(self, request: Any, candidates: Any, *_: object) -> SchedulingResult:
        self.asked.append([one.endpoint.name for one in candidates])
        if [one.key for one in candidates] == [self.fails_on]:
            raise ValueError("odd")
        left = [one.endpoint for one in candidates if one.key in self.serving]
        if not left:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "the filters left no endpoint")
        return SchedulingResult((left[0],), "default")


@dataclass
class Admits:
    shown: list[list[str]] = field(default_factory=list)

    def admit(self, request: object, candidates: Sequence[Candidate], *_: object) -> None:
        self.shown.append([one.endpoint.name for one in candidates])


class Scene:
    def __init__(self, is_ejected: bool = True) -> None:
        self.memory = OutlierDetector()
        self.memory.pool_changed(EndpointChanges(tuple(one.endpoint for one in THREE), ()))
        self.scheduler, self.admitter = FirstThatMay(), Admits()
        self.now, self.candidates = 0.0, THREE
        for _ in range(3 if is_ejected else 0):
            self.memory.left(FIRST.endpoint, 0.0).ended(FinishCause.COMPLETED, Answer(500), 0.0)

    def snapshot(self) -> Scene:
        return self

    async def choose(self, **headers: str) -> tuple[Decision, str]:
        seen: list[Decision] = []
        watchers = Watchers(SimpleNamespace(decided=lambda one: seen.append(copy(one))))
        context = RequestContext(
            self, InflightLoad(), Random(0), watchers, lambda: self.now, health=self.memory
        )
        admitters = (BoundPlugin(self.admitter),)
        parsers = ParserTable([OpenAIParser()])
        pipeline = RequestPipeline(parsers, BoundPlugin(self.scheduler), admitters=admitters)
        path = {":path": "/v1/completions"}
        raw = RawRequest({**path, **headers}, COMPLETION.body)
        routed = await Director(pipeline, context).begin().route(raw)
        return seen[0], routed.destination


async def test_an_ejected_endpoint_is_not_among_the_candidates() -> None:
    scene = Scene()
    decision, destination = await scene.choose()
    assert destination == OTHERS[0].endpoint.host_port
    assert list(decision.candidates) == OTHERS
    assert scene.scheduler.asked == scene.admitter.shown == [["pod-1", "pod-2"]]


async def test_all_is_as_ever_while_all_are_well() -> None:
    scene = Scene(is_ejected=False)
    assert (await scene.choose())[0].candidates is THREE
    assert scene.scheduler.asked == [["pod-0", "pod-1", "pod-2"]]


async def test_an_endpoint_that_is_due_is_the_only_candidate() -> None:
    scene = Scene()
    scene.now = 1.0
    decision, destination = await scene.choose()
    assert list(decision.candidates) == [FIRST]
    assert destination == FIRST.endpoint.host_port
    assert scene.admitter.shown == [["pod-1", "pod-2"]]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_probe_that_the_scheduler_refuses_goes_to_other_endpoints(fails: bool) -> None:
    scene = Scene()
    scene.now = 1.0
    if fails:
        scene.scheduler.fails_on = FIRST.key
    else:
        scene.scheduler.serving = frozenset(one.key for one in OTHERS)
    assert (await scene.choose())[1] == OTHERS[0].endpoint.host_port
    assert scene.scheduler.asked == [["pod-0"], ["pod-1", "pod-2"]]


async def test_a_client_that_accepts_only_caches_is_not_a_probe() -> None:
    """An endpoint that is due for a probe has no cache of the prompt."""
    scene = Scene()
    scene.now = 1.0
    with pytest.raises(RefusedError) as refused:
        await scene.choose(prefer="if-available")
    assert refused.value.code is Code.PRECONDITION_FAILED
    assert scene.scheduler.asked == [["pod-0"], ["pod-1", "pod-2"]]


async def test_ejected_endpoints_serve_requests_that_no_other_endpoint_can() -> None:
    """The only endpoint of its kind is better than a refusal."""
    scene = Scene()
    scene.scheduler.serving = frozenset({FIRST.key})
    assert (await scene.choose())[1] == FIRST.endpoint.host_port
    assert scene.scheduler.asked == [["pod-1", "pod-2"], ["pod-0", "pod-1", "pod-2"]]


async def test_a_refusal_of_all_is_a_refusal() -> None:
    for scene, times in ((Scene(), 2), (Scene(is_ejected=False), 1)):
        scene.scheduler.serving = frozenset()
        with pytest.raises(RefusedError):
            await scene.choose()
        assert len(scene.scheduler.asked) == times


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"grpc-status": "0"}, 200),
        ({"grpc-status": "3"}, 200),
        ({"grpc-status": "2"}, 500),
        ({"grpc-status": "4"}, 504),
        ({"grpc-status": "13"}, 500),
        ({"grpc-status": "14"}, 503),
    ],
)
def test_grpc_says_in_a_header_what_http_says_in_its_status(
    headers: dict[str, str], status: int
) -> None:
    """A response that is nothing but an error carries it in a header, others in their trailers."""
    head = ResponseHead(200, MappingProxyType(headers), "10.0.0.1:1", reached_no_endpoint=True)
    assert answer_of(head) == Answer(status, "10.0.0.1:1", reached_no_endpoint=True)


async def test_an_exchange_reports_the_answers_of_its_endpoint(house: Any) -> None:
    house.pool_of(*THREE)
    memory = OutlierDetector()
    memory.pool_changed(EndpointChanges(tuple(one.endpoint for one in THREE), ()))
    around = changed(house.director.context, health=memory)
    director = Director(house.pipeline(), around)
    for _ in range(3):
        exchange = director.begin()
        decision = await exchange.route(COMPLETION)
        assert decision.destination == FIRST.endpoint.host_port
        decision.response.head(ResponseHead(500))
        exchange.finish(FinishCause.COMPLETED, 500)
    assert memory.views(house.now)[FIRST.key].state is EndpointState.EJECTED
    exchange = director.begin()
    bodyless = await exchange.route(RawRequest({":path": "/v1/models"}, None))
    assert bodyless.destination != FIRST.endpoint.host_port
    exchange.finish(FinishCause.COMPLETED, 500)
    suspect = next(one for one in OTHERS if one.endpoint.host_port == bodyless.destination)
    assert memory.views(house.now)[suspect.key].state is EndpointState.SUSPECT
    for _ in range(2):  # without a response there is no evidence
        exchange = director.begin()
        await exchange.route(COMPLETION)
        exchange.finish(FinishCause.CLIENT_GONE)
    assert len(memory.views(house.now)) == 2
    memory.check_integrity()
