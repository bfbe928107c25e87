"""lora-affinity-scorer: where the adapter is, then where it has room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.scorers.lora_affinity_scorer import LoraAffinityScorer
from picker.types import Candidate, InferenceRequest


@pytest.mark.parametrize(
    ("active", "waiting", "limit", "expected"),
    [
        ({"a", "b"}, set(), 2, 1.0),
        ({"a"}, {"a"}, 1, 1.0),
        ({"b"}, set(), 2, 0.8),
        ({"b"}, {"a"}, 3, 0.8),
        (set(), set(), 1, 0.8),
        ({"b"}, {"a"}, 2, 0.6),
        ({"b"}, {"c"}, 2, 0.0),
        (set(), set(), 0, 0.0),
        (set(), set(), None, 0.0),
        (set(), {"a"}, None, 0.6),
    ],
)
def test_the_score_is_what_it_takes_to_serve_the_adapter(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    active: set[str],
    waiting: set[str],
    limit: int | None,
    expected: float,
) -> None:
    """Active, then room for one more, then waiting to be loaded, then nothing."""
    endpoint = candidate(
        active_models=frozenset(active),
        waiting_models=frozenset(waiting),
        max_active_models=limit,
    )
    scorer = LoraAffinityScorer()
    assert list(scorer.score(request_for(model="a"), [endpoint], Attributes())) == [expected]


def test_unknown_adapters_are_no_room(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """An endpoint that was never scraped is not taken for an empty one."""
    scores = LoraAffinityScorer().score(request_for(), [candidate(known=False)], Attributes())
    assert list(scores) == [0.0]
