"""header-label-affinity-scorer: the label that the header asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.plugins.scorers.header_label_affinity_scorer import PLUGIN
from picker.types import Candidate, InferenceRequest


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-slice": "a"}, [1.0, 0.0, 0.0, 0.0]),
        ({"x-slice": "b"}, [0.0, 1.0, 0.0, 0.0]),
        ({"x-slice": ""}, [0.0, 0.0, 0.0, 1.0]),
        ({"x-slice": "A"}, [0.0] * 4),
        ({"x-other": "a"}, [0.0] * 4),
        ({}, [0.0] * 4),
    ],
)
def test_a_label_equal_to_the_header_scores_one(
    configured: Callable[..., Any],
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    headers: dict[str, str],
    expected: list[float],
) -> None:
    """Header names know no case, values do; an absent label never matches."""
    scorer = configured(PLUGIN, {"headerName": "X-Slice", "labelKey": "slice"})
    labels = [{"slice": "a"}, {"slice": "b"}, {"other": "a"}, {"slice": ""}]
    request = replace(request_for(), headers=headers)
    scores = scorer.score(request, [placed(labels=each) for each in labels], Attributes())
    assert list(scores) == expected


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"headerName": "x"}, "labelKey"),
        ({"labelKey": "x"}, "headerName"),
        ({"headerName": " ", "labelKey": "x"}, "headerName"),
        ({"headerName": "x", "labelKey": ""}, "labelKey"),
    ],
)
def test_both_names_are_needed(
    configured: Callable[..., Any], parameters: dict[str, str], named: str
) -> None:
    """The message says which one is missing."""
    with pytest.raises((ValueError, msgspec.ValidationError), match=named):
        configured(PLUGIN, parameters)
