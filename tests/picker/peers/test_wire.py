"""Values on the way to other replicas, where fields have a width."""

from __future__ import annotations

import numpy as np
import pytest

from picker.framework.attributes import EndpointLoad
from picker.peers import wire
from picker.peers.wire import (
    MAX_COUNT,
    MAX_NAME,
    PICKER,
    Batch,
    Binding,
    EndpointName,
    LoadReport,
    PeerMessageError,
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
    """A character or an endpoint more is refused."""

    def passed_on(*endpoints: str) -> PeerReport:
        loads = {(PICKER, endpoint): EndpointLoad(1, 1) for endpoint in endpoints}
        report = PeerReport(loads=LoadReport(1, True, loads))
        assert decoded_report(encoded_report(report)).loads == report.loads
        return report

    monkeypatch.setattr(wire, "MAX_LOADS", 2)
    passed_on("a" * MAX_NAME, "b")
    with pytest.raises(PeerMessageError, match=f"a name of {MAX_NAME + 1} characters"):
        passed_on("a" * (MAX_NAME + 1))
    with pytest.raises(PeerMessageError, match="3 loads in one message"):
        passed_on("a", "b", "c")
