"""header-label-affinity-scorer: prefer the endpoints whose label is what the request asks for.

    score = 1.0 if labels[labelKey] = headers[headerName], else 0.0

Without the header, 0.0 for all; an endpoint without the label never matches. Both parameters
are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.types import Candidates, InferenceRequest


class HeaderLabelAffinityParameters(Parameters, frozen=True):
    header_name: str
    label_key: str


class HeaderLabelAffinityScorer:
    """Scores by one header and one label. Stateless."""

    def __init__(self, parameters: HeaderLabelAffinityParameters) -> None:
        """Raises `ValueError` for an empty name."""
        if not parameters.header_name.strip():
            raise ValueError("headerName must not be empty")
        if not parameters.label_key.strip():
            raise ValueError("labelKey must not be empty")
        self._header = parameters.header_name.strip().lower()
        self._label = parameters.label_key.strip()

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        wanted = request.headers.get(self._header)
        if wanted is None:
            return [0.0] * len(candidates)
        label = self._label
        return [float(candidate.endpoint.labels.get(label) == wanted) for candidate in candidates]


PLUGIN = PluginType(
    "header-label-affinity-scorer",
    HeaderLabelAffinityParameters,
    configured(HeaderLabelAffinityScorer),
    stability=Stability.ALPHA,
)
