"""Each request is a span, and its decision another one within."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from picker.requestcontrol.director import RequestPolicies
from picker.types import FinishCause, RawRequest

HEADERS = {":path": "/v1/completions", "x-request-id": "id-1", "traceparent": "up"}
BODY = b'{"model":"m","prompt":"hello"}'


@dataclass
class Noted:
    """A span that remembers."""

    name: str
    parent: object
    attributes: dict[str, object] = field(default_factory=dict)
    failure: str | None = None
    ends: int = 0
    is_recorded: bool = True

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Keep it."""
        self.attributes[name] = value

    def fail(self, description: str) -> None:
        """Keep it."""
        self.failure = description

    def end(self) -> None:
        """Count it."""
        self.ends += 1

    def propagation(self) -> Mapping[str, str]:
        """One header."""
        return {"traceparent": f"of {self.name}"}


@dataclass
class Notes:
    """A tracer that remembers."""

    spans: list[Noted] = field(default_factory=list)

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Noted:
        """Keep it."""
        self.spans.append(Noted("gateway.request", headers.get("traceparent")))
        return self.spans[-1]

    def begin(self, name: str, parent: object) -> Noted:
        """Keep it."""
        self.spans.append(Noted(name, parent))
        return self.spans[-1]


async def test_the_endpoint_is_told_of_the_requests_span(make_house: Any) -> None:
    """The decision's span ends with it, the request's with the request."""
    notes = Notes()
    house = make_house(policies=RequestPolicies(tracer=notes))
    exchange, decision = await house.route(RawRequest(HEADERS, BODY))
    request, orchestration = notes.spans
    assert dict(decision.set_headers) == {"traceparent": "of gateway.request"}
    assert (request.parent, orchestration.parent) == ("up", request)
    assert orchestration.name == "gateway.request_orchestration"
    assert orchestration.attributes == {
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "id-1",
        "target_model": "m",
        "request_prio": 0,
    }
    assert (request.ends, orchestration.ends) == (0, 1)
    exchange.finish(FinishCause.COMPLETED)
    exchange.finish(FinishCause.COMPLETED)
    assert (request.ends, request.failure) == (1, None)


async def test_a_refusal_is_a_failed_span(make_house: Any) -> None:
    """With its reason, and it ends all the same."""
    notes = Notes()
    house = make_house((), RequestPolicies(tracer=notes))
    refusal = await house.refusal(RawRequest(HEADERS, BODY))
    assert [span.failure for span in notes.spans] == [refusal.message] * 2
    assert [span.ends for span in notes.spans] == [1, 1]


async def test_a_request_whose_headers_cannot_be_made_has_not_left(make_house: Any) -> None:
    """It counts as under way nowhere, so that what counts those does not end below zero."""

    class Mute(Noted):
        def propagation(self) -> Mapping[str, str]:
            raise ValueError("no header")

    class Notebook(Notes):
        def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Noted:
            return Mute("gateway.request", None)

    house = make_house(policies=RequestPolicies(tracer=Notebook()))
    assert (await house.refusal(RawRequest(HEADERS, BODY))).status == 500
    assert house.recorder.outcomes[-1].endpoint_key is None
    assert house.recorder.decisions == []
