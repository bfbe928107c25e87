"""session-affinity-scorer: prefer the endpoint that a session was sent to before.

    score = 1.0 for the session's endpoint, 0.0 for every other

Without a session, or while its endpoint is no candidate, 0.0 for everybody. Parameters, strategies
and what is remembered are those of session-affinity-filter (`picker.framework.sessions`); a filter
and a scorer that both remember sessions do so apart from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.registry import PluginType, Stability
from picker.framework.session_bindings import SessionBindings
from picker.framework.sessions import SessionAffinityParameters, session_affinity
from picker.types import Candidate, InferenceRequest, ResponseHead, SchedulingResult


class SessionAffinityScorer:
    """Scores by session. Its strategy owns what is remembered."""

    def __init__(self, name: str, parameters: SessionAffinityParameters) -> None:
        """Raises `ValueError` for parameters that cannot work."""
        self._affinity = session_affinity(name, parameters)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The findings that say which session a request belongs to."""
        return self._affinity.consumes

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """One score per candidate; see the module's formula."""
        chosen = self._affinity.choose(request, candidates, attributes)
        return [float(candidate is chosen) for candidate in candidates]

    @property
    def session_bindings(self) -> SessionBindings | None:
        """The sessions that are remembered, with the strategy that remembers any."""
        return self._affinity.bindings

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Remember where the session goes."""
        self._affinity.decided(request, result, attributes)

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """The session's token, where the strategy has one."""
        return self._affinity.response_headers(flight.result)


PLUGIN = PluginType(
    "session-affinity-scorer",
    SessionAffinityParameters,
    lambda name, parameters, _services: SessionAffinityScorer(name, parameters),
    stability=Stability.ALPHA,
)
