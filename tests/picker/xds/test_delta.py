"""The incremental variant, case by case; the walk is in `test_state_walk`."""

from __future__ import annotations

from picker.xds.state.cache import Cache, ResourceSet, resource_of
from picker.xds.state.delta import DeltaRequest, DeltaResponse, DeltaSession
from picker.xds.state.subscription import Acknowledgement


def current(**contents: str) -> ResourceSet:
    cache = Cache()
    cache.publish(resource_of(name, text.encode()) for name, text in contents.items())
    assert cache.current is not None
    return cache.current


def told(response: DeltaResponse | None) -> tuple[dict[str, str], set[str]] | None:
    """Name → content, and what does not exist."""
    if response is None:
        return None
    return {r.name: r.body.decode() for r in response.resources}, set(response.removed)


def begun(*names: str, **contents: str) -> DeltaSession:
    """A client that has subscribed and taken over the first response."""
    session = DeltaSession()
    assert session.receive(DeltaRequest(names)) is Acknowledgement.NONE
    response = session.poll(current(**contents))
    assert session.receive(DeltaRequest(nonce=response.nonce)) is Acknowledgement.ACK
    return session


def version(text: str) -> str:
    return resource_of("a", text.encode()).version


def test_nothing_is_said_before_anything_is_known_or_asked() -> None:
    """Above all not that something does not exist."""
    session = DeltaSession()
    assert session.poll(current(a="1")) is None
    session.receive(DeltaRequest(("a",), initial_versions={"a": "old"}))
    assert session.poll(None) is None
    assert told(session.poll(current(a="1"))) == ({"a": "1"}, set())


def test_only_what_has_changed_is_said() -> None:
    """Of several resources the others are left out, and what is gone is named."""
    session = begun("a", "b", "c", a="1", b="1", c="1")
    assert session.poll(current(a="1", b="1", c="1", d="1")) is None
    assert told(session.poll(current(a="2", b="1", d="1"))) == ({"a": "2"}, {"c"})


def test_changes_while_a_response_is_unanswered_become_one() -> None:
    """One response at a time; the next tells the latest."""
    session = DeltaSession()
    session.receive(DeltaRequest(("a",)))
    first = session.poll(current(a="1"))
    assert session.poll(current(a="2")) is None
    assert session.receive(DeltaRequest(nonce=first.nonce)) is Acknowledgement.ACK
    assert told(session.poll(current(a="3"))) == ({"a": "3"}, set())


def test_what_was_refused_is_not_said_again_until_it_changes() -> None:
    """A client that refuses keeps what it had."""
    session = begun("a", a="1")
    bad = session.poll(current(a="bad"))
    assert session.receive(DeltaRequest(nonce=bad.nonce, problem="no")) is Acknowledgement.NACK
    assert session.poll(current(a="bad")) is None
    assert told(session.poll(current(a="1"))) == ({"a": "1"}, set())


def test_a_client_that_comes_back_is_told_what_it_has_missed() -> None:
    """What it has is not told again, what is gone is; what it does not want is not spoken of."""
    has = {"a": version("1"), "b": version("1"), "c": version("1"), "x": version("1")}
    session = DeltaSession()
    session.receive(DeltaRequest(("a", "b", "c"), initial_versions=has, nonce="7"))
    assert told(session.poll(current(a="1", b="2"))) == ({"b": "2"}, {"c"})
    session = DeltaSession()
    session.receive(DeltaRequest(("a",), initial_versions=has))
    assert session.poll(current(a="1", b="2")) is None


def test_what_does_not_exist_is_said_once() -> None:
    """A client need not wait for it; when it comes into being it is told."""
    session = begun("a", "nobody", a="1")
    assert session.poll(current(a="1")) is None
    assert told(session.poll(current(a="1", nobody="1"))) == ({"nobody": "1"}, set())


def test_who_subscribes_again_is_told_again() -> None:
    """A client may have forgotten what it has, and need not say so."""
    session = begun("a", a="1")
    session.receive(DeltaRequest(("a", "nobody")))
    assert told(session.poll(current(a="1"))) == ({"a": "1"}, {"nobody"})
    session.receive(DeltaRequest(("nobody",), nonce="2"))
    assert told(session.poll(current(a="1"))) == ({}, {"nobody"})


def test_what_was_unsubscribed_from_is_not_said() -> None:
    """Not even that it is gone."""
    session = begun("a", "b", a="1", b="1")
    session.receive(DeltaRequest(unsubscribe=("a", "unknown")))
    assert session.poll(current(a="2", b="1")) is None
    assert session.poll(current(b="1")) is None
    session.receive(DeltaRequest(("a",)))
    assert told(session.poll(current(b="1"))) == ({}, {"a"})


def test_a_subscription_changes_also_with_a_stale_nonce() -> None:
    """The client will not say it again; but it acknowledges no response."""
    session = begun("a", a="1", b="1")
    second = session.poll(current(a="2", b="1"))
    assert session.receive(DeltaRequest(("b",), nonce="1")) is Acknowledgement.STALE
    assert session.poll(current(a="3", b="1")) is None, "the second response is not answered"
    assert session.receive(DeltaRequest(nonce=second.nonce)) is Acknowledgement.ACK
    assert told(session.poll(current(a="2", b="1"))) == ({"b": "1"}, set())


def test_who_names_nothing_first_wants_everything() -> None:
    """Until it unsubscribes from `*`; a name that it had named besides stays."""
    session = begun(a="1", b="1")
    second = session.poll(current(a="1", c="1"))
    assert told(second) == ({"c": "1"}, {"b"})
    session.receive(DeltaRequest(("a",), nonce="2"))
    third = session.poll(current(a="1", c="1"))
    assert told(third) == ({"a": "1"}, set())
    session.receive(DeltaRequest(unsubscribe=("*",), nonce="3"))
    assert session.poll(current(a="1", c="2")) is None
    assert told(session.poll(current(a="2", c="2"))) == ({"a": "2"}, set())


def test_a_name_that_is_given_up_is_still_one_of_all() -> None:
    """The client drops it at once, so a client of everything is sent it again."""
    session = begun("*", "a", a="1", b="1")
    session.receive(DeltaRequest(unsubscribe=("a",)))
    assert told(session.poll(current(a="1", b="1"))) == ({"a": "1"}, set())
