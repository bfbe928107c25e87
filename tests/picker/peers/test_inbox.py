"""The inbox: batches, loads, silence and limits."""

from picker.framework.attributes import EndpointLoad
from picker.peers.inbox import Inbox, InboxLimits
from picker.peers.wire import PICKER, LoadReport

PEER, OTHER = b"p" * 16, b"q" * 16
A, B = (PICKER, "ns/a"), (PICKER, "ns/b")


def report(version: int, whole: bool = True, **counts: int) -> LoadReport:
    loads = {(PICKER, f"ns/{name}"): EndpointLoad(count) for name, count in counts.items()}
    return LoadReport(version, whole, loads)


def test_each_batch_counts_once_in_any_order() -> None:
    inbox = Inbox()
    taken = [inbox.take_batch(PEER, number, 0.0) for number in (3, 3, 6, 4, 4, 5, 1)]
    assert taken == [True, False, True, True, False, True, True]
    assert inbox.missed == 2
    assert inbox.greet(PEER, 0.0) == 6
    assert inbox.greet(OTHER, 0.0) == 0


def test_gaps_take_little_memory() -> None:
    inbox = Inbox()
    for number in range(1, 2_000_000, 1500):
        inbox.take_batch(PEER, number, 0.0)
        inbox.check_integrity()


def test_loads_add_up_over_peers_and_the_newest_counts() -> None:
    inbox = Inbox()
    assert inbox.take_loads(PEER, report(1, a=1, b=2), 0.0)
    assert inbox.take_loads(OTHER, report(9, a=4), 0.0)
    assert inbox.take_loads(PEER, report(3, False, b=0), 0.0)
    assert not inbox.take_loads(PEER, report(2, a=7), 0.0)
    assert not inbox.take_loads(PEER, report(3, False, a=7), 0.0)
    assert inbox.loads() == {PICKER: {"ns/a": EndpointLoad(5)}}
    assert inbox.take_loads(PEER, report(3, b=1), 0.0)
    assert inbox.loads() == {PICKER: {"ns/a": EndpointLoad(4), "ns/b": EndpointLoad(1)}}


def test_a_silent_peer_has_no_load_and_later_is_forgotten() -> None:
    inbox = Inbox(InboxLimits(silence_seconds=5.0, memory_seconds=60.0))
    inbox.take_loads(PEER, report(7, a=1), 0.0)
    inbox.take_batch(PEER, 4, 0.0)
    assert not inbox.expire(5.0)
    assert inbox.expire(5.1)
    assert not inbox.expire(5.2)
    assert (inbox.loads(), inbox.expired) == ({}, 1)
    assert inbox.take_loads(PEER, report(7, a=1), 6.0)
    assert inbox.greet(PEER, 6.0) == 4
    inbox.expire(66.0)
    assert inbox.known == 1
    inbox.expire(66.1)
    assert inbox.known == 0


def test_the_limits_on_peers_and_loads_hold() -> None:
    inbox = Inbox(InboxLimits(max_peers=3, max_loads=2))
    for number in range(5):
        inbox.take_loads(bytes([number]) * 16, report(1, a=1, b=1, c=1), float(number))
        inbox.check_integrity()
    assert inbox.known == 3
    assert sum(load.requests for load in inbox.loads()[PICKER].values()) == 6


def test_the_eviction_of_a_peer_with_loads_is_reported() -> None:
    """The sums change although no load arrived."""
    inbox = Inbox(InboxLimits(max_peers=1))
    inbox.take_loads(PEER, report(1, a=1), 0.0)
    inbox.greet(OTHER, 0.0)
    assert inbox.loads() == {}
    assert inbox.expire(0.0)
    assert not inbox.expire(0.0)
