"""Filters by the labels of endpoints.

by-label: keep endpoints whose label has a listed value.

    keep ⇔ labels[label] ∈ validValues, or the label is absent and allowsNoLabel

Deprecated in favour of label-selector-filter.

decode-filter: keep endpoints for the decode stage.

    keep ⇔ llm-d.ai/role ∈ {decode, prefill-decode, both, encode-prefill-decode}, or absent

prefill-filter: keep endpoints for the prefill stage.

    keep ⇔ llm-d.ai/role ∈ {prefill, encode-prefill, prefill-decode, both, encode-prefill-decode}

encode-filter: keep endpoints for the encode stage.

    keep ⇔ llm-d.ai/role ∈ {encode, encode-prefill, encode-prefill-decode}

label-selector-filter: keep endpoints that a Kubernetes label selector selects.

    keep ⇔ every entry of matchLabels and of matchExpressions holds

by-label-selector: the former name of label-selector-filter. Deprecated;
the reference removes it in v0.11.0.
"""

from collections.abc import Iterable
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.disaggregation import DECODE_ROLES, ENCODE_ROLES, PREFILL_ROLES, ROLE_LABEL
from picker.framework.label_selector import LabelSelector, LabelSelectorParameters
from picker.framework.registry import Parameters, PluginType, Stability
from picker.types import Candidate, Candidates, InferenceRequest


class ByLabelParameters(Parameters, frozen=True):
    label: str
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


class LabelValueFilter:
    def __init__(self, label: str, values: Iterable[str], *, allows_no_label: bool = False) -> None:
        self._label = label
        self._values = frozenset(values)
        self._allows_no_label = allows_no_label

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        return [candidate for candidate in candidates if self._keeps(candidate)]

    def _keeps(self, candidate: Candidate) -> bool:
        # An empty value is a value: only an absent label is covered by `allowsNoLabel`.
        value = candidate.endpoint.labels.get(self._label)
        return self._allows_no_label if value is None else value in self._values


def _filter(parameters: ByLabelParameters) -> LabelValueFilter:
    if not parameters.label:
        raise ValueError("label must not be empty")
    if not parameters.valid_values and not parameters.allows_no_label:
        raise ValueError("validValues is empty and allowsNoLabel is false: no endpoint could pass")
    return LabelValueFilter(
        parameters.label, parameters.valid_values, allows_no_label=parameters.allows_no_label
    )


class LabelSelectorFilter:
    def __init__(self, parameters: LabelSelectorParameters) -> None:
        self._selector = LabelSelector(parameters)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        matches = self._selector.matches
        return [candidate for candidate in candidates if matches(candidate.endpoint.labels)]


PLUGINS = (
    PluginType("by-label", _filter, Stability.DEPRECATED),
    PluginType(
        "decode-filter", lambda: LabelValueFilter(ROLE_LABEL, DECODE_ROLES, allows_no_label=True)
    ),
    PluginType("prefill-filter", lambda: LabelValueFilter(ROLE_LABEL, PREFILL_ROLES)),
    PluginType("encode-filter", lambda: LabelValueFilter(ROLE_LABEL, ENCODE_ROLES)),
    PluginType("label-selector-filter", LabelSelectorFilter),
    PluginType("by-label-selector", LabelSelectorFilter, Stability.DEPRECATED),
)
