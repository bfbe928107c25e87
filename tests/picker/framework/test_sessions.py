"""Session affinity: tokens that clients carry, and sessions that are remembered."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from picker.framework.attributes import Attributes, DataKey
from picker.framework.findings import agent_identity_key, session_id_key
from picker.framework.sessions import (
    SessionAffinity,
    SessionAffinityParameters,
    session_affinity,
)
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    SchedulingResult,
    ScoredEndpoint,
)

A, B, C = (Candidate(Endpoint(name, "10.0.0.1", 8000)) for name in "abc")


def affinity(**parameters: Any) -> SessionAffinity:
    """A strategy from its JSON parameters."""
    return session_affinity("mine", msgspec.convert(parameters, SessionAffinityParameters))


def by_id(**parameters: Any) -> SessionAffinity:
    """The strategy that remembers."""
    return affinity(strategy="session_id", sessionIdConfig=parameters)


def request(at: float = 0.0, **headers: str) -> InferenceRequest:
    """A request with headers, `_` for `-`."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return InferenceRequest("r", names, ParsedBody(Api.RAW), "m", "m", received_at_seconds=at)


def went_to(*picked: Candidate, **others: Candidate) -> SchedulingResult:
    """A decision whose primary profile is `decode`."""
    profiles = {"decode": ProfileResult(tuple(ScoredEndpoint(each, 1.0) for each in picked))}
    for name, candidate in others.items():
        profiles[name] = ProfileResult((ScoredEndpoint(candidate, 1.0),))
    return SchedulingResult(tuple(each.endpoint for each in picked), "decode", profiles)


def send(
    strategy: SessionAffinity,
    asked: InferenceRequest,
    candidates: Sequence[Candidate],
    *to: Candidate,
) -> Candidate | None:
    """One request: what was chosen; it goes there, else to `to`."""
    attributes = Attributes()
    chosen = strategy.choose(asked, candidates, attributes)
    strategy.decided(asked, went_to(*(to or ((chosen,) if chosen else ()))), attributes)
    return chosen


# Tokens


def test_a_token_names_the_endpoint_that_was_picked() -> None:
    """Standard base64 of namespace/name, of the first endpoint, in the configured header."""
    headers = affinity().response_headers(went_to(B, A))
    assert headers == {"x-session-token": base64.b64encode(b"default/b").decode()}
    other = affinity(encodedEndpointHeaderConfig={"header": "X-My-Token"})
    assert list(other.response_headers(went_to(A)) or ()) == ["x-my-token"]


def test_a_repeated_token_chooses_its_endpoint() -> None:
    """As long as it is a candidate."""
    strategy = affinity()
    token = (strategy.response_headers(went_to(B)) or {})["x-session-token"]
    assert strategy.choose(request(x_session_token=token), [A, B, C], Attributes()) is B
    assert strategy.choose(request(x_session_token=token), [A, C], Attributes()) is None
    assert strategy.choose(request(), [A, B], Attributes()) is None


@pytest.mark.parametrize(
    "token", ["", "%%%", "ZGVmYXVsdC9", "default/b", "ZGVmYXVsdC9i!", "/w==", "é", "Lw==", "YQ=="]
)
def test_a_token_that_says_nothing_is_no_token(token: str) -> None:
    """Clients may send anything."""
    assert affinity().choose(request(x_session_token=token), [A, B], Attributes()) is None


def test_the_token_is_about_the_profile_that_is_named() -> None:
    """Nothing is written when that profile picked nothing."""
    strategy = affinity(profileName="prefill")
    token = base64.b64encode(b"default/c").decode()
    assert strategy.response_headers(went_to(A, prefill=C)) == {"x-session-token": token}
    assert strategy.response_headers(went_to(A)) is None


# Bindings


def test_a_session_stays_where_it_went_first() -> None:
    """Whoever would have been picked otherwise; other sessions know nothing of it."""
    strategy = by_id()
    assert send(strategy, request(x_session_id="s"), [A, B, C], B) is None
    for _ in range(10):
        assert send(strategy, request(x_session_id="s"), [A, B, C]) is B
    assert strategy.choose(request(x_session_id="t"), [A, B, C], Attributes()) is None
    assert strategy.choose(request(), [A, B, C], Attributes()) is None
    assert strategy.response_headers(went_to(A)) is None


def test_a_session_ends_when_it_is_not_used() -> None:
    """By the time of its requests."""
    strategy = by_id(evictionTtlSeconds=60, evictionSweepSeconds=1)
    send(strategy, request(0, x_session_id="s"), [A, B], A)
    assert send(strategy, request(50, x_session_id="s"), [A, B]) is A
    assert send(strategy, request(110, x_session_id="s"), [A, B]) is A
    assert send(strategy, request(171, x_session_id="s"), [A, B], B) is None
    assert send(strategy, request(172, x_session_id="s"), [A, B]) is B


