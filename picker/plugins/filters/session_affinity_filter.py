"""session-affinity-filter: keep a session at the endpoint that it was sent to before.

    keep = {the session's endpoint}      when it is a candidate, else all

With `strategy: encoded_endpoint_header` every response carries the endpoint in a header, which the
client repeats; with `session_id` the filter remembers where a session went, up to 100,000 sessions
and `evictionTtlSeconds` without use. Details: `picker.framework.sessions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.registry import PluginType, Stability
from picker.framework.session_bindings import SessionBindings
from picker.framework.sessions import SessionAffinityParameters, session_affinity
from picker.types import Candidate, InferenceRequest, ResponseHead, SchedulingResult


class SessionAffinityFilter:
    """Narrows to a session's endpoint. Its strategy owns what is remembered."""

    def __init__(self, name: str, parameters: SessionAffinityParameters) -> None:
        """Raises `ValueError` for parameters that cannot work."""
        self._affinity = session_affinity(name, parameters)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The findings that say which session a request belongs to."""
        return self._affinity.consumes

    def filter(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> Sequence[Candidate]:
        """The session's endpoint alone, or all."""
        chosen = self._affinity.choose(request, candidates, attributes)
        return candidates if chosen is None else (chosen,)

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
    "session-affinity-filter",
    SessionAffinityParameters,
    lambda name, parameters, _services: SessionAffinityFilter(name, parameters),
    stability=Stability.ALPHA,
)
