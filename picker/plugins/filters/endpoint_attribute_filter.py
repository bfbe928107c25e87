"""endpoint-attribute-filter: keep the endpoints with an attribute that passes a comparison.

    keep ⇔ attribute <operator> value      with `algorithm: {type: threshold, threshold: {…}}`

The number is what the extractor `producer` (core-metrics-extractor) found out under the name
`attribute`. An endpoint without it is kept with `onMissing: Pass` and dropped with `Fail`; a core
metric is missing while the endpoint's load is unknown. With `fallbackOnEmpty` all are kept when
none would be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Literal

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.scheduling.endpoint_attributes import attribute_number, check_attribute
from picker.types import Candidate, Candidates, InferenceRequest

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


class Threshold(Parameters, frozen=True):
    """`algorithm.threshold`: what the number is compared with, and how."""

    operator: Literal[
        "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"
    ]
    value: float


class FilterAlgorithm(Parameters, frozen=True):
    """`algorithm`: how a number is judged."""

    type: Literal["threshold"]
    threshold: Threshold


class EndpointAttributeFilterParameters(Parameters, frozen=True):
    attribute: str
    algorithm: FilterAlgorithm
    producer: str | None = None
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False


class EndpointAttributeFilter:
    """Keeps by one number. Stateless."""

    def __init__(self, parameters: EndpointAttributeFilterParameters) -> None:
        """Raises `ValueError` for an attribute without a name or with an ambiguous one."""
        threshold = parameters.algorithm.threshold
        try:
            self._producer = check_attribute(parameters.attribute, parameters.producer)
        except ValueError as error:
            raise ValueError(f"attribute: {error}") from None
        self._attribute = parameters.attribute
        self._compare = _COMPARE[threshold.operator]
        self._value = threshold.value
        self._keeps_missing = parameters.on_missing == "Pass"
        self._fallback = parameters.fallback_on_empty

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The candidates whose number compares well, or all."""
        kept = [candidate for candidate in candidates if self._keeps(candidate)]
        return candidates if self._fallback and not kept else kept

    def _keeps(self, candidate: Candidate) -> bool:
        number = attribute_number(candidate, self._attribute, self._producer)
        return self._keeps_missing if number is None else self._compare(number, self._value)


PLUGIN = PluginType(
    "endpoint-attribute-filter",
    EndpointAttributeFilterParameters,
    configured(EndpointAttributeFilter),
    stability=Stability.ALPHA,
)
