"""Values on the way to other replicas, where fields have a width."""

from __future__ import annotations

import numpy as np
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

A = EndpointName("ns/a", "10.0.0.1:80")


@pytest.mark.parametrize("number", [2**32, 2**70])
def test_a_number_that_is_too_large_for_its_field_is_told_as_the_largest(number: int) -> None:
    """A session whose moves a peer has told as the most there can be, and which moves here."""
    placed = Placement("p", A, number, np.arange(2, dtype=np.uint64))
    told = decoded_report(encoded_batch(Batch(1, (placed,), (Binding("s", A, "one", number),))))
    assert told.batch.bindings[0].moves == told.batch.placements[0].capacity == 2**32 - 1


@pytest.mark.parametrize("tokens", [MAX_COUNT + 1, 2**64])
def test_what_peers_would_not_believe_is_told_as_the_most_that_they_do(tokens: int) -> None:
    """One estimate that is out of all reason must not make peers refuse everything else."""
    report = LoadReport(1, True, {(PICKER, "ns/a"): EndpointLoad(1, tokens)})
    told = decoded_report(encoded_report(PeerReport(loads=report)))
    assert told.loads.loads == {(PICKER, "ns/a"): EndpointLoad(1, MAX_COUNT)}


def test_names_and_loads_are_taken_up_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character or an endpoint more is left out and counted."""

    def passed_on(*endpoints: str) -> tuple[list[str], int]:
        loads = {(PICKER, endpoint): EndpointLoad(1, 1) for endpoint in endpoints}
        told = decoded_report(encoded_report(PeerReport(loads=LoadReport(1, True, loads)))).loads
        return [endpoint for _, endpoint in told.loads], told.unusable

    monkeypatch.setattr(wire, "MAX_LOADS", 2)
    assert passed_on("a" * MAX_NAME, "b") == (["a" * MAX_NAME, "b"], 0)
    assert passed_on("a" * (MAX_NAME + 1), "b") == (["b"], 1)
    assert passed_on("a", "b", "c") == (["a", "b"], 1)


def _spoiled(body: pb.Batch, how: str) -> None:
    """Make the second entry of each kind unusable."""
    if how == "plugin":
        body.placements[1].plugin = body.bindings[1].plugin = 7
    elif how == "endpoint":
        body.endpoints[1].host_port = "h" * (MAX_NAME + 1)
    else:
        body.placements[1].hashes = b"seven.."
        body.bindings[1].session = "s" * (MAX_NAME + 1)


@pytest.mark.parametrize("how", ["plugin", "endpoint", "value"])
def test_an_entry_that_makes_no_sense_spoils_no_other(how: str) -> None:
    """Of placements and of bindings: by what it refers to, and by what it says."""
    other = EndpointName("ns/b", "10.0.0.2:80")
    placed = [Placement("p", one, 9, np.arange(3, dtype=np.uint64)) for one in (A, other, A)]
    bound = [Binding("s", one, "session", 1) for one in (A, other, A)]
    message = pb.Report.FromString(encoded_batch(Batch(5, tuple(placed), tuple(bound))))
    _spoiled(message.batch, how)
    batch = decoded_report(message.SerializeToString()).batch
    assert (batch.sequence, batch.unusable) == (5, 2)
    assert [one.endpoint for one in batch.placements] == [A, A]
    assert batch.bindings == (bound[0], bound[2])


def test_a_load_that_no_replica_has_spoils_no_other() -> None:
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
