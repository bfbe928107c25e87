"""Fakes around the director: a pool, a scheduler, plugins, an observer, and a house of them all."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.decisions.decision import Decision, Watchers
from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.errors import RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.plugins.parsers.http_parsers import OpenAIParser, PassthroughParser
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director, Exchange
from picker.requestcontrol.pipeline import (
    ParserTable,
    RequestContext,
    RequestPipeline,
    RequestPolicies,
)
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    RawRequest,
    RouteDecision,
    SchedulingResult,
)

# Fields of a pipeline that hold plugins.
PLUGINS = frozenset(
    ("processors", "screeners", "admitters", "response_heads", "response_progress", "request_ends")
)
POOL = tuple(Candidate(Endpoint(f"pod-{n}", f"10.0.0.{n}", 8000)) for n in (1, 2, 3))
SEEN: DataKey[str] = DataKey("Seen", "test")


@dataclass
class FixedPool:
    candidates: Sequence[Candidate] = POOL

    def snapshot(self) -> FixedPool:
        return self


@dataclass
class TakeLeastLoaded:
    calls: list[tuple[InferenceRequest, list[Candidate], Attributes]] = field(default_factory=list)
    fallbacks: int = 1
    error: Exception | None = None

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
        steps: PluginSteps,
    ) -> SchedulingResult:
        self.calls.append((request, list(candidates), attributes))
        if self.error is not None:
            raise self.error
        ordered = sorted(candidates, key=lambda candidate: candidate.inflight_requests)
        endpoints = tuple(candidate.endpoint for candidate in ordered[: self.fallbacks])
        return SchedulingResult(endpoints, "default")


@dataclass
class Recorder:
    """A watcher, a producer and a hook that write down decisions as they were at that moment."""

    decisions: list[Decision] = field(default_factory=list)
    outcomes: list[Decision] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    waiting: list[Decision] = field(default_factory=list)
    prepared: list[tuple[InferenceRequest, SchedulingResult, str | None]] = field(
        default_factory=list
    )

    def waits(self, decision: Decision) -> None:
        self.waiting.append(copy(decision))

    def decided(self, decision: Decision) -> None:
        self.decisions.append(copy(decision))

    def finished(self, decision: Decision) -> None:
        self.outcomes.append(copy(decision))

    def streamed(self, decision: Decision, gap_seconds: float) -> None:
        self.gaps.append(gap_seconds)

    def plugin_failed(self, plugin: str) -> None:
        self.failed.append(plugin)

    def produce(self, request: Any, candidates: Any, attributes: Any) -> InferenceRequest:
        attributes[SEEN] = f"{len(candidates)} candidates"
        return replace(request, prompts=(b"tokens",))

    def pre_request(self, request: Any, result: Any, attributes: Any) -> None:
        self.prepared.append((request, result, attributes.get(SEEN)))


@dataclass
class Failing:
    error: Exception

    def produce(self, request: Any, candidates: Any, attributes: Any) -> InferenceRequest:
        raise self.error

    def pre_request(self, request: Any, result: Any, attributes: Any) -> None:
        raise self.error


def bound(*plugins: object) -> tuple[BoundPlugin[Any], ...]:
    return tuple(BoundPlugin(one) for one in plugins)


class House:
    def __init__(self, pool: Any = POOL, policies: RequestPolicies | None = None) -> None:
        self.pool = FixedPool(pool)
        self.scheduler = TakeLeastLoaded()
        self.recorder = Recorder()
        self.inflight = InflightLoad()
        self.now, self.step = 0.0, 1.0
        self.director = Director(
            self.pipeline(),
            RequestContext(
                self.pool,
                self.inflight,
                Random(7),
                Watchers(self.recorder),
                self.tick,
                policies or RequestPolicies(),
            ),
        )

    def pipeline(
        self, producers: Sequence[object] = (), hooks: Sequence[object] = (), **others: Any
    ) -> RequestPipeline:
        """Build a pipeline whose producers and hooks end with the recorder; set other fields as
        given.
        """
        return RequestPipeline(
            ParserTable([OpenAIParser(), PassthroughParser()]),
            BoundPlugin(self.scheduler),
            bound(*producers, self.recorder),
            bound(*hooks, self.recorder),
            **{name: bound(*one) if name in PLUGINS else one for name, one in others.items()},
        )

    def use(self, **fields: Any) -> None:
        self.director.use(self.pipeline(**fields))

    def tick(self) -> float:
        self.now += self.step
        return self.now

    def pool_of(self, *candidates: Candidate) -> None:
        self.pool.candidates = candidates

    def fail_in(self, place: str, *errors: Exception) -> None:
        """Put plugins before the recorder that raise `errors`; `place` is a pipeline field."""
        failing = [Failing(error) for error in errors]
        self.director.use(self.pipeline(**{place: failing}))

    async def route(self, raw: RawRequest) -> tuple[Exchange, RouteDecision]:
        exchange = self.director.begin()
        return exchange, await exchange.route(raw)

    async def refusal(self, raw: RawRequest) -> RefusedError:
        """Return the refusal of `raw`, whose exchange ends as refused and holds nothing."""
        exchange = self.director.begin()
        with pytest.raises(RefusedError) as error:
            await exchange.route(raw)
        exchange.finish(FinishCause.REFUSED, error.value.status)
        assert self.inflight.total == 0
        assert self.recorder.outcomes[-1].refusal is error.value
        return error.value


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture(scope="session")
def make_house() -> type[House]:
    return House
