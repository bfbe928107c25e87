"""Filtering and scoring by any number that extractors found about endpoints.

endpoint-attribute-filter: keep endpoints whose attribute passes a comparison.

    keep ⇔ attribute <operator> value      with `algorithm: {type: threshold, threshold: {…}}`

The number is what the extractor `producer` (core-metrics-extractor) found under the name
`attribute`. `onMissing` decides about an endpoint without it; core metrics are missing while the
load is unknown. With `fallbackOnEmpty`, all pass when none does.

endpoint-attribute-scorer: prefer endpoints by any known number.

    x     = (v − min) / (max − min)        clamped to 0..1
    score = x                              linear_higher_is_better
            1 − x                          linear_lower_is_better
            0                              while the number is unknown

`v` is `producer`'s number called `attributeKey`. min and max are those of `fixedRange`, else
(`adaptiveRange`, the default) those of the candidates whose number is known, which score 1.0 when
all are equal. An endpoint that only lacks this number gets the mean of the others; one whose
load is unknown, while that of others is known, scores 0. (The reference gives 0 to both.)
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Literal

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability
from picker.plugins._shared.load_signals import least_first, unknown_among_known, with_neutral
from picker.types import Candidate, Candidates, EndpointMetrics, InferenceRequest

CORE_METRICS = "core-metrics-extractor"
_CORE: Mapping[str, Callable[[EndpointMetrics], float | None]] = MappingProxyType(
    {
        "WaitingQueueSize": lambda metrics: metrics.waiting_requests,
        "RunningRequestsSize": lambda metrics: metrics.running_requests,
        "KVCacheUsagePercent": lambda metrics: metrics.kv_cache_usage,
        "CacheBlockSize": lambda metrics: metrics.block_size_tokens,
        "CacheNumBlocks": lambda metrics: metrics.num_kv_blocks,
        "MaxActiveModels": lambda metrics: metrics.max_active_models,
    }
)


def check_attribute(attribute: str, producer: str | None) -> str:
    """Return the name of the producer, `core-metrics-extractor` by default.

    Raises `ValueError` for an empty `attribute`, and for one with a slash if no producer is named:
    it would look like `Type/producer`.
    """
    if not attribute:
        raise ValueError("the name of the attribute is missing")
    if "/" in attribute and not producer:
        raise ValueError(f"'{attribute}' has a slash: name its producer in 'producer'")
    return producer or CORE_METRICS


def attribute_number(candidate: Candidate, attribute: str, producer: str) -> float | None:
    """Return the number called `attribute/producer`, None while it is unknown or not finite.

    Findings of extractors come first; core metrics are also found by their names, while the
    endpoint's load is known.
    """
    value = candidate.attributes.get(f"{attribute}/{producer}")
    if value is None and producer == CORE_METRICS and candidate.metrics is not None:
        read = _CORE.get(attribute)
        value = None if read is None else read(candidate.metrics)
    # A page cannot give a boolean, but an extractor can; it is no quantity.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


class Threshold(Parameters, frozen=True):
    operator: Literal[
        "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"
    ]
    value: float


class FilterAlgorithm(Parameters, frozen=True):
    type: Literal["threshold"]
    threshold: Threshold


class EndpointAttributeFilterParameters(Parameters, frozen=True):
    attribute: str
    algorithm: FilterAlgorithm
    producer: str | None = None
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False


class EndpointAttributeFilter:
    def __init__(self, parameters: EndpointAttributeFilterParameters) -> None:
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
        passed = [candidate for candidate in candidates if self._keeps(candidate)]
        return candidates if self._fallback and not passed else passed

    def _keeps(self, candidate: Candidate) -> bool:
        number = attribute_number(candidate, self._attribute, self._producer)
        return self._keeps_missing if number is None else self._compare(number, self._value)


LOWER = "linear_lower_is_better"
HIGHER = "linear_higher_is_better"


class FixedRange(Parameters, frozen=True):
    min: float
    max: float


class AdaptiveRange(Parameters, frozen=True): ...


class Normalization(Parameters, frozen=True):
    """The range of the numbers: at most one field is given, `adaptiveRange` if neither is."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None


class ScoringAlgorithm(Parameters, frozen=True):
    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeParameters(Parameters, frozen=True):
    attribute_key: str
    algorithm: ScoringAlgorithm
    producer: str = ""


class EndpointAttributeScorer:
    def __init__(self, parameters: EndpointAttributeParameters) -> None:
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
        # `least_first` gives the least value the highest score.
        if not self._lower_is_better:
            values = [None if value is None else -value for value in values]
        return least_first(values)

    def _fixed(self, value: float, scale: FixedRange) -> float:
        clamped = min(max(value, scale.min), scale.max)
        share = (clamped - scale.min) / (scale.max - scale.min)
        return 1.0 - share if self._lower_is_better else share


PLUGINS = (
    PluginType("endpoint-attribute-filter", EndpointAttributeFilter, Stability.ALPHA),
    PluginType("endpoint-attribute-scorer", EndpointAttributeScorer, Stability.ALPHA),
)
