"""by-label: keep the endpoints whose label has one of some values.

    keep ⇔ labels[label] ∈ validValues, or the label is absent and allowsNoLabel

Deprecated in favour of label-selector-filter. Refused without a `label`, and with parameters that
could keep no endpoint at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.types import Candidate, Candidates, InferenceRequest


class ByLabelParameters(Parameters, frozen=True):
    """`parameters` of a by-label filter."""

    label: str
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


class LabelValueFilter:
    """Keeps endpoints by the value of one label. Stateless; the role filters are such filters."""

    def __init__(self, label: str, values: Iterable[str], *, allows_no_label: bool = False) -> None:
        self._label = label
        self._values = frozenset(values)
        self._allows_no_label = allows_no_label

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The candidates with one of the values, or without the label where that is allowed."""
        return [candidate for candidate in candidates if self._keeps(candidate)]

    def _keeps(self, candidate: Candidate) -> bool:
        value = candidate.endpoint.labels.get(self._label)
        return self._allows_no_label if value is None else value in self._values


def _filter(parameters: ByLabelParameters) -> LabelValueFilter:
    if not parameters.label:
        raise ValueError("label must not be empty")
    if not parameters.valid_values and not parameters.allows_no_label:
        raise ValueError("validValues is empty and allowsNoLabel is false: nothing could be kept")
    return LabelValueFilter(
        parameters.label, parameters.valid_values, allows_no_label=parameters.allows_no_label
    )


PLUGIN = PluginType(
    "by-label", ByLabelParameters, configured(_filter), stability=Stability.DEPRECATED
)
