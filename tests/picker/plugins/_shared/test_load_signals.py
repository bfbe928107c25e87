"""Load signals: own counts are a lower bound, and unknown is not idle."""

import pytest

from picker.framework.attributes import EndpointLoad
from picker.plugins._shared.load_signals import (
    least_first,
    own_requests,
    running_loads,
    running_requests,
    waiting_loads,
    waiting_requests,
)
from picker.types import Candidate, Endpoint, EndpointMetrics


def _candidate(waiting: int | None, running: int = 0, inflight: int = 0) -> Candidate:
    metrics = None if waiting is None else EndpointMetrics(waiting, running)
    return Candidate(Endpoint("w", "10.0.0.1", 8000), metrics, inflight)


@pytest.mark.parametrize(
    ("candidate", "waiting", "running"),
    [
        (_candidate(3, 2), 3, 2),
        (_candidate(0, 0, inflight=4), 4, 4),
        (_candidate(1, 3, inflight=4), 1, 3),
        (_candidate(1, 2, inflight=9), 7, 8),
        (_candidate(None, inflight=4), None, None),
    ],
)
def test_unseen_own_requests_are_the_lower_bound_of_a_signal(
    candidate: Candidate, waiting: int | None, running: int | None
) -> None:
    assert waiting_requests(candidate) == waiting
    assert running_requests(candidate) == running
    known = _candidate(2)
    assert waiting_loads([candidate, known]) == [waiting, 2]
    assert running_loads([candidate, known]) == [running, 0]


def test_own_counts_are_the_loads_while_no_load_is_known() -> None:
    unknown = [_candidate(None, inflight=count) for count in (4, 0)]
    assert waiting_loads(unknown) == [4, 0]
    assert waiting_loads([*unknown, _candidate(2)]) == [None, None, 2]
    assert waiting_loads([]) == []


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        ([10, 5, 0], [0.0, 0.5, 1.0]),
        ([3, 3], [1.0, 1.0]),
        ([3, None, 1], [0.0, 0.0, 1.0]),
        ([3, None], [1.0, 0.0]),
        ([None], [0.0]),
        ([], []),
        ([-1e308, 1e308, 0.0], [1.0, 0.0, 0.5]),
        ([5e-324, 0.0], [0.0, 1.0]),
    ],
)
def test_the_least_scores_one(values: list[float | None], scores: list[float]) -> None:
    assert least_first(values) == scores


def test_own_requests_are_the_greater_of_both_counts() -> None:
    counted = {"default/w": EndpointLoad(3, 10)}
    assert own_requests(_candidate(0, inflight=1), counted) == 3
    assert own_requests(_candidate(0, inflight=5), counted) == 5
    assert own_requests(_candidate(0, inflight=5), {}) == 5
    assert own_requests(_candidate(0, inflight=5), None) == 5
