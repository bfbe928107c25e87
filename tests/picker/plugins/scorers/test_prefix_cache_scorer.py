"""prefix-cache-scorer: cached prompts first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.scorers.prefix_cache_scorer import PrefixCacheParameters, PrefixCacheScorer
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, InferenceRequest


@pytest.mark.parametrize(
    ("weight", "scale", "block", "match", "total", "expected"),
    [
        (0.0, 8192, 64, 5, 10, 0.5),
        (0.0, 8192, 64, 2, 10, 0.2),
        (0.0, 8192, 64, 10, 10, 1.0),
        (0.5, 100, 1, 5, 10, 0.25125),
        (0.5, 100, 1, 50, 100, 0.375),
        (1.0, 100, 64, 5, 10, 1.0),
    ],
)
def test_the_score_follows_the_formula(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    weight: float,
    scale: int,
    block: int,
    match: int,
    total: int,
    expected: float,
) -> None:
    """w · min(1, match · B / scale)² + (1 − w) · match / total; no match is 0."""
    attributes = Attributes()
    info = PrefixCacheMatchInfo(total, block, {"default/a": match})
    attributes.put(match_info_key("approx-prefix-cache-producer"), info)
    scorer = PrefixCacheScorer(
        PrefixCacheParameters(match_length_weight=weight, match_length_scale_tokens=scale)
    )
    scores = scorer.score(request_for(), [candidate("a"), candidate("b")], attributes)
    assert scores == [pytest.approx(expected), 0.0]


def test_without_a_finding_everybody_gets_nothing(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """No info under the configured producer's name, or an empty prompt."""
    scorer = PrefixCacheScorer(PrefixCacheParameters(prefix_match_info_producer_name="mine"))
    attributes = Attributes()
    other = PrefixCacheMatchInfo(1, 64, {"default/a": 1})
    attributes.put(match_info_key("theirs"), other)
    assert scorer.score(request_for(), [candidate("a")], attributes) == [0.0]
    attributes.put(match_info_key("mine"), PrefixCacheMatchInfo(0, 64, {}))
    assert scorer.score(request_for(), [candidate("a")], attributes) == [0.0]
    assert scorer.consumes == (match_info_key("mine"),)


@pytest.mark.parametrize(
    "parameters",
    [
        PrefixCacheParameters(match_length_weight=1.5),
        PrefixCacheParameters(match_length_weight=-0.1),
        PrefixCacheParameters(match_length_scale_tokens=0),
    ],
)
def test_parameters_out_of_range_are_refused(parameters: PrefixCacheParameters) -> None:
    """When the picker starts, not when it scores."""
    with pytest.raises(ValueError, match="matchLength"):
        PrefixCacheScorer(parameters)
