"""session-affinity-scorer: prefer the endpoint that a session was sent to before.

    score = 1.0 for the session's endpoint, 0.0 for every other

Without a session, or while its endpoint is no candidate, 0.0 for all. Parameters, strategies
and what is remembered are those of session-affinity-filter; a filter and a scorer that both
remember sessions do so apart from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import PluginType, Stability, named
from picker.plugins._shared.session_affinity import SessionAffinity, SessionAffinityParameters
from picker.types import Candidates, InferenceRequest


class SessionAffinityScorer(SessionAffinity):
    """Scores by session."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        chosen = self.session_endpoint(request, candidates, attributes)
        return [float(candidate is chosen) for candidate in candidates]


PLUGIN = PluginType(
    "session-affinity-scorer",
    SessionAffinityParameters,
    named(SessionAffinityScorer),
    stability=Stability.ALPHA,
)
