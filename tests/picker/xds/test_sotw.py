"""The state-of-the-world variant, case by case; the walk is in `test_state_walk`."""

from __future__ import annotations

from picker.xds.state.cache import Cache, ResourceSet, XdsResource, resource_of
from picker.xds.state.sotw import SotwRequest, SotwResponse, SotwSession
from picker.xds.state.subscription import Acknowledgement


def emptied(name: str) -> XdsResource:
    """What is sent for a name that has vanished."""
    return resource_of(name, b"")


def current(**contents: str) -> ResourceSet:
    cache = Cache()
    cache.publish(resource_of(name, text.encode()) for name, text in contents.items())
    assert cache.current is not None
    return cache.current


def told(response: SotwResponse | None) -> dict[str, str] | None:
    """Name → content of a response."""
    return None if response is None else {r.name: r.body.decode() for r in response.resources}


def begun(names: tuple[str, ...], **contents: str) -> SotwSession:
    """A client that has subscribed and taken over the first response."""
    session = SotwSession(emptied)
    assert session.receive(SotwRequest(names)) is Acknowledgement.NONE
    response = session.poll(current(**contents))
    assert session.receive(SotwRequest(names, response.nonce)) is Acknowledgement.ACK
    return session


def test_nothing_is_said_before_anything_is_known_or_asked() -> None:
    """A picker that has just started does not say that there are no endpoints."""
    session = SotwSession(emptied)
    assert session.poll(current(a="1")) is None
    session.receive(SotwRequest(("a",)))
    assert session.poll(None) is None
    assert told(session.poll(current(a="1"))) == {"a": "1"}


def test_what_has_not_changed_is_not_said_again() -> None:
    """Neither after an ACK nor when something else changes."""
    session = begun(("a",), a="1", b="1")
    assert session.poll(current(a="1", b="1")) is None
    assert session.poll(current(a="1", b="2")) is None
    assert told(session.poll(current(a="2", b="2"))) == {"a": "2"}


def test_changes_while_a_response_is_unanswered_become_one() -> None:
    """One response at a time; the next tells the latest."""
    session = SotwSession(emptied)
    session.receive(SotwRequest(("a",)))
    first = session.poll(current(a="1"))
    assert session.poll(current(a="2")) is None
    assert session.poll(current(a="3")) is None
    assert session.receive(SotwRequest(("a",), first.nonce)) is Acknowledgement.ACK
    second = session.poll(current(a="3"))
    assert told(second) == {"a": "3"}
    assert second.nonce != first.nonce
    assert second.version != first.version


def test_what_was_refused_is_not_said_again_until_it_changes() -> None:
    """A client that refuses keeps what it had, and is told when there is something else."""
    session = begun(("a",), a="1")
    bad = session.poll(current(a="bad"))
    assert session.receive(SotwRequest(("a",), bad.nonce, "no")) is Acknowledgement.NACK
    assert session.poll(current(a="bad")) is None
    assert told(session.poll(current(a="1"))) == {"a": "1"}


def test_an_acknowledgement_counts_once() -> None:
    """A further request with the nonce of an answered response only changes the subscription."""
    session = begun(("a",), a="1", b="1")
    assert session.receive(SotwRequest(("a", "b"), "1")) is Acknowledgement.NONE
    assert told(session.poll(current(a="1", b="1"))) == {"a": "1", "b": "1"}


def test_a_stale_request_is_disregarded() -> None:
    """One that was written before the last response was read says nothing, not even names."""
    session = begun(("a",), a="1")
    second = session.poll(current(a="2"))
    for nonce in ("1", "", "7"):
        assert session.receive(SotwRequest(("b",), nonce)) is Acknowledgement.STALE
    assert session.names == {"a"}
    assert session.poll(current(a="3")) is None, "the second response is not answered"
    assert session.receive(SotwRequest(("a",), second.nonce)) is Acknowledgement.ACK


def test_what_has_vanished_is_told_as_empty() -> None:
    """To be absent from a response would mean to stay as it was."""
    session = begun(("a", "b"), a="1", b="1")
    gone = session.poll(current(a="1"))
    assert told(gone) == {"a": "1", "b": ""}
    session.receive(SotwRequest(("a", "b"), gone.nonce))
    assert session.poll(current(a="1")) is None
    assert told(session.poll(current(a="1", b="2"))) == {"a": "1", "b": "2"}


def test_what_nobody_has_is_answered_with_silence_until_it_exists() -> None:
    """A client's own timer decides how long it waits for a resource."""
    session = SotwSession(emptied)
    session.receive(SotwRequest(("nobody",)))
    assert session.poll(current(a="1")) is None
    assert told(session.poll(current(a="1", nobody="1"))) == {"nobody": "1"}


def test_who_names_nothing_wants_everything_until_it_has_named_something() -> None:
    """Afterwards, no names are no subscription; `*` is everything at any time."""
    session = begun((), a="1", b="1")
    assert told(session.poll(current(a="1", b="2"))) == {"a": "1", "b": "2"}
    session = begun(("a",), a="1", b="1")
    session.receive(SotwRequest((), "1"))
    assert session.poll(current(a="2", b="2")) is None
    session.receive(SotwRequest(("*",), "1"))
    assert told(session.poll(current(a="2", b="2"))) == {"a": "2", "b": "2"}


def test_what_is_subscribed_to_again_is_told_again() -> None:
    """The client may have dropped it meanwhile."""
    session = begun(("a",), a="1", b="1")
    session.receive(SotwRequest(("b",), "1"))
    second = session.poll(current(a="1", b="1"))
    assert told(second) == {"b": "1"}
    session.receive(SotwRequest(("b",), "2"))
    session.receive(SotwRequest(("a", "b"), "2"))
    assert told(session.poll(current(a="1", b="1"))) == {"a": "1", "b": "1"}


def test_a_client_that_comes_back_is_answered() -> None:
    """Its first request on a new stream names a nonce of the old one: that is no ACK."""
    session = SotwSession(emptied)
    assert session.receive(SotwRequest(("a",), "7")) is Acknowledgement.NONE
    assert told(session.poll(current(a="1"))) == {"a": "1"}
