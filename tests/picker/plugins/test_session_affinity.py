"""Session affinity: tokens that clients carry, remembered sessions, and both plugins."""

import base64
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import AGENT_IDENTITY, SESSION_ID, Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.plugins.session_affinity import (
    MAX_SESSION_ID,
    SessionAffinity,
    SessionAffinityParameters,
    SessionBindings,
)
from picker.types import (
    Api,
    Candidate,
    Candidates,
    Endpoint,
    InferenceRequest,
    ParsedBody,
    ResponseHead,
    SchedulingResult,
)
from tests.depth import examples
from tests.support.picker.plugin_scenes import configured, decided

SESSION_KEY: DataKey[str] = DataKey(SESSION_ID, "session-id-producer")
A, B, C = (Candidate(Endpoint(name, "10.0.0.1", 8000)) for name in "abc")


def affinity(**parameters: Any) -> SessionAffinity:
    return SessionAffinity("mine", msgspec.convert(parameters, SessionAffinityParameters))


def by_id(**parameters: Any) -> SessionAffinity:
    return affinity(strategy="session_id", sessionIdConfig=parameters)


def request(at: float = 0.0, **headers: str) -> InferenceRequest:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return InferenceRequest("r", names, ParsedBody(Api.RAW), "m", "m", received_at_seconds=at)


def went_to(*picked: Candidate, **others: Candidate) -> SchedulingResult:
    return decided(decode=picked, **{name: [one] for name, one in others.items()})


def token_of(strategy: SessionAffinity, decided: SchedulingResult) -> dict[str, str]:
    flight = Flight(request(), decided, Attributes())
    return dict(strategy.response_head(flight, ResponseHead(200)) or {})


def send(
    strategy: SessionAffinity, asked: InferenceRequest, candidates: Candidates, *to: Candidate
) -> Candidate | None:
    attributes = Attributes()
    chosen = strategy.session_endpoint(asked, candidates, attributes)
    strategy.pre_request(asked, went_to(*(to or ((chosen,) if chosen else ()))), attributes)
    return chosen


# Tokens


def test_a_token_names_the_picked_endpoint() -> None:
    headers = token_of(affinity(), went_to(B, A))
    assert headers == {"x-session-token": base64.b64encode(b"default/b").decode()}
    other = affinity(encodedEndpointHeaderConfig={"header": "X-My-Token"})
    assert list(token_of(other, went_to(A))) == ["x-my-token"]


def test_a_repeated_token_chooses_its_endpoint() -> None:
    strategy = affinity()
    token = token_of(strategy, went_to(B))["x-session-token"]
    assert strategy.session_endpoint(request(x_session_token=token), [A, B, C], Attributes()) is B
    assert strategy.session_endpoint(request(x_session_token=token), [A, C], Attributes()) is None
    assert strategy.session_endpoint(request(), [A, B], Attributes()) is None


@pytest.mark.parametrize(
    "token", ["", "%%%", "ZGVmYXVsdC9", "default/b", "ZGVmYXVsdC9i!", "/w==", "é", "Lw==", "YQ=="]
)
def test_an_invalid_token_is_ignored(token: str) -> None:
    assert affinity().session_endpoint(request(x_session_token=token), [A, B], Attributes()) is None


def test_the_token_names_the_endpoint_of_the_configured_profile() -> None:
    strategy = affinity(profileName="prefill")
    token = base64.b64encode(b"default/c").decode()
    assert token_of(strategy, went_to(A, prefill=C)) == {"x-session-token": token}
    assert token_of(strategy, went_to(A)) == {}


# Bindings


def test_a_session_stays_at_its_first_endpoint() -> None:
    strategy = by_id()
    assert send(strategy, request(x_session_id="s"), [A, B, C], B) is None
    for _ in range(10):
        assert send(strategy, request(x_session_id="s"), [A, B, C]) is B
    assert strategy.session_endpoint(request(x_session_id="t"), [A, B, C], Attributes()) is None
    assert strategy.session_endpoint(request(), [A, B, C], Attributes()) is None
    assert token_of(strategy, went_to(A)) == {}


def test_an_unused_session_expires() -> None:
    strategy = by_id(evictionTtlSeconds=60, evictionSweepSeconds=1)
    send(strategy, request(0, x_session_id="s"), [A, B], A)
    assert send(strategy, request(50, x_session_id="s"), [A, B]) is A
    assert send(strategy, request(110, x_session_id="s"), [A, B]) is A
    assert send(strategy, request(171, x_session_id="s"), [A, B], B) is None
    assert send(strategy, request(172, x_session_id="s"), [A, B]) is B


