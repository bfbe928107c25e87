"""session-affinity-filter: the session's endpoint alone, or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import (
    ConsumesData,
    Filter,
    Flight,
    PreRequest,
    ResponseHeadHook,
)
from picker.framework.registry import PluginType
from picker.plugins.filters import multicluster_session_affinity_filter, session_affinity_filter
from picker.types import (
    Candidate,
    InferenceRequest,
    ProfileResult,
    ResponseHead,
    SchedulingResult,
    ScoredEndpoint,
)

PLUGINS = (session_affinity_filter.PLUGIN, multicluster_session_affinity_filter.PLUGIN)
Make = Callable[..., Any]


def went_to(candidate: Candidate) -> SchedulingResult:
    """A decision of one profile."""
    result = ProfileResult((ScoredEndpoint(candidate, 1.0),))
    return SchedulingResult((candidate.endpoint,), "default", {"default": result})


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_request_without_a_token_gets_one_that_pins(
    configured: Make,
    kept: Make,
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    plugin: PluginType[Any],
) -> None:
    """Every response carries it, those to pinned requests too."""
    pin = configured(plugin)
    for contract in (Filter, PreRequest, ResponseHeadHook, ConsumesData):
        assert isinstance(pin, contract)
    candidates = [placed("a"), placed("b"), placed("c")]
    assert kept(pin, candidates) == ["a", "b", "c"]
    flight = Flight(request_for(), went_to(candidates[1]), Attributes())
    token = pin.response_head(flight, ResponseHead(200))["x-session-token"]
    request = replace(request_for(), headers={"x-session-token": token})
    assert token
    assert kept(pin, candidates, request=request) == ["b"]
    assert kept(pin, [candidates[0], candidates[2]], request=request) == ["a", "c"]
    assert kept(pin, [], request=request) == []
    assert pin.response_head(flight, ResponseHead(500)) == {"x-session-token": token}


def test_a_session_id_pins_after_the_first_request(
    configured: Make,
    kept: Make,
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """Nothing is written to the response; each instance remembers for itself."""
    pin, other = (
        configured(session_affinity_filter.PLUGIN, {"strategy": "session_id"}, name)
        for name in ("one", "two")
    )
    candidates = [placed("a"), placed("b")]
    request = replace(request_for(), headers={"x-session-id": "sess-A"})
    attributes = Attributes()
    assert kept(pin, candidates, attributes, request=request) == ["a", "b"]
    pin.pre_request(request, went_to(candidates[1]), attributes)
    assert kept(pin, candidates, request=request) == ["b"]
    assert kept(other, candidates, request=request) == ["a", "b"]
    flight = Flight(request, went_to(candidates[1]), attributes)
    assert pin.response_head(flight, ResponseHead(200)) is None
