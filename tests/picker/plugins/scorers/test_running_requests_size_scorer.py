"""running-requests-size-scorer: few running requests first, and unknown is not idle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.scorers.running_requests_size_scorer import RunningRequestsSizeScorer
from picker.types import Candidate, InferenceRequest


@pytest.fixture
def scores(request_for: Callable[..., InferenceRequest]) -> Callable[..., list[float]]:
    def score(*candidates: Candidate) -> list[float]:
        return list(RunningRequestsSizeScorer().score(request_for(), candidates, Attributes()))

    return score


@pytest.mark.parametrize(
    ("running", "expected"),
    [([10, 5, 0], [0.0, 0.5, 1.0]), ([3, 3], [1.0, 1.0]), ([0, 0], [1.0, 1.0]), ([7], [1.0])],
)
def test_the_score_is_the_distance_from_the_busiest(
    scores: Callable[..., list[float]],
    candidate: Callable[..., Candidate],
    running: list[int],
    expected: list[float],
) -> None:
    """(max − r) / (max − min); equal endpoints are all best."""
    assert scores(*(candidate(running_requests=count) for count in running)) == expected


def test_own_requests_no_scrape_has_seen_count_as_running(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """Those that a scrape saw waiting are not counted twice."""
    burst = candidate(inflight=4)
    waiting = candidate(inflight=4, waiting_requests=4)
    assert scores(burst, waiting) == [0.0, 1.0]


def test_unknown_load_scores_like_the_worst(
    scores: Callable[..., list[float]], candidate: Callable[..., Candidate]
) -> None:
    """Unless nothing is known of anybody; then own counts decide."""
    assert scores(candidate(known=False), candidate(running_requests=9)) == [0.0, 1.0]
    unknown = [candidate(known=False, inflight=count) for count in (4, 0, 2)]
    assert scores(*unknown) == [0.0, 1.0, 0.5]
