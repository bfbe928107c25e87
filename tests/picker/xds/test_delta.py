"""The incremental variant, case by case; the walk is in `test_state_walk`."""

import pytest

from picker.xds.state.cache import Cache, ResourceSet, resource_of
from picker.xds.state.delta import DeltaRequest, DeltaResponse, DeltaSession
from picker.xds.state.subscription import Acknowledgement


def current(*awaited: str, **contents: str) -> ResourceSet:
    cache = Cache(awaited)
    cache.publish(resource_of(name, text.encode()) for name, text in contents.items())
    assert cache.current is not None
    return cache.current


def contents(response: DeltaResponse | None) -> tuple[dict[str, str], set[str]] | None:
    if response is None:
        return None
    return {r.name: r.body.decode() for r in response.resources}, set(response.removed)


def begun(*names: str, **contents: str) -> DeltaSession:
    session = DeltaSession()
    assert session.receive(DeltaRequest(names)) is Acknowledgement.NONE
    response = session.poll(current(**contents))
    assert session.receive(DeltaRequest(nonce=response.nonce)) is Acknowledgement.ACK
    return session


def version(text: str) -> str:
    return resource_of("a", text.encode()).version


def test_nothing_is_sent_before_the_set_is_known_and_requested() -> None:
    session = DeltaSession()
    assert session.poll(current(a="1")) is None
    session.receive(DeltaRequest(("a",), initial_versions={"a": "old"}))
    assert session.poll(None) is None
    assert contents(session.poll(current(a="1"))) == ({"a": "1"}, set())


def test_only_changed_resources_are_sent() -> None:
    session = begun("a", "b", "c", a="1", b="1", c="1")
    assert session.poll(current(a="1", b="1", c="1", d="1")) is None
    assert contents(session.poll(current(a="2", b="1", d="1"))) == ({"a": "2"}, {"c"})


def test_changes_while_a_response_is_unanswered_become_one() -> None:
    session = DeltaSession()
    session.receive(DeltaRequest(("a",)))
    first = session.poll(current(a="1"))
    assert session.poll(current(a="2")) is None
    assert session.receive(DeltaRequest(nonce=first.nonce)) is Acknowledgement.ACK
    assert contents(session.poll(current(a="3"))) == ({"a": "3"}, set())


def test_a_rejected_resource_is_not_sent_again_until_it_changes() -> None:
    session = begun("a", a="1")
    bad = session.poll(current(a="bad"))
    assert session.receive(DeltaRequest(nonce=bad.nonce, problem="no")) is Acknowledgement.NACK
    assert session.poll(current(a="bad")) is None
    assert contents(session.poll(current(a="1"))) == ({"a": "1"}, set())


def test_a_client_that_reconnects_receives_what_it_has_missed() -> None:
    has = {"a": version("1"), "b": version("1"), "c": version("1"), "x": version("1")}
    session = DeltaSession()
    session.receive(DeltaRequest(("a", "b", "c"), initial_versions=has, nonce="7"))
    assert contents(session.poll(current(a="1", b="2"))) == ({"b": "2"}, {"c"})
    session = DeltaSession()
    session.receive(DeltaRequest(("a",), initial_versions=has))
    assert session.poll(current(a="1", b="2")) is None


def test_a_missing_resource_is_reported_once() -> None:
    session = begun("a", "nobody", a="1")
    assert session.poll(current(a="1")) is None
    assert contents(session.poll(current(a="1", nobody="1"))) == ({"nobody": "1"}, set())


def test_a_resource_is_sent_again_after_a_new_subscription() -> None:
    """A client may have dropped it silently."""
    session = begun("a", a="1")
    session.receive(DeltaRequest(("a", "nobody")))
    assert contents(session.poll(current(a="1"))) == ({"a": "1"}, {"nobody"})
    session.receive(DeltaRequest(("nobody",), nonce="2"))
    assert contents(session.poll(current(a="1"))) == ({}, {"nobody"})


