"""The director with fakes around it: each step, each refusal, and the accounting of the end."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from picker.datalayer.inflight import InflightLoad
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.plugins.parsers.openai_parser import OpenAIParser
from picker.plugins.parsers.passthrough_parser import PassthroughParser
from picker.requestcontrol.director import Director, Exchange, RequestPipeline
from picker.requestcontrol.observer import Decision, Outcome
from picker.requestcontrol.parsing import ParserTable
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    RawRequest,
    RouteDecision,
    SchedulingResult,
)

POOL = tuple(Candidate(Endpoint(f"pod-{n}", f"10.0.0.{n}", 8000)) for n in (1, 2, 3))
BODY = b'{ "model": "m", "prompt": "hello" }'
HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
SEEN: DataKey[str] = DataKey("Seen", "test")


@dataclass
class FixedPool:
    """A datastore that never changes."""

    candidates: Sequence[Candidate] = POOL

    def snapshot(self) -> FixedPool:
        """Itself."""
        return self


@dataclass
class TakeLeastLoaded:
    """Sorts by the in-flight count and remembers what it was asked."""

    calls: list[tuple[InferenceRequest, list[Candidate], Attributes]] = field(default_factory=list)
    fallbacks: int = 1
    error: Exception | None = None

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """The least loaded first."""
        self.calls.append((request, list(candidates), attributes))
        if self.error is not None:
            raise self.error
        ordered = sorted(candidates, key=lambda candidate: candidate.inflight_requests)
        endpoints = tuple(candidate.endpoint for candidate in ordered[: self.fallbacks])
        return SchedulingResult(endpoints, "default")


@dataclass
class Recorder:
    """An observer, a data producer and a hook that write down what they see."""

    decisions: list[Decision] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    prepared: list[tuple[InferenceRequest, SchedulingResult, str | None]] = field(
        default_factory=list
    )

    def decided(self, decision: Decision) -> None:
        """Keep the decision."""
        self.decisions.append(decision)

    def finished(self, outcome: Outcome) -> None:
        """Keep the outcome."""
        self.outcomes.append(outcome)

    def plugin_failed(self, plugin: str) -> None:
        """Keep the name."""
        self.failed.append(plugin)

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Leave a finding and enrich the request."""
        attributes.put(SEEN, f"{len(candidates)} candidates")
        return replace(request, prompts=(b"tokens",))

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Keep what is about to leave."""
        self.prepared.append((request, result, attributes.get(SEEN)))


@dataclass
class Failing:
    """A producer and a hook that raise."""

    error: Exception

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Raise."""
        raise self.error

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Raise."""
        raise self.error


class House:
    """A director with everything around it in reach of the test."""

    def __init__(self, pool: Sequence[Candidate] = POOL) -> None:
        self.pool = FixedPool(pool)
        self.scheduler = TakeLeastLoaded()
        self.recorder = Recorder()
        self.inflight = InflightLoad()
        self.now = 0.0
        self.director = Director(
            self.pipeline(),
            self.pool,
            inflight=self.inflight,
            rng=Random(7),
            observer=self.recorder,
            clock=self.tick,
        )

    def pipeline(
        self, producers: Sequence[object] = (), hooks: Sequence[object] = ()
    ) -> RequestPipeline:
        """The recorder as producer and hook, with others before it."""
        return RequestPipeline(
            ParserTable([OpenAIParser(), PassthroughParser()]),
            self.scheduler,
            (*producers, self.recorder),  # type: ignore[arg-type]
            (*hooks, self.recorder),  # type: ignore[arg-type]
        )

    def tick(self) -> float:
        """A clock on which everything takes a second."""
        self.now += 1
        return self.now

    async def route(self, raw: RawRequest) -> tuple[Exchange, RouteDecision]:
        """Begin and route."""
        exchange = self.director.begin()
        return exchange, await exchange.route(raw)

    async def refusal(self, raw: RawRequest) -> RefusedError:
        """The refusal that `raw` gets; its exchange ends as refused and holds nothing."""
        exchange = self.director.begin()
        with pytest.raises(RefusedError) as error:
            await exchange.route(raw)
        exchange.finish(FinishCause.REFUSED, error.value.status)
        assert self.inflight.total == 0
        assert self.recorder.outcomes[-1].refusal is error.value.code
        return error.value


def raw(body: bytes | None = BODY, **changes: object) -> RawRequest:
    """A completions request."""
    return replace(RawRequest(HEADERS, body), **changes)  # type: ignore[arg-type]


async def test_a_request_is_parsed_enriched_scheduled_prepared_and_counted() -> None:
    """Every collaborator sees its part of one request, in order."""
    house = House()
    exchange, decision = await house.route(raw())
    assert decision == RouteDecision("10.0.0.1:8000")
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


async def test_the_next_request_sees_the_load_of_the_ones_under_way() -> None:
    """The picker's own counts spread a burst before any scrape does."""
    house = House()
    decisions = [(await house.route(raw()))[1].destination for _ in range(4)]
    assert decisions[:3] == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    assert [c.inflight_requests for c in house.scheduler.calls[-1][1]] == [1, 1, 1]
    house.inflight.check_integrity()


