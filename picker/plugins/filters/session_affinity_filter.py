"""session-affinity-filter: keep a session at the endpoint that it was sent to before.

    keep = {the session's endpoint}      when it is a candidate, else all

With `strategy: encoded_endpoint_header` every response carries the endpoint in a header, which the
client repeats; with `session_id` the filter remembers where a session went, up to 100,000 sessions
and `evictionTtlSeconds` without use. Details: `plugins._shared.session_affinity`.
"""

from __future__ import annotations

from random import Random

from picker.framework.attributes import Attributes
from picker.framework.registry import PluginType, Stability, named
from picker.plugins._shared.session_affinity import SessionAffinity, SessionAffinityParameters
from picker.types import Candidates, InferenceRequest


class SessionAffinityFilter(SessionAffinity):
    """Narrows to a session's endpoint."""

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The session's endpoint alone, or all."""
        chosen = self.session_endpoint(request, candidates, attributes)
        return candidates if chosen is None else (chosen,)


PLUGIN = PluginType(
    "session-affinity-filter",
    SessionAffinityParameters,
    named(SessionAffinityFilter),
    stability=Stability.ALPHA,
)
