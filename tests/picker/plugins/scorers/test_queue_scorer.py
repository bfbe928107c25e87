"""queue-scorer: short queues first, and unknown is not idle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.scorers.queue_scorer import QueueScorer
from picker.types import Candidate, InferenceRequest


@pytest.fixture
def scores(request_for: Callable[..., InferenceRequest]) -> Callable[..., list[float]]:
    def score(*candidates: Candidate) -> list[float]:
        return list(QueueScorer().score(request_for(), candidates, Attributes()))

    return score


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ([10, 5, 0], [0.0, 0.5, 1.0]),
        ([3, 3], [1.0, 1.0]),
        ([0, 0, 0], [1.0, 1.0, 1.0]),
        ([7], [1.0]),
    ],
)
def test_the_score_is_the_distance_from_the_longest_queue(
    scores: Callable[..., list[float]],
    candidate: Callable[..., Candidate],
    queues: list[int],
    expected: list[float],
) -> None:
    """(max − q) / (max − min); equal queues are all best."""
    assert scores(*(candidate(waiting_requests=queue) for queue in queues)) == expected


def test_requests_no_scrape_has_seen_count_as_waiting(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """A burst between two scrapes spreads; what the scrape saw running is not counted twice."""
    burst = candidate(inflight=4)
    seen = candidate(inflight=4, running_requests=4)
    half = candidate(inflight=4, running_requests=2)
    assert scores(burst, half, seen) == [0.0, 0.5, 1.0]


def test_the_own_count_is_only_a_lower_bound(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """Other pickers send requests too."""
    assert scores(candidate(waiting_requests=8, inflight=1), candidate()) == [0.0, 1.0]


def test_unknown_load_scores_like_the_worst(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """Also when all known queues are equal, and without moving the others' scores."""
    unknown = candidate(known=False, inflight=50)
    assert scores(unknown, candidate(), candidate()) == [0.0, 1.0, 1.0]
    busy, idle = candidate(waiting_requests=4), candidate()
    assert scores(busy, unknown, idle) == [0.0, 0.0, 1.0]


def test_own_counts_decide_when_no_load_is_known(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """The pool keeps being balanced while all scrapes fail."""
    candidates = [candidate(known=False, inflight=count) for count in (4, 0, 2)]
    assert scores(*candidates) == [0.0, 1.0, 0.5]
