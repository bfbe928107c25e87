"""The lines that the recorder makes of decisions; its failures cost no request."""

import logging
from typing import Any

import pytest

from picker.config.build import DEFAULT_CONFIG
from picker.decisions.steps import BoundPlugin
from picker.errors import RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.recording.lines import (
    AnyLine,
    Config,
    DecisionLine,
    End,
    EndpointChange,
    FirstPiece,
    Header,
    Lost,
    decoded,
)
from picker.requestcontrol.pipeline import RequestPipeline
from picker.types import SchedulingResult
from tests.support.picker.recorded_traffic import ListSink, Traffic

CONFIG = DEFAULT_CONFIG.decode()
# With a plugin that uses responses.
COUNTING = CONFIG.replace("expected-cost-scorer", "token-load-scorer")


def lines(sink: ListSink) -> list[AnyLine]:
    return [decoded(line) for line in sink.lines]


def decisions(sink: ListSink) -> list[DecisionLine]:
    return [line for line in lines(sink) if isinstance(line, DecisionLine)]


async def leave(traffic: Traffic, requests: int = 1) -> None:
    before = len(traffic.under_way)
    while len(traffic.under_way) < before + requests:
        await traffic.request()
    traffic.recorder.flush()


async def test_a_request_is_a_decision_a_first_piece_and_an_end() -> None:
    traffic = Traffic([COUNTING], 1)
    await leave(traffic)
    traffic.draw.random = lambda: 0.9  # type: ignore[method-assign]  # its response comes
    traffic.ends()
    found = [line for line in lines(traffic.sink) if not isinstance(line, EndpointChange | Header)]
    decision = found[0]
    assert isinstance(decision, DecisionLine)
    assert decision.left
    assert decision.result is not None
    last = [line for line in found if getattr(line, "number", 0) == decision.number][1:]
    assert [type(line) for line in last] == [FirstPiece, End]
    assert last[1].usage.total_tokens == 11


async def test_a_decision_records_only_changed_candidates() -> None:
    traffic = Traffic([CONFIG], 1, endpoints=100)
    await leave(traffic, 3)
    first, *later = decisions(traffic.sink)
    same = [one for one in later if one.order is None]
    assert len(first.changed) > 3
    assert same
    assert all(len(one.changed) <= 2 for one in same)


async def test_a_refusal_after_scheduling_is_recorded() -> None:
    traffic = Traffic([CONFIG], 5)
    traffic.draw.random = lambda: 0.0  # type: ignore[method-assign]
    await traffic.request()
    traffic.recorder.flush()
    (decision,) = decisions(traffic.sink)
    assert decision.request.headers["prefer"] == "if-available"
    assert decision.result is not None
    assert not decision.left


class _Odd:
    def produce(self, request: Any, candidates: Any, attributes: Attributes) -> Any:
        attributes[DataKey("Odd", "odd")] = object()
        return request


def with_pipeline(traffic: Traffic, **changes: Any) -> None:
    pipeline = traffic.assembly.pipeline
    values = {name: getattr(pipeline, name) for name in ("parsers", "scheduler", "producers")}
    changed = RequestPipeline(**values | changes)
    traffic.director.use(traffic.recorder.recorded(traffic.assembly, changed))


async def test_findings_of_unknown_types_are_named() -> None:
    traffic = Traffic([CONFIG], 1)
    with_pipeline(traffic, producers=(BoundPlugin(_Odd()),))
    await leave(traffic)
    assert decisions(traffic.sink)[-1].not_replayable == ("Odd/odd",)


class _Broken:
    def schedule(self, *_: object) -> SchedulingResult:
        raise ZeroDivisionError


async def test_a_failure_of_the_scheduler_is_recorded() -> None:
    traffic = Traffic([CONFIG], 1)
    with_pipeline(traffic, scheduler=BoundPlugin(_Broken()))
    exchange = traffic.director.begin()
    with pytest.raises(RefusedError, match="no endpoint could be chosen"):
        await exchange.route(traffic._raw())
    traffic.recorder.flush()
    refusal = decisions(traffic.sink)[-1].refusal
    assert (refusal.code, refusal.message) == ("failed", "ZeroDivisionError")


async def test_a_line_that_cannot_be_made_costs_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traffic = Traffic([CONFIG], 1)
    await leave(traffic)
    original = traffic.recorder._requests.of
    traffic.recorder._requests.of = None  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.ERROR):
        await leave(traffic)
    assert "a decision cannot be recorded" in caplog.text
    assert traffic.sink.is_broken
    traffic.recorder._requests.of = original  # type: ignore[method-assign]
    await leave(traffic)
    found = lines(traffic.sink)
    lost = next(index for index, line in enumerate(found) if isinstance(line, Lost))
    assert isinstance(found[lost + 1], Config)
    assert found[lost + 1].config == CONFIG
    after = next(line for line in found[lost:] if isinstance(line, DecisionLine))
    assert after.order is not None
    assert len(after.changed) == len(after.order)


async def test_an_ended_recording_gets_no_lines() -> None:
    traffic = Traffic([CONFIG], 1)
    traffic.sink.is_open = False
    before = len(traffic.sink.lines)
    await leave(traffic, 3)
    while traffic.under_way:
        traffic.ends()
    assert len(traffic.sink.lines) == before


async def test_every_decision_has_a_seed_of_its_own() -> None:
    traffic = Traffic([CONFIG], 1)
    await leave(traffic, 20)
    seeds = [one.seed for one in decisions(traffic.sink)]
    assert len(set(seeds)) == len(seeds) >= 20


async def test_prompts_can_be_left_out() -> None:
    traffic = Traffic([CONFIG], 1, prompts=False)
    await leave(traffic, 3)
    for one in decisions(traffic.sink):
        assert one.request.prompts is None
        assert sum(one.request.prompt_bytes or ()) > 0
    assert b"expert" not in b"".join(traffic.sink.lines)
