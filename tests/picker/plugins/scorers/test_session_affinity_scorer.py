"""session-affinity-scorer: the session's endpoint before all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.plugins.scorers.session_affinity_scorer import PLUGIN
from picker.types import (
    Candidate,
    InferenceRequest,
    ProfileResult,
    ResponseHead,
    SchedulingResult,
    ScoredEndpoint,
)


def went_to(candidate: Candidate) -> SchedulingResult:
    """A decision of one profile."""
    result = ProfileResult((ScoredEndpoint(candidate, 1.0),))
    return SchedulingResult((candidate.endpoint,), "default", {"default": result})


def test_the_token_of_a_response_prefers_its_endpoint(
    configured: Callable[..., Any],
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """1.0 for it, 0.0 for others; 0.0 for all without a token or without the endpoint."""
    scorer, candidates = configured(PLUGIN), [placed("a"), placed("b"), placed("c")]
    assert list(scorer.score(request_for(), candidates, Attributes())) == [0.0, 0.0, 0.0]
    flight = Flight(request_for(), went_to(candidates[1]), Attributes())
    request = replace(request_for(), headers=scorer.response_head(flight, ResponseHead(200)))
    assert list(scorer.score(request, candidates, Attributes())) == [0.0, 1.0, 0.0]
    assert list(scorer.score(request, candidates[:1], Attributes())) == [0.0]
    assert list(scorer.score(request, [], Attributes())) == []


def test_a_remembered_session_that_is_outvoted_stays_bound(
    configured: Callable[..., Any],
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """It moves only once its endpoint is no candidate."""
    scorer = configured(PLUGIN, {"strategy": "session_id"})
    a, b = placed("a"), placed("b")
    request = replace(request_for(), headers={"x-session-id": "s"})
    scorer.pre_request(request, went_to(a), Attributes())
    seen = Attributes()
    assert list(scorer.score(request, [a, b], seen)) == [1.0, 0.0]
    scorer.pre_request(request, went_to(b), seen)
    assert list(scorer.score(request, [a, b], Attributes())) == [1.0, 0.0]
    gone = Attributes()
    assert list(scorer.score(request, [b], gone)) == [0.0]
    scorer.pre_request(request, went_to(b), gone)
    assert list(scorer.score(request, [a, b], Attributes())) == [0.0, 1.0]