def test_a_session_moves_only_when_its_endpoint_was_no_candidate() -> None:
    strategy = by_id(evictionTtlSeconds=60)
    send(strategy, request(0, x_session_id="s"), [A, B], A)
    send(strategy, request(30, x_session_id="s"), [A, B], B)
    assert strategy.session_endpoint(request(31, x_session_id="s"), [A, B], Attributes()) is A
    send(strategy, request(32, x_session_id="s"), [B, C], C)
    assert strategy.session_endpoint(request(33, x_session_id="s"), [A, B, C], Attributes()) is C
    send(strategy, request(80, x_session_id="s"), [A, B, C], A)
    assert strategy.session_endpoint(request(93, x_session_id="s"), [A, B, C], Attributes()) is None


def test_the_candidates_of_all_profiles_count() -> None:
    """A plugin may be part of several profiles with different candidates."""
    strategy, attributes = by_id(), Attributes()
    send(strategy, request(x_session_id="s"), [A, B], A)
    asked = request(x_session_id="s")
    assert strategy.session_endpoint(asked, [A], attributes) is A
    assert strategy.session_endpoint(asked, [B], attributes) is None
    strategy.pre_request(asked, went_to(B), attributes)
    assert strategy.session_endpoint(asked, [A, B], Attributes()) is A


def test_a_decision_without_the_plugin_moves_no_session() -> None:
    strategy = by_id()
    strategy.pre_request(request(x_session_id="s"), went_to(A), Attributes())
    strategy.pre_request(request(x_session_id="s"), went_to(B), Attributes())
    assert strategy.session_endpoint(request(x_session_id="s"), [A, B], Attributes()) is A


def test_a_session_is_bound_to_the_endpoint_of_the_configured_profile() -> None:
    strategy = affinity(strategy="session_id", profileName="prefill")
    strategy.pre_request(request(x_session_id="s"), went_to(A), Attributes())
    assert strategy.session_endpoint(request(x_session_id="s"), [A, B], Attributes()) is None
    strategy.pre_request(request(x_session_id="s"), went_to(A, prefill=B), Attributes())
    assert strategy.session_endpoint(request(x_session_id="s"), [A, B], Attributes()) is B


def test_the_first_source_with_an_id_wins() -> None:
    sources = [{"header": "X-Session-Id"}, {"attribute": "SessionID"}, {"header": "x-other"}]
    strategy = by_id(sources=sources)
    assert strategy.consumes == (SESSION_KEY,)
    found = Attributes({SESSION_KEY: "from-attribute"})
    for session, to in (("from-header", A), ("from-attribute", B), ("from-other", C)):
        strategy.pre_request(request(x_session_id=session), went_to(to), Attributes())
    pool = [A, B, C]
    assert strategy.session_endpoint(request(x_session_id="from-header"), pool, found) is A
    assert strategy.session_endpoint(request(x_session_id=""), pool, found) is B
    assert strategy.session_endpoint(request(x_other="from-other"), pool, found) is B
    assert strategy.session_endpoint(request(x_other="from-other"), pool, Attributes()) is C


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"attribute": "SessionID"}, SESSION_KEY),
        ({"attribute": "SessionID", "producer": "mine"}, DataKey(SESSION_ID, "mine")),
        ({"attribute": "agent-identity"}, DataKey(AGENT_IDENTITY, "agent-identity")),
        ({"attribute": "Tenant", "producer": "tenants"}, DataKey("Tenant", "tenants")),
    ],
)
def test_attribute_sources_are_declared(source: dict[str, str], key: DataKey[Any]) -> None:
    """A configuration without their producer is refused."""
    assert by_id(sources=[source]).consumes == (key,)


def test_the_filter_passes_the_endpoint_of_the_session_or_all() -> None:
    narrow = configured("session-affinity-filter")
    token = request(x_session_token=base64.b64encode(b"default/b").decode())
    for asked, shown, passed in ((token, [A, B], [B]), (token, [A, C], [A, C]), (token, [], [])):
        assert list(narrow.filter(asked, shown, Attributes(), Random(1))) == passed
    assert list(narrow.filter(request(), [A, B], Attributes(), Random(1))) == [A, B]


def test_the_scorer_prefers_the_endpoint_of_the_session() -> None:
    parameters = {"strategy": "session_id"}
    one, other = (configured("session-affinity-scorer", parameters, name) for name in "ab")
    asked = request(x_session_id="s")
    one.pre_request(asked, went_to(B), Attributes())
    for scorer, shown, scores in (
        (one, [A, B, C], [0.0, 1.0, 0.0]),
        (one, [A], [0.0]),
        (other, [A, B], [0.0, 0.0]),
    ):
        assert list(scorer.score(asked, shown, Attributes())) == scores


