"""load-aware-scorer: short queues first, against a fixed threshold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.scorers.load_aware_scorer import LoadAwareParameters, LoadAwareScorer
from picker.types import Candidate, InferenceRequest


@pytest.mark.parametrize(
    ("threshold", "queues", "expected"),
    [
        (10, [2, 0, 15], [0.4, 0.5, 0.0]),
        (10, [10, 5], [0.0, 0.25]),
        (128, [64, 128], [0.25, 0.0]),
        (0, [64], [0.25]),
        (-5, [64], [0.25]),
    ],
)
def test_the_score_falls_from_half_to_zero_at_the_threshold(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    threshold: int,
    queues: list[int],
    expected: list[float],
) -> None:
    """0.5 · (1 − min(q, T) / T); a threshold of none is the default one."""
    scorer = LoadAwareScorer(LoadAwareParameters(threshold=threshold))
    candidates = [candidate(waiting_requests=queue) for queue in queues]
    assert scorer.score(request_for(), candidates, Attributes()) == pytest.approx(expected)


def test_unknown_load_is_a_full_queue(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """Own counts decide when nothing is known, and are a lower bound when something is."""
    scorer = LoadAwareScorer(LoadAwareParameters(threshold=10))
    known, unknown = candidate(inflight=4), candidate(known=False)
    assert list(scorer.score(request_for(), [known, unknown], Attributes())) == [0.3, 0.0]
    blind = [candidate(known=False, inflight=5), candidate(known=False)]
    assert list(scorer.score(request_for(), blind, Attributes())) == [0.25, 0.5]
