"""token-load-scorer: few tokens under way first, with those this request would add."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.framework.findings import EndpointLoad, InFlightLoad, inflight_load_key
from picker.plugins.scorers.token_load_scorer import TokenLoadParameters, TokenLoadScorer
from picker.types import Candidate, InferenceRequest


@pytest.fixture
def scorer() -> TokenLoadScorer:
    return TokenLoadScorer(TokenLoadParameters(queue_threshold_tokens=1000))


def _found(load: InFlightLoad) -> Attributes:
    attributes = Attributes()
    attributes.put(inflight_load_key(), load)
    return attributes


def test_the_score_falls_to_zero_at_the_threshold(
    scorer: TokenLoadScorer,
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """Tokens under way and tokens that are not cached there count alike."""
    load = InFlightLoad(
        {"default/a": EndpointLoad(1, 400), "default/c": EndpointLoad(1, 5000)},
        {"default/b": 50, "default/d": 0},
        default_uncached_tokens=100,
    )
    candidates = [candidate(name) for name in "abcd"]
    scores = scorer.score(request_for(), candidates, _found(load))
    assert list(scores) == pytest.approx([0.5, 0.95, 0.0, 1.0])


def test_without_a_finding_nobody_scores(
    scorer: TokenLoadScorer,
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """Nothing is known of tokens, so nothing is said."""
    assert list(scorer.score(request_for(), [candidate()], Attributes())) == [0.0]
    assert scorer.consumes == (inflight_load_key(),)


def test_unknown_load_is_not_idle(
    scorer: TokenLoadScorer,
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """Unless it is unknown of everybody."""
    found = _found(InFlightLoad({}, {}))
    mixed = [candidate("a", known=False), candidate("b")]
    assert list(scorer.score(request_for(), mixed, found)) == [0.0, 1.0]
    assert list(scorer.score(request_for(), mixed[:1], found)) == [1.0]


def test_a_threshold_below_one_is_refused() -> None:
    """When the picker starts."""
    with pytest.raises(ValueError, match="queueThresholdTokens"):
        TokenLoadScorer(TokenLoadParameters(queue_threshold_tokens=0))
