"""Contact with a server: changes worth a log line, proof of freshness, advice to the operator."""

import pytest

from picker.k8s.api import PODS, POOLS, ApiError, Selection, SilentError, UnreachableError
from picker.k8s.reflector import Contact


@pytest.fixture
def contact() -> Contact:
    return Contact(PODS, Selection("models"))


def test_a_new_contact_has_no_problem(contact: Contact) -> None:
    assert contact.problem(5) is None
    assert contact.silent_seconds(5) is None


def test_a_failure_and_its_end_are_reported_once(contact: Contact) -> None:
    assert contact.failed(10, UnreachableError("refused"))
    assert not contact.failed(20, UnreachableError("reset"))
    assert contact.failed(30, ApiError(500, "InternalError", "oops"))
    assert "(for 25 s; the last known state is in use)" in (contact.problem(35) or "")
    assert contact.answered(40)
    assert contact.problem(40) is None
    assert not contact.answered(41)
    assert contact.silent_seconds(50) == 9


def test_after_silence_only_a_received_event_is_proof(contact: Contact) -> None:
    contact.failed(10, SilentError("nothing came"))
    assert not contact.answered(11)
    contact.failed(12, UnreachableError("reset"))
    assert not contact.answered(13)
    assert "nothing came" in (contact.problem(14) or "")
    assert contact.silent_seconds(14) is None
    assert contact.received(15)
    assert contact.problem(15) is None


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (401, "rejects the credentials; renew them"),
        (403, "grant the verbs list and watch on inferencepools"),
        (404, "install its CustomResourceDefinition"),
        (429, "the API server refuses: 429 Why: words"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, wanted: str) -> None:
    contact = Contact(POOLS, Selection("models"))
    contact.failed(0, ApiError(status, "Why", "words"))
    problem = contact.problem(1) or ""
    assert wanted in problem
    assert problem.startswith("inferencepools.inference.networking.k8s.io in namespace 'models': ")