def test_nothing_is_sent_about_unsubscribed_names() -> None:
    session = begun("a", "b", a="1", b="1")
    session.receive(DeltaRequest(unsubscribe=("a", "unknown")))
    assert session.poll(current(a="2", b="1")) is None
    assert session.poll(current(b="1")) is None
    session.receive(DeltaRequest(("a",)))
    assert contents(session.poll(current(b="1"))) == ({}, {"a"})


def test_a_stale_nonce_changes_the_subscription_but_acknowledges_nothing() -> None:
    session = begun("a", a="1", b="1")
    second = session.poll(current(a="2", b="1"))
    assert session.receive(DeltaRequest(("b",), nonce="1")) is Acknowledgement.STALE
    assert session.poll(current(a="3", b="1")) is None, "the second response is not answered"
    assert session.receive(DeltaRequest(nonce=second.nonce)) is Acknowledgement.ACK
    assert contents(session.poll(current(a="2", b="1"))) == ({"b": "1"}, set())


def test_a_first_request_without_names_subscribes_to_all() -> None:
    session = begun(a="1", b="1")
    second = session.poll(current(a="1", c="1"))
    assert contents(second) == ({"c": "1"}, {"b"})
    session.receive(DeltaRequest(("a",), nonce="2"))
    third = session.poll(current(a="1", c="1"))
    assert contents(third) == ({"a": "1"}, set())
    session.receive(DeltaRequest(unsubscribe=("*",), nonce="3"))
    assert session.poll(current(a="1", c="2")) is None
    assert contents(session.poll(current(a="2", c="2"))) == ({"a": "2"}, set())


def test_an_unsubscribed_name_is_sent_again_to_a_wildcard_client() -> None:
    """The client drops it at once, so it needs it again."""
    session = begun("*", "a", a="1", b="1")
    session.receive(DeltaRequest(unsubscribe=("a",)))
    assert contents(session.poll(current(a="1", b="1"))) == ({"a": "1"}, set())


@pytest.mark.parametrize("had", [{}, {"b": "old"}], ids=["new", "again"])
def test_nothing_is_sent_about_an_awaited_name(had: dict[str, str]) -> None:
    session = DeltaSession()
    session.receive(DeltaRequest(("a", "b", "z"), initial_versions=had))
    response = session.poll(current("b", a="1"))
    assert contents(response) == ({"a": "1"}, {"z"})
    session.receive(DeltaRequest(nonce=response.nonce))
    assert session.poll(current("b", a="1")) is None
    assert contents(session.poll(current(a="1", b="1"))) == ({"b": "1"}, set())


def test_a_wildcard_client_keeps_its_awaited_resources() -> None:
    session = DeltaSession()
    session.receive(DeltaRequest(initial_versions={"b": "old", "z": "old"}))
    assert contents(session.poll(current("b", a="1"))) == ({"a": "1"}, {"z"})


def test_a_repeated_subscription_is_answered_once_the_pool_is_current() -> None:
    """This holds even with the same version: the client may have dropped the content."""
    session = DeltaSession()
    has = version("1")
    session.receive(DeltaRequest(("a", "b"), initial_versions={"b": has}))
    response = session.poll(current("b", a="1"))
    assert contents(response) == ({"a": "1"}, set())
    session.receive(DeltaRequest(("b",), nonce=response.nonce))
    response = session.poll(current("b", a="2"))
    assert contents(response) == ({"a": "2"}, set())
    session.receive(DeltaRequest(nonce=response.nonce))
    assert contents(session.poll(current(a="2", b="1"))) == ({"b": "1"}, set())


def test_the_removal_of_a_published_name_is_sent() -> None:
    session = DeltaSession()
    session.receive(DeltaRequest(("a", "b")))
    assert session.poll(current("a", "b")) is None
    response = session.poll(current(a="1", b="1"))
    session.receive(DeltaRequest(nonce=response.nonce))
    assert contents(session.poll(current(a="1"))) == ({}, {"b"})
