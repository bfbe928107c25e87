"""label-selector-filter: keep the endpoints whose labels a Kubernetes label selector selects.

    keep ⇔ every entry of matchLabels and of matchExpressions holds

The parameters are the selector itself; without any, every endpoint is kept. The reference wants a
`name` beside the type; here the type stands in for a name that is not written, as everywhere.
"""

from __future__ import annotations

from random import Random

from picker.framework.attributes import Attributes
from picker.framework.label_selector import LabelSelector, LabelSelectorParameters
from picker.framework.registry import PluginType, configured
from picker.types import Candidates, InferenceRequest


class LabelSelectorFilter:
    """Keeps what a selector selects. Stateless."""

    def __init__(self, parameters: LabelSelectorParameters) -> None:
        """Raises `ValueError` for a selector that is none."""
        self._selector = LabelSelector(parameters)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The candidates that the selector selects."""
        matches = self._selector.matches
        return [candidate for candidate in candidates if matches(candidate.endpoint.labels)]


PLUGIN = PluginType(
    "label-selector-filter", LabelSelectorParameters, configured(LabelSelectorFilter)
)