async def test_the_end_is_recorded_once_however_often_it_is_told() -> None:
    """A second finish neither releases nor records."""
    house = House()
    exchange, _ = await house.route(raw())
    exchange.finish(FinishCause.CLIENT_GONE, 200)
    exchange.finish(FinishCause.COMPLETED, 200)
    (outcome,) = house.recorder.outcomes
    assert outcome == Outcome(
        request_id="id-1",
        incoming_model="m",
        target_model="m",
        cause=FinishCause.CLIENT_GONE,
        seconds=outcome.seconds,
        endpoint_key="default/pod-1",
        response_status=200,
    )
    assert outcome.seconds > 0
    assert house.inflight.total == 0


async def test_an_exchange_that_never_routed_has_an_outcome_too() -> None:
    """A client that leaves while its body arrives is recorded, with nothing known about it."""
    house = House()
    house.director.begin().finish(FinishCause.CLIENT_GONE)
    (outcome,) = house.recorder.outcomes
    assert (outcome.cause, outcome.endpoint_key) == (FinishCause.CLIENT_GONE, None)


async def test_the_decision_can_be_explained_afterwards() -> None:
    """The observer gets the request, the candidates and the scheduler's result."""
    house = House()
    await house.route(raw())
    (decision,) = house.recorder.decisions
    assert decision.destination == "10.0.0.1:8000"
    assert decision.seconds > 0
    assert list(decision.candidates) == list(POOL)
    assert decision.request == house.scheduler.calls[0][0]
    assert decision.result is not None


async def test_several_endpoints_become_a_fallback_list() -> None:
    """The list is in the scheduler's order, IPv6 in brackets; the first one is counted."""
    house = House([Candidate(Endpoint("six", "::1", 80)), *POOL])
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
    headers: dict[str, str], model: str
) -> None:
    """The new name of the header wins; only the model of the body changes."""
    house = House()
    _, decision = await house.route(raw(headers={**HEADERS, **headers}))
    assert decision.body is not None
    assert json.loads(decision.body) == {"model": model, "prompt": "hello"}
    request = house.scheduler.calls[0][0]
    assert (request.incoming_model, request.target_model) == ("m", model)


async def test_a_rewrite_to_the_same_model_leaves_the_body_alone() -> None:
    """The client's bytes are kept unless they must change."""
    house = House()
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "m"}
    assert (await house.route(raw(headers=headers)))[1].body is None


async def test_a_body_without_a_model_needs_the_header() -> None:
    """Without either the request is refused; with it the model is put in."""
    house = House()
    body = b'{"prompt":"hello"}'
    refusal = await house.refusal(raw(body))
    assert refusal.body == "inference error: BadRequest - model not found in request body"
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "given"}
    _, decision = await house.route(raw(body, headers=headers))
    assert decision.body == b'{"model":"given","prompt":"hello"}'


async def test_a_raw_body_needs_no_model_and_is_never_changed() -> None:
    """Paths that nobody parses are scheduled all the same."""
    house = House()
    headers = {":path": "/v1/rerank", "x-llm-d-model-name-rewrite": "other"}
    _, decision = await house.route(raw(b"\xff\x00", headers=headers))
    assert decision.body is None
    assert house.scheduler.calls[0][0].target_model == "other"


async def test_a_missing_request_id_is_made_and_set() -> None:
    """The endpoint and our records know the request by the same name."""
    house = House()
    exchange, decision = await house.route(raw(headers={":path": "/v1/completions"}))
    ((name, value),) = decision.set_headers
    assert name == "x-request-id"
    assert uuid.UUID(value).version == 4
    exchange.finish(FinishCause.COMPLETED)
    assert house.recorder.outcomes[0].request_id == value
    assert house.scheduler.calls[0][0].request_id == value


