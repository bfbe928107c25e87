"""endpoint-attribute-scorer: a number becomes a score, and an unknown one nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Scorer
from picker.plugins.scorers.endpoint_attribute_scorer import PLUGIN, EndpointAttributeParameters
from picker.types import Candidate, InferenceRequest

LOWER, HIGHER = "linear_lower_is_better", "linear_higher_is_better"


def _make(**parameters: Any) -> Scorer:
    decoded = msgspec.convert({"attributeKey": "Util", **parameters}, EndpointAttributeParameters)
    plugin = PLUGIN.make("mine", decoded)
    assert isinstance(plugin, Scorer)
    return plugin


def _algorithm(kind: str, **normalization: Any) -> dict[str, Any]:
    return {"type": kind, "normalization": normalization} if normalization else {"type": kind}


@pytest.mark.parametrize(
    ("algorithm", "values", "expected"),
    [
        (_algorithm(LOWER), [2, 6, 10], [1.0, 0.5, 0.0]),
        (_algorithm(HIGHER), [2, 6, 10], [0.0, 0.5, 1.0]),
        (_algorithm(LOWER), [4, 4, None], [1.0, 1.0, 0.0]),
        (_algorithm(HIGHER, adaptiveRange={}), [4, 4, None], [1.0, 1.0, 0.0]),
        (_algorithm(HIGHER), [None, 1, 3], [0.0, 0.0, 1.0]),
        (_algorithm(LOWER, fixedRange={"min": 0, "max": 10}), [-1, 2.5, 11], [1.0, 0.75, 0.0]),
        (_algorithm(HIGHER, fixedRange={"min": 5, "max": 10}), [0, 7.5, 12], [0.0, 0.5, 1.0]),
        (_algorithm(LOWER, fixedRange={"min": 0, "max": 1}), [None], [0.0]),
    ],
)
def test_the_score_is_the_place_on_the_scale(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    algorithm: dict[str, Any],
    values: list[float | None],
    expected: list[float],
) -> None:
    """A fixed scale clamps, an adaptive one spans what is known."""
    candidates = [
        replace(candidate(), attributes={} if value is None else {"Util/dcgm-extractor": value})
        for value in values
    ]
    scorer = _make(algorithm=algorithm, producer="dcgm-extractor")
    assert scorer.score(request_for(), candidates, Attributes()) == pytest.approx(expected)


def test_core_metrics_need_no_producer(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """They are looked up by the reference's names."""
    scorer = _make(attributeKey="WaitingQueueSize", algorithm={"type": LOWER})
    candidates = [candidate(waiting_requests=4), candidate(), candidate(known=False)]
    assert list(scorer.score(request_for(), candidates, Attributes())) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "parameters",
    [
        {"algorithm": {"type": "quadratic"}},
        {"algorithm": {"type": LOWER}, "attributeKey": ""},
        {"algorithm": {"type": LOWER}, "attributeKey": "Util/dcgm-extractor"},
        {"algorithm": _algorithm(LOWER, fixedRange={"min": 1, "max": 1})},
        {"algorithm": _algorithm(LOWER, fixedRange={"min": 0, "max": 1}, adaptiveRange={})},
        {"algorithm": _algorithm(LOWER, fixedRange={"min": 0})},
        {"algorithm": {"type": LOWER}, "unknown": 1},
        {},
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters: dict[str, Any]) -> None:
    """When the picker starts."""
    with pytest.raises((ValueError, msgspec.ValidationError)):
        _make(**parameters)
