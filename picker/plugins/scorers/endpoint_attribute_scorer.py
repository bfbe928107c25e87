"""endpoint-attribute-scorer: prefer endpoints by any number that is known of them.

    x     = (v − min) / (max − min)        clamped to 0..1
    score = x                              linear_higher_is_better
            1 − x                          linear_lower_is_better
            0                              while nothing is known of the endpoint

`v` is the number called `attributeKey` of `producer` (core-metrics-extractor). min and max are
those of `fixedRange`, else (`adaptiveRange`, the default) those of the candidates whose number is
known; when all of these are equal they score 1.0. An endpoint that lacks this number alone has the
mean of the others, and so neither gains nor loses; one whose load is unknown beside others whose
load is known scores 0. (The reference gives 0 to both.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.plugins._shared.load_signals import (
    least_first,
    unknown_among_known,
    with_neutral,
)
from picker.scheduling.endpoint_attributes import attribute_number, check_attribute
from picker.types import Candidates, InferenceRequest

LOWER = "linear_lower_is_better"
HIGHER = "linear_higher_is_better"


class FixedRange(Parameters, frozen=True):
    """The ends of the scale."""

    min: float
    max: float


class AdaptiveRange(Parameters, frozen=True):
    """The scale is what the candidates span."""


class Normalization(Parameters, frozen=True):
    """At most one of the two; none is `adaptiveRange`."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None


class ScoringAlgorithm(Parameters, frozen=True):
    """How a number becomes a score."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeParameters(Parameters, frozen=True):
    attribute_key: str
    algorithm: ScoringAlgorithm
    producer: str = ""


class EndpointAttributeScorer:
    """Scores by one number. Stateless."""

    def __init__(self, parameters: EndpointAttributeParameters) -> None:
        """Raises `ValueError` for an attribute or a range that makes no sense."""
        self._attribute = parameters.attribute_key
        self._producer = check_attribute(parameters.attribute_key, parameters.producer)
        normalization = parameters.algorithm.normalization
        self._range = normalization.fixed_range
        self._lower_is_better = parameters.algorithm.type == LOWER
        if self._range is not None and normalization.adaptive_range is not None:
            raise ValueError("normalization takes fixedRange or adaptiveRange, not both")
        if self._range is not None and not 0 < self._range.max - self._range.min < math.inf:
            raise ValueError(
                f"fixedRange needs min < max, got {self._range.min} and {self._range.max}"
            )

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        found = [
            attribute_number(candidate, self._attribute, self._producer) for candidate in candidates
        ]
        values = with_neutral(found, unknown_among_known(candidates))
        if self._range is not None:
            return [0.0 if value is None else self._fixed(value, self._range) for value in values]
        if not self._lower_is_better:
            values = [None if value is None else -value for value in values]
        return least_first(values)

    def _fixed(self, value: float, scale: FixedRange) -> float:
        clamped = min(max(value, scale.min), scale.max)
        share = (clamped - scale.min) / (scale.max - scale.min)
        return 1.0 - share if self._lower_is_better else share


PLUGIN = PluginType(
    "endpoint-attribute-scorer",
    EndpointAttributeParameters,
    configured(EndpointAttributeScorer),
    stability=Stability.ALPHA,
)
