"""The encoding of values into fields of limited width, and the decoding of invalid entries."""

import pytest

from picker.framework.attributes import EndpointLoad
from picker.peers import wire
from picker.peers.generated import replica_pb2 as pb
from picker.peers.wire import (
    MAX_COUNT,
    MAX_NAME,
    PICKER,
    Batch,
    Binding,
    EndpointName,
    LoadReport,
    PeerReport,
    Placement,
    decoded_report,
    encoded_batch,
    encoded_report,
)
from picker.prefix.block_hash import packed

A = EndpointName("ns/a", "10.0.0.1:80")


@pytest.mark.parametrize("number", [2**32, 2**70])
def test_a_number_beyond_its_field_is_encoded_as_the_largest(number: int) -> None:
    placed = Placement("p", A, number, packed([0, 1]))
    decoded = decoded_report(encoded_batch(Batch(1, (placed,), (Binding("s", A, "one", number),))))
    assert decoded.batch.bindings[0].moves == decoded.batch.placements[0].capacity == 2**32 - 1


@pytest.mark.parametrize("tokens", [MAX_COUNT + 1, 2**64])
def test_a_load_beyond_the_limit_is_sent_as_the_limit(tokens: int) -> None:
    """One absurd estimate must not make peers reject the others."""
    report = LoadReport(1, True, {(PICKER, "ns/a"): EndpointLoad(1, tokens)})
    decoded = decoded_report(encoded_report(PeerReport(loads=report)))
    assert decoded.loads.loads == {(PICKER, "ns/a"): EndpointLoad(1, MAX_COUNT)}


def test_names_and_loads_are_accepted_up_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed_on(*endpoints: str) -> tuple[list[str], int]:
        loads = {(PICKER, endpoint): EndpointLoad(1, 1) for endpoint in endpoints}
        decoded = decoded_report(encoded_report(PeerReport(loads=LoadReport(1, True, loads)))).loads
        return [endpoint for _, endpoint in decoded.loads], decoded.unusable

    monkeypatch.setattr(wire, "MAX_LOADS", 2)
    assert passed_on("a" * MAX_NAME, "b") == (["a" * MAX_NAME, "b"], 0)
    assert passed_on("a" * (MAX_NAME + 1), "b") == (["b"], 1)
    assert passed_on("a", "b", "c") == (["a", "b"], 1)


def _spoiled(body: pb.Batch, how: str) -> None:
    if how == "plugin":
        body.placements[1].plugin = body.bindings[1].plugin = 7
    elif how == "endpoint":
        body.endpoints[1].host_port = "h" * (MAX_NAME + 1)
    else:
        body.placements[1].hashes = b"seven.."
        body.bindings[1].session = "s" * (MAX_NAME + 1)


@pytest.mark.parametrize("how", ["plugin", "endpoint", "value"])
def test_an_invalid_entry_does_not_affect_others(how: str) -> None:
    other = EndpointName("ns/b", "10.0.0.2:80")
    placed = [Placement("p", one, 9, packed([0, 1, 2])) for one in (A, other, A)]
    bound = [Binding("s", one, "session", 1) for one in (A, other, A)]
    message = pb.Report.FromString(encoded_batch(Batch(5, tuple(placed), tuple(bound))))
    _spoiled(message.batch, how)
    batch = decoded_report(message.SerializeToString()).batch
    assert (batch.sequence, batch.unusable) == (5, 2)
    assert [one.endpoint for one in batch.placements] == [A, A]
    assert batch.bindings == (bound[0], bound[2])


def test_an_impossible_load_does_not_affect_others() -> None:
    message = pb.Report()
    message.loads.version = 3
    for endpoint, requests in (("ns/a", 2), ("ns/b", MAX_COUNT + 1), ("ns/c", 4)):
        message.loads.loads.add(endpoint=endpoint, requests=requests)
    loads = decoded_report(message.SerializeToString()).loads
    assert loads.loads == {
        (PICKER, "ns/a"): EndpointLoad(2, 0),
        (PICKER, "ns/c"): EndpointLoad(4, 0),
    }
    assert loads.unusable == 1
