"""The state-of-the-world variant, case by case; the walk is in `test_state_walk`."""

from picker.xds.state.cache import Cache, ResourceSet, XdsResource, resource_of
from picker.xds.state.sotw import SotwRequest, SotwResponse, SotwSession
from picker.xds.state.subscription import Acknowledgement


def emptied(name: str) -> XdsResource:
    return resource_of(name, b"")


def current(*awaited: str, **contents: str) -> ResourceSet:
    cache = Cache(awaited)
    cache.publish(resource_of(name, text.encode()) for name, text in contents.items())
    assert cache.current is not None
    return cache.current


def contents(response: SotwResponse | None) -> dict[str, str] | None:
    return None if response is None else {r.name: r.body.decode() for r in response.resources}


def begun(names: tuple[str, ...], **contents: str) -> SotwSession:
    session = SotwSession(emptied)
    assert session.receive(SotwRequest(names)) is Acknowledgement.NONE
    response = session.poll(current(**contents))
    assert session.receive(SotwRequest(names, response.nonce)) is Acknowledgement.ACK
    return session


def test_nothing_is_sent_before_the_set_is_known_and_requested() -> None:
    session = SotwSession(emptied)
    assert session.poll(current(a="1")) is None
    session.receive(SotwRequest(("a",)))
    assert session.poll(None) is None
    assert contents(session.poll(current(a="1"))) == {"a": "1"}


def test_an_unchanged_state_is_not_sent_again() -> None:
    session = begun(("a",), a="1", b="1")
    assert session.poll(current(a="1", b="1")) is None
    assert session.poll(current(a="1", b="2")) is None
    assert contents(session.poll(current(a="2", b="2"))) == {"a": "2"}


def test_changes_while_a_response_is_unanswered_become_one() -> None:
    session = SotwSession(emptied)
    session.receive(SotwRequest(("a",)))
    first = session.poll(current(a="1"))
    assert session.poll(current(a="2")) is None
    assert session.poll(current(a="3")) is None
    assert session.receive(SotwRequest(("a",), first.nonce)) is Acknowledgement.ACK
    second = session.poll(current(a="3"))
    assert contents(second) == {"a": "3"}
    assert second.nonce != first.nonce
    assert second.version != first.version


def test_a_rejected_state_is_not_sent_again_until_it_changes() -> None:
    session = begun(("a",), a="1")
    bad = session.poll(current(a="bad"))
    assert session.receive(SotwRequest(("a",), bad.nonce, "no")) is Acknowledgement.NACK
    assert session.poll(current(a="bad")) is None
    assert contents(session.poll(current(a="1"))) == {"a": "1"}


def test_an_acknowledgement_counts_once() -> None:
    session = begun(("a",), a="1", b="1")
    assert session.receive(SotwRequest(("a", "b"), "1")) is Acknowledgement.NONE
    assert contents(session.poll(current(a="1", b="1"))) == {"a": "1", "b": "1"}


def test_a_stale_request_is_ignored() -> None:
    session = begun(("a",), a="1")
    second = session.poll(current(a="2"))
    for nonce in ("1", "", "7"):
        assert session.receive(SotwRequest(("b",), nonce)) is Acknowledgement.STALE
    assert session.names == {"a"}
    assert session.poll(current(a="3")) is None, "the second response is not answered"
    assert session.receive(SotwRequest(("a",), second.nonce)) is Acknowledgement.ACK


def test_a_vanished_resource_is_sent_as_empty() -> None:
    session = begun(("a", "b"), a="1", b="1")
    gone = session.poll(current(a="1"))
    assert contents(gone) == {"a": "1", "b": ""}
    session.receive(SotwRequest(("a", "b"), gone.nonce))
    assert session.poll(current(a="1")) is None
    assert contents(session.poll(current(a="1", b="2"))) == {"a": "1", "b": "2"}


def test_a_missing_resource_is_answered_with_silence_until_it_exists() -> None:
    """The client's own timer decides how long it waits."""
    session = SotwSession(emptied)
    session.receive(SotwRequest(("nobody",)))
    assert session.poll(current(a="1")) is None
    assert contents(session.poll(current(a="1", nobody="1"))) == {"nobody": "1"}


def test_a_request_without_names_subscribes_to_all_until_the_client_names_some() -> None:
    session = begun((), a="1", b="1")
    assert contents(session.poll(current(a="1", b="2"))) == {"a": "1", "b": "2"}
    session = begun(("a",), a="1", b="1")
    session.receive(SotwRequest((), "1"))
    assert session.poll(current(a="2", b="2")) is None
    session.receive(SotwRequest(("*",), "1"))
    assert contents(session.poll(current(a="2", b="2"))) == {"a": "2", "b": "2"}


def test_a_resource_is_sent_again_after_a_new_subscription() -> None:
    """The client may have dropped it in between."""
    session = begun(("a",), a="1", b="1")
    session.receive(SotwRequest(("b",), "1"))
    second = session.poll(current(a="1", b="1"))
    assert contents(second) == {"b": "1"}
    session.receive(SotwRequest(("b",), "2"))
    session.receive(SotwRequest(("a", "b"), "2"))
    assert contents(session.poll(current(a="1", b="1"))) == {"a": "1", "b": "1"}


def test_a_client_that_reconnects_gets_a_response() -> None:
    """Its first request on the new stream has a nonce of the old one, which is no ACK."""
    session = SotwSession(emptied)
    assert session.receive(SotwRequest(("a",), "7")) is Acknowledgement.NONE
    assert contents(session.poll(current(a="1"))) == {"a": "1"}


def test_nothing_is_sent_about_an_awaited_name() -> None:
    """A resource that is absent from a response stays."""
    session = SotwSession(emptied)
    session.receive(SotwRequest(("a", "b")))
    assert contents(session.poll(current("b", a="1"))) == {"a": "1"}