def test_a_session_moves_only_when_its_endpoint_was_no_candidate() -> None:
    """Outvoted is not gone: it stays bound, and its time runs on."""
    strategy = by_id(evictionTtlSeconds=60)
    send(strategy, request(0, x_session_id="s"), [A, B], A)
    send(strategy, request(30, x_session_id="s"), [A, B], B)
    assert strategy.choose(request(31, x_session_id="s"), [A, B], Attributes()) is A
    send(strategy, request(32, x_session_id="s"), [B, C], C)
    assert strategy.choose(request(33, x_session_id="s"), [A, B, C], Attributes()) is C
    send(strategy, request(80, x_session_id="s"), [A, B, C], A)
    assert strategy.choose(request(93, x_session_id="s"), [A, B, C], Attributes()) is None


def test_all_candidates_that_were_shown_count() -> None:
    """A plugin may be part of several profiles, which see different candidates."""
    strategy, attributes = by_id(), Attributes()
    send(strategy, request(x_session_id="s"), [A, B], A)
    asked = request(x_session_id="s")
    assert strategy.choose(asked, [A], attributes) is A
    assert strategy.choose(asked, [B], attributes) is None
    strategy.decided(asked, went_to(B), attributes)
    assert strategy.choose(asked, [A, B], Attributes()) is A


def test_a_decision_nobody_asked_about_moves_nothing() -> None:
    """It does bind a session that is not bound."""
    strategy = by_id()
    strategy.decided(request(x_session_id="s"), went_to(A), Attributes())
    strategy.decided(request(x_session_id="s"), went_to(B), Attributes())
    assert strategy.choose(request(x_session_id="s"), [A, B], Attributes()) is A


def test_the_session_is_about_the_profile_that_is_named() -> None:
    """A decision in which that profile picked nothing binds nothing."""
    strategy = affinity(strategy="session_id", profileName="prefill")
    strategy.decided(request(x_session_id="s"), went_to(A), Attributes())
    assert strategy.choose(request(x_session_id="s"), [A, B], Attributes()) is None
    strategy.decided(request(x_session_id="s"), went_to(A, prefill=B), Attributes())
    assert strategy.choose(request(x_session_id="s"), [A, B], Attributes()) is B


def test_the_first_source_that_has_an_id_wins() -> None:
    """Headers and findings alike; an empty value is none."""
    sources = [{"header": "X-Session-Id"}, {"attribute": "SessionID"}, {"header": "x-other"}]
    strategy = by_id(sources=sources)
    assert strategy.consumes == (session_id_key(),)
    found = Attributes()
    found.put(session_id_key(), "from-finding")
    for session, to in (("from-header", A), ("from-finding", B), ("from-other", C)):
        strategy.decided(request(x_session_id=session), went_to(to), Attributes())
    everybody = [A, B, C]
    assert strategy.choose(request(x_session_id="from-header"), everybody, found) is A
    assert strategy.choose(request(x_session_id=""), everybody, found) is B
    assert strategy.choose(request(x_other="from-other"), everybody, found) is B
    assert strategy.choose(request(x_other="from-other"), everybody, Attributes()) is C


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"attribute": "SessionID"}, session_id_key()),
        ({"attribute": "SessionID", "producer": "mine"}, session_id_key("mine")),
        ({"attribute": "agent-identity"}, agent_identity_key()),
        ({"attribute": "Tenant", "producer": "tenants"}, DataKey("Tenant", "tenants")),
    ],
)
def test_findings_that_are_sources_are_asked_for(source: dict[str, str], key: DataKey[Any]) -> None:
    """So that a configuration without their producer is refused."""
    assert by_id(sources=[source]).consumes == (key,)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"encodedEndpointHeaderConfig": {"header": " "}}, "encodedEndpointHeaderConfig.header"),
        ({"sessionIdConfig": {"sources": []}}, "sessionIdConfig.sources"),
        ({"sessionIdConfig": {"sources": [{}]}}, r"sessionIdConfig.sources\[0\]"),
        (
            {"sessionIdConfig": {"sources": [{"header": "a"}, {"header": "a", "attribute": "b"}]}},
            r"sessionIdConfig.sources\[1\]",
        ),
        (
            {"sessionIdConfig": {"sources": [{"header": "a", "producer": "b"}]}},
            r"sessionIdConfig.sources\[0\].producer",
        ),
        (
            {"sessionIdConfig": {"sources": [{"attribute": "a"}]}},
            r"sessionIdConfig.sources\[0\].producer",
        ),
        ({"sessionIdConfig": {"evictionTtlSeconds": 0}}, "evictionTtlSeconds"),
        ({"sessionIdConfig": {"evictionTtlSeconds": float("nan")}}, "evictionTtlSeconds"),
        ({"sessionIdConfig": {"evictionSweepSeconds": -1}}, "evictionSweepSeconds"),
    ],
)
def test_parameters_that_cannot_work_are_refused(parameters: dict[str, Any], named: str) -> None:
    """By name, within the strategy that is used."""
    strategy = "session_id" if "sessionIdConfig" in parameters else "encoded_endpoint_header"
    with pytest.raises(ValueError, match=named):
        affinity(strategy=strategy, **parameters)


def test_an_unknown_strategy_is_refused() -> None:
    """By name."""
    with pytest.raises(msgspec.ValidationError, match="strategy"):
        affinity(strategy="cookie")