# What is remembered


def test_a_binding_lasts_while_it_is_used() -> None:
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10)
    bindings.bind("s", "default/a", 0.0)
    assert bindings.endpoint("s", 300.0) == "default/a"
    assert bindings.endpoint("s", 300.5) is None
    bindings.bind("s", "default/b", 301.0)
    bindings.bind("s", "default/b", 500.0)
    assert bindings.endpoint("s", 800.0) == "default/b"
    assert bindings.endpoint("other", 800.0) is None


def test_expired_bindings_are_swept_at_the_interval() -> None:
    bindings = SessionBindings(ttl_seconds=5, sweep_seconds=10)
    bindings.bind("s", "default/a", 0.0)
    assert bindings.endpoint("s", 6.0) is None
    assert len(bindings) == 1
    bindings.bind("t", "default/a", 10.0)
    assert len(bindings) == 1
    assert bindings.endpoint("t", 10.0) == "default/a"


def test_time_never_goes_back() -> None:
    """A request that waited long neither revives an expired binding nor ages a new one."""
    bindings = SessionBindings(ttl_seconds=5, sweep_seconds=1)
    bindings.bind("late", "default/a", 100.0)
    assert bindings.endpoint("late", 50.0) == "default/a"
    bindings.bind("early", "default/b", 50.0)
    assert bindings.endpoint("early", 105.0) == "default/b"
    assert bindings.endpoint("early", 105.1) is None


def test_the_least_recently_used_session_is_dropped() -> None:
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10, max_bindings=2)
    bindings.bind("a", "default/x", 0.0)
    bindings.bind("b", "default/x", 1.0)
    bindings.bind("a", "default/x", 2.0)
    bindings.bind("c", "default/x", 3.0)
    passed = [s for s in ("a", "b", "c") if bindings.endpoint(s, 3.0) is not None]
    assert passed == ["a", "c"]


def test_long_ids_take_no_more_memory_than_short_ones() -> None:
    bindings = SessionBindings(ttl_seconds=300, sweep_seconds=10)
    for last in ("a", "b"):
        bindings.bind("x" * 60_000 + last, f"default/{last}", 0.0)
    assert bindings.endpoint("x" * 60_000 + "b", 0.0) == "default/b"
    assert bindings.endpoint("x" * 60_000 + "a", 0.0) == "default/a"
    assert max(map(len, bindings._bindings)) <= MAX_SESSION_ID


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bind", "ask"]),
            st.sampled_from("abcdef"),
            st.floats(min_value=0, max_value=100),
        ),
        max_size=60,
    )
)
def test_bindings_equal_a_plain_map_with_ages(steps: list[tuple[str, str, float]]) -> None:
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    model: dict[str, tuple[str, float]] = {}
    now = 0.0
    for index, (action, session, at) in enumerate(steps):
        now = max(now, at)
        if action == "bind":
            bindings.bind(session, f"e{index}", at)
            model[session] = (f"e{index}", now)
        known = model.get(session)
        expected = known[0] if known and now - known[1] <= 10 else None
        assert bindings.endpoint(session, at) == expected
        bindings.check_integrity()


@examples(60)
@given(st.permutations([("x", 1), ("y", 1), ("y", 2), ("x", 3), ("z", 3), ("a", 2)]))
def test_replicas_with_the_same_bindings_agree(order: list[tuple[str, int]]) -> None:
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    for endpoint, moves in order:
        bindings.bound_elsewhere("s", endpoint, moves, 1.0, 5.0)
        bindings.check_integrity()
    assert bindings.endpoint("s", 5.0) == "x"


def test_expired_bindings_of_replicas_are_ignored() -> None:
    bindings = SessionBindings(ttl_seconds=10, sweep_seconds=7)
    reported: list[tuple[str, str, int]] = []
    bindings.report_bindings(lambda *binding: reported.append(binding))
    bindings.bound_elsewhere("old", "x", 1, 10.5, 5.0)
    bindings.bound_elsewhere("s", "x", 4, 1.0, 5.0)
    for endpoint in ("x", "y", "y"):
        bindings.bind("s", endpoint, 6.0)
    assert bindings.endpoint("old", 5.0) is None
    assert reported == [("s", "x", 4), ("s", "y", 5), ("s", "y", 5)]
