"""Candidates after failures: an endpoint due for a probe, the usable ones, then all."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from dataclasses import replace as changed
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from picker.decisions.decision import Decision, Watchers
from picker.decisions.steps import BoundPlugin
from picker.errors import Code, RefusedError
from picker.outliers.breaker import Answer, EndpointState
from picker.outliers.detector import OutlierDetector
from picker.plugins.parsers.openai_parser import OpenAIParser
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
    SchedulingResult,
)

POOL = tuple(Candidate(Endpoint(f"pod-{n}", f"10.0.0.{n}", 8000)) for n in range(3))
FIRST, *OTHERS = POOL
COMPLETION = RawRequest({":path": "/v1/completions"}, b'{"model":"m","prompt":"p"}')


@dataclass
class FirstThatMay:
    serving: frozenset[str] = frozenset(one.key for one in POOL)
    asked: list[list[str]] = field(default_factory=list)
    fails_on: str | None = None

    def schedule(
        self, request: InferenceRequest, candidates: Sequence[Candidate], *_: object
    ) -> SchedulingResult:
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
        self.memory.pool_changed(EndpointChanges(tuple(one.endpoint for one in POOL), ()))
        self.scheduler, self.admitter = FirstThatMay(), Admits()
        self.now, self.candidates = 0.0, POOL
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
    assert (await scene.choose())[0].candidates is POOL
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
    house.pool_of(*POOL)
    memory = OutlierDetector()
    memory.pool_changed(EndpointChanges(tuple(one.endpoint for one in POOL), ()))
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
