"""Candidates as changes: the reader restores exactly those that the scheduler saw."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.framework.attributes import Topology
from picker.recording.candidates import CandidateDeltas, CandidateMemory
from picker.recording.lines import CandidateChange
from picker.types import Candidate, Endpoint, EndpointMetrics
from tests.depth import examples


def candidate(name: str, **changes: object) -> Candidate:
    number = ord(name[-1]) % 200
    return replace(Candidate(Endpoint(name, f"10.0.0.{number}", 8000)), **changes)


def from_file(change: CandidateChange) -> CandidateChange:
    encoder = msgspec.json.Encoder(enc_hook=dict)
    return msgspec.json.decode(encoder.encode(change), type=CandidateChange)


METRICS = st.builds(EndpointMetrics, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1))
CANDIDATES = st.builds(
    lambda name, metrics, last, is_fresh, load, zone: candidate(
        name,
        metrics=last if is_fresh else metrics,
        last_metrics=last,
        inflight_requests=load,
        attributes={"Topology/t": Topology(zone=zone)} if zone else {},
    ),
    st.sampled_from("abcdef"),
    st.none() | METRICS,
    st.none() | METRICS,
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(["", "x", "y"]),
)


class _Walk:
    def __init__(self) -> None:
        self.deltas, self.memory = CandidateDeltas(), CandidateMemory()
        self.pool: dict[str, Candidate] = {}

    def decide(self, changed: list[Candidate], shown: list[str]) -> None:
        self.pool.update({one.endpoint.name: one for one in changed})
        seen = [self.pool[name] for name in shown if name in self.pool]
        changes, order = self.deltas.of(seen)
        assert list(self.memory.after([from_file(one) for one in changes], order)) == seen


@examples(120)
@given(
    st.lists(
        st.tuples(
            st.lists(CANDIDATES, max_size=3),
            st.permutations("abcdef").flatmap(
                lambda order: st.integers(0, 6).map(lambda count: order[:count])
            ),
            st.sampled_from([None, *"abcdef"]),
        ),
        max_size=12,
    )
)
def test_changes_restore_the_candidates_of_every_decision(
    steps: list[tuple[list[Candidate], list[str], str | None]],
) -> None:
    walk = _Walk()
    for changed, shown, leaves in steps:
        walk.decide(changed, shown)
        if leaves is not None:
            walk.pool.pop(leaves, None)
            walk.deltas.forget(f"default/{leaves}")
            walk.memory.forget(f"default/{leaves}")
    walk.decide([], list("fedcba"))


def test_unchanged_candidates_are_not_repeated() -> None:
    deltas, pool = CandidateDeltas(), [candidate("a", metrics=EndpointMetrics()), candidate("b")]
    assert [one.key for one in deltas.of(pool)[0]] == ["default/a", "default/b"]
    assert deltas.of(list(pool)) == ((), None)
    busy = [replace(pool[0], inflight_requests=1), pool[1]]
    assert deltas.of(busy) == ((CandidateChange("default/a", inflight=1),), None)


def test_metrics_that_json_cannot_hold_are_left_out_and_named() -> None:
    deltas = CandidateDeltas()
    changes, _ = deltas.of([candidate("a", metrics=EndpointMetrics(waiting_requests=2**80))])
    assert changes[0].metrics is None
    assert deltas.not_replayable == ("EndpointMetrics",)
    deltas.of([candidate("b", attributes={"odd/x": object()})])
    assert deltas.not_replayable == ("odd/x",)


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (CandidateChange("default/a"), None),
        (CandidateChange("default/a", endpoint=Endpoint("a", "10.0.0.1", 1), metrics="last"), None),
        (CandidateChange("default/a", endpoint=Endpoint("a", "10.0.0.1", 1)), ("default/b",)),
    ],
)
def test_an_incomplete_change_is_an_error(
    change: CandidateChange, order: tuple[str, ...] | None
) -> None:
    with pytest.raises(ValueError, match="default/"):
        CandidateMemory().after((change,), order)
