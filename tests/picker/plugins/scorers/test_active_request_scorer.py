"""active-request-scorer: few own requests first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from picker.framework.attributes import Attributes
from picker.framework.findings import EndpointLoad, InFlightLoad, inflight_load_key
from picker.plugins.scorers.active_request_scorer import (
    ActiveRequestParameters,
    ActiveRequestScorer,
)
from picker.types import Candidate, InferenceRequest


def _load(*counts: int) -> Attributes:
    attributes = Attributes()
    loads = {f"default/{index}": EndpointLoad(count, 0) for index, count in enumerate(counts)}
    attributes.put(inflight_load_key(), InFlightLoad(loads, {}))
    return attributes


@pytest.mark.parametrize(
    ("parameters", "counts", "expected"),
    [
        ({}, [4, 1, 0], [0.0, 0.75, 1.0]),
        ({}, [0, 0], [1.0, 1.0]),
        ({}, [3, 3], [0.0, 0.0]),
        ({"idle_threshold": 2}, [4, 2, 1], [0.0, 1.0, 1.0]),
        ({"max_busy_score": 0.5}, [4, 1, 0], [0.0, 0.375, 1.0]),
        ({"max_busy_score": 0.0, "request_timeout": "2m"}, [4, 1, 0], [0.0, 0.0, 1.0]),
    ],
)
def test_the_score_is_the_distance_from_the_busiest(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    parameters: dict[str, Any],
    counts: list[int],
    expected: list[float],
) -> None:
    """(max − count) / max · maxBusyScore, and 1 for the idle ones."""
    scorer = ActiveRequestScorer(ActiveRequestParameters(**parameters))
    candidates = [candidate(str(index)) for index in range(len(counts))]
    assert list(scorer.score(request_for(), candidates, _load(*counts))) == expected


def test_the_candidates_own_count_is_a_lower_bound(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """It is all there is when the producer found nothing."""
    scorer = ActiveRequestScorer(ActiveRequestParameters())
    candidates = [candidate("0", inflight=4), candidate("1", inflight=1)]
    assert list(scorer.score(request_for(), candidates, Attributes())) == [0.0, 0.75]
    assert list(scorer.score(request_for(), candidates, _load(1, 2))) == [0.0, 0.5]
    assert scorer.consumes == (inflight_load_key(),)


def test_unknown_load_is_not_idle(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """Unless it is unknown of everybody."""
    scorer = ActiveRequestScorer(ActiveRequestParameters())
    unknown = [candidate("0", known=False), candidate("1", known=False)]
    assert list(scorer.score(request_for(), unknown, _load(2, 1))) == [0.0, 0.5]
    mixed = [candidate("0", known=False), candidate("1")]
    assert list(scorer.score(request_for(), mixed, _load(0, 0))) == [0.0, 1.0]


@pytest.mark.parametrize(
    "parameters", [{"idle_threshold": -1}, {"max_busy_score": 1.5}, {"max_busy_score": -0.1}]
)
def test_values_out_of_range_are_refused(parameters: dict[str, Any]) -> None:
    """When the picker starts."""
    with pytest.raises(ValueError, match=r"idleThreshold|maxBusyScore"):
        ActiveRequestScorer(ActiveRequestParameters(**parameters))