@pytest.mark.parametrize("body", [BODY, None])
async def test_the_subset_hint_is_honoured(body: bytes | None) -> None:
    """With or without a body only the named endpoints may serve."""
    house = House()
    _, decision = await house.route(raw(body, subset_hint=("10.0.0.3:8000",)))
    assert decision.destination == "10.0.0.3:8000"


@pytest.mark.parametrize("body", [BODY, None])
@pytest.mark.parametrize("hint", [("192.168.1.99",), ()])
async def test_nobody_in_the_subset_is_a_503_with_its_reason(
    body: bytes | None, hint: tuple[str, ...]
) -> None:
    """The client learns that there was no endpoint for it."""
    refusal = await House().refusal(raw(body, subset_hint=hint))
    assert refusal.status == 503
    assert refusal.drop_reason is DropReason.NO_ENDPOINTS
    assert "failed to find endpoint candidates for serving the request" in refusal.body


@pytest.mark.parametrize("body", [BODY, None])
async def test_an_empty_pool_is_a_503(body: bytes | None) -> None:
    """Also for requests without a body."""
    assert (await House(()).refusal(raw(body))).status == 503


async def test_requests_without_a_body_go_anywhere_and_are_counted() -> None:
    """Each endpoint gets a share, the scheduler is not asked, and the end releases."""
    house = House()
    routed = [await house.route(raw(None)) for _ in range(60)]
    destinations = [decision.destination for _, decision in routed]
    assert all(destinations.count(c.endpoint.host_port) > 5 for c in POOL)
    assert house.scheduler.calls == []
    assert house.inflight.total == 60
    for exchange, _ in routed:
        exchange.finish(FinishCause.COMPLETED)
    assert house.inflight.total == 0


async def test_what_the_scheduler_refuses_is_refused() -> None:
    """Its code and reason reach the client, and nothing is held."""
    house = House()
    house.scheduler.error = RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.SATURATED)
    assert (await house.refusal(raw())).status == 429
    assert house.recorder.prepared == []


async def test_a_bug_in_the_scheduler_is_not_disguised() -> None:
    """The shell turns it into a 500; the exchange still ends once and holds nothing."""
    house = House()
    house.scheduler.error = ZeroDivisionError()
    exchange = house.director.begin()
    with pytest.raises(ZeroDivisionError):
        await exchange.route(raw())
    exchange.finish(FinishCause.REFUSED, 500)
    assert house.inflight.total == 0


async def test_a_producer_that_breaks_does_not_fail_the_request() -> None:
    """What it would have found is missing, later producers are skipped, and it is reported."""
    house = House()
    house.director.use(house.pipeline(producers=[Failing(ZeroDivisionError())]))
    _, decision = await house.route(raw())
    assert decision.destination == "10.0.0.1:8000"
    assert house.scheduler.calls[0][2].get(SEEN) is None
    assert house.recorder.failed == ["Failing"]


async def test_a_producer_may_refuse() -> None:
    """A typed refusal is an answer, not a failure."""
    house = House()
    error = RefusedError(Code.FORBIDDEN, "no")
    house.director.use(house.pipeline(producers=[Failing(error)]))
    assert await house.refusal(raw()) is error


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
    errors: list[Exception], status: int
) -> None:
    """Anything else that goes wrong while preparing is our fault."""
    house = House()
    house.director.use(house.pipeline(hooks=[Failing(error) for error in errors]))
    assert (await house.refusal(raw())).status == status
    assert len(house.recorder.prepared) == 1


async def test_a_new_pipeline_is_for_new_requests_only() -> None:
    """A request finishes on the configuration that it began with."""
    house = House()
    before = house.director.begin()
    other = TakeLeastLoaded()
    house.director.use(replace(house.pipeline(), scheduler=other))
    await before.route(raw())
    assert (len(house.scheduler.calls), len(other.calls)) == (1, 0)
    await house.route(raw())
    assert (len(house.scheduler.calls), len(other.calls)) == (1, 1)


async def test_the_same_seed_decides_the_same() -> None:
    """Every draw comes from the injected generator."""

    async def draws() -> list[str]:
        house = House()
        return [(await house.route(raw(None)))[1].destination for _ in range(20)]

    first, second = await asyncio.gather(draws(), draws())
    assert first == second
