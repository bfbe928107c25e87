"""The outbox: batches, their limits, and reports of loads."""

import pytest

from picker.framework.attributes import EndpointLoad
from picker.peers.outbox import LoadBoard, Outbox, OutboxLimits
from picker.peers.wire import PICKER, EndpointName, Loads, PeerReport, Seed, decoded_report
from picker.prefix.block_hash import packed, unpacked

SEED = Seed(1, 2)
A, B = (PICKER, "ns/a"), (PICKER, "ns/b")


def outbox(**limits: int) -> Outbox:
    known = {"ns/a": EndpointName("ns/a", "10.0.0.1:80")}
    return Outbox(known.get, OutboxLimits(**limits))


def fill(box: Outbox, count: int, hashes: int = 8) -> None:
    for number in range(count):
        box.placed("p", "ns/a", packed([number] * hashes), 10)


def flush(box: Outbox, loads: Loads | None = None, now: float = 0.0) -> None:
    box.flush({"p": 5}, loads or {}, now)


def everything(box: Outbox, last: int = 0, now: float = 0.0) -> list[PeerReport]:
    cursor, found = box.open(last), []
    while (message := cursor.next(SEED, now)) is not None:
        found.append(decoded_report(message))
    return found


def test_entries_are_sent_in_batches_of_bounded_size() -> None:
    box = outbox(batch_bytes=1000)
    fill(box, 20)
    flush(box, now=1.0)
    batches = [one.batch for one in everything(box, now=3.5) if one.batch is not None]
    assert [one.sequence for one in batches] == list(range(1, len(batches) + 1))
    assert len(batches) == 3
    sent = [unpacked(place.hashes)[0] for one in batches for place in one.placements]
    assert sent == list(range(20))
    assert batches[0].fingerprints == {"p": 5}
    assert {one.age_seconds for one in everything(box, now=3.5)} == {2.5}


def test_a_peer_resumes_behind_its_last_batch() -> None:
    box = outbox()
    for number in range(3):
        fill(box, 1)
        flush(box, now=float(number))
    sequences = [one.batch.sequence for one in everything(box, 2) if one.batch is not None]
    assert sequences == [3]
    assert [one.batch for one in everything(box, 99)] == [None]


def test_the_oldest_entries_are_dropped_first() -> None:
    box = outbox(log_bytes=2000, pending_bytes=1280, batch_bytes=500)
    fill(box, 30)
    assert box.dropped == 20
    box.check_integrity()
    for _ in range(20):
        fill(box, 5)
        flush(box)
        box.check_integrity()
    assert 0 < box.log_bytes <= 2000
    first = everything(box)[0].batch
    assert first.sequence > 1


def test_an_entry_larger_than_a_batch_is_a_batch_of_its_own() -> None:
    box = outbox(batch_bytes=100)
    fill(box, 2, hashes=2048)
    flush(box)
    assert [len(one.batch.placements) for one in everything(box) if one.batch] == [1, 1]


def test_entries_of_a_departed_endpoint_are_not_sent() -> None:
    box = outbox()
    box.bound("s", "session", "ns/gone", 1)
    flush(box)
    assert box.sequence == 0
    assert [one.batch for one in everything(box)] == [None]


def test_a_new_seed_empties_the_log_and_is_sent_once() -> None:
    box = outbox()
    fill(box, 1)
    flush(box)
    cursor = box.open(box.sequence)
    assert cursor.next(SEED, 0.0) is not None
    box.reseeded()
    message = cursor.next(SEED, 0.0)
    assert decoded_report(message).seed == SEED
    assert cursor.next(SEED, 0.0) is None
    assert [(one.batch, one.seed) for one in everything(box)] == [(None, None)]


def test_loads_are_sent_whole_then_as_changes_then_whole_again() -> None:
    box = outbox()
    flush(box, {A: EndpointLoad(1, 5)})
    cursor = box.open(0)
    reports = []
    for now, loads in (
        (0.0, {A: EndpointLoad(1, 5)}),
        (0.1, {A: EndpointLoad(1, 5)}),
        (0.2, {B: EndpointLoad(2)}),
        (2.5, {B: EndpointLoad(2)}),
    ):
        flush(box, loads, now)
        message = cursor.next(SEED, now)
        report = None if message is None else decoded_report(message).loads
        reports.append(None if report is None else (report.is_whole, dict(report.loads)))
    assert reports == [
        (True, {A: EndpointLoad(1, 5)}),
        None,
        (False, {A: EndpointLoad(), B: EndpointLoad(2)}),
        (True, {B: EndpointLoad(2)}),
    ]


def test_a_board_forgets_loads_that_ended_long_ago() -> None:
    board = LoadBoard()
    for number in range(1, 5000):
        board.update({(PICKER, f"ns/{number}"): EndpointLoad(1)})
    assert board.since(board.version) is None
    recent, ancient = board.since(board.version - 3), board.since(1)
    assert (recent.is_whole, len(recent.loads)) == (False, 4)
    assert (ancient.is_whole, len(ancient.loads)) == (True, 1)
    assert len(board._changed) < 2500


@pytest.mark.parametrize("session", ["s", "\ud800 half a character", "ü" * 500])
def test_sessions_of_any_spelling_are_sent(session: str) -> None:
    box = outbox()
    box.bound("s", session, "ns/a", 3)
    flush(box)
    batch = everything(box)[0].batch
    assert [(one.plugin, one.moves) for one in batch.bindings] == [("s", 3)]
