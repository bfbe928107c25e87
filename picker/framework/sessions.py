"""Session affinity: to which endpoint the next request of a session belongs.

Two strategies. `encoded_endpoint_header` keeps nothing here: every response carries a token, the
base64 of `namespace/name` of the endpoint that the request was sent to, and the client repeats it
with its next request. `session_id` needs nothing of the client but an id of its session: the first
endpoint that a session is sent to is remembered, for as long as the session goes on.

A remembered session moves to another endpoint only when the one it is bound to was not among the
candidates that this request could choose from; when it was, and another was picked all the same
(another scorer had more weight), the session stays bound. The filter and the scorer of this name
each have bindings of their own.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from picker.framework.attributes import Attributes, DataKey
from picker.framework.disaggregation import first_picked
from picker.framework.findings import AGENT_IDENTITY, SESSION_ID
from picker.framework.registry import Parameters
from picker.framework.session_bindings import SessionBindings
from picker.types import Candidate, InferenceRequest, SchedulingResult

# Producers of the attributes that are known by name, for sources that name none.
_PRODUCERS = {SESSION_ID: "session-id-producer", AGENT_IDENTITY: "agent-identity"}


class EncodedEndpointHeaderConfig(Parameters, frozen=True):
    """`encodedEndpointHeaderConfig`: the header of requests and responses with the token."""

    header: str = "x-session-token"


class SessionSource(Parameters, frozen=True):
    """Where a session's id is found: in a header, or among the findings about the request."""

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionIdConfig(Parameters, frozen=True):
    """`sessionIdConfig`: sources by priority, and how long a session lives unused."""

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: float = 300.0
    eviction_sweep_seconds: float = 10.0


class SessionAffinityParameters(Parameters, frozen=True):
    """`parameters` of the session affinity plugins.

    `profile_name` says which profile's pick the session is about; "" is the primary one.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeaderConfig = EncodedEndpointHeaderConfig()
    session_id_config: SessionIdConfig = SessionIdConfig()
    profile_name: str = ""


class SessionAffinity(Protocol):
    """One strategy, asked before a decision and told of it."""

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The findings it reads."""
        ...

    @property
    def bindings(self) -> SessionBindings | None:
        """What it remembers; None: it needs no memory."""
        ...

    def choose(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Candidate | None:
        """The candidate that the request's session belongs to, if there is one."""
        ...

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """The request is about to leave for where `result` says."""
        ...

    def response_headers(self, result: SchedulingResult) -> Mapping[str, str] | None:
        """What the client has to be told, if anything."""
        ...


def session_affinity(name: str, parameters: SessionAffinityParameters) -> SessionAffinity:
    """The strategy that the parameters of the plugin called `name` ask for.

    Raises `ValueError` that names the parameter at fault.
    """
    if parameters.strategy == "session_id":
        return BoundSessions(name, parameters.session_id_config, parameters.profile_name)
    return EncodedEndpoints(parameters.encoded_endpoint_header_config, parameters.profile_name)


class EncodedEndpoints:
    """The strategy `encoded_endpoint_header`. Stateless."""

    consumes: tuple[DataKey[Any], ...] = ()
    bindings: SessionBindings | None = None

    def __init__(self, parameters: EncodedEndpointHeaderConfig, profile: str) -> None:
        """Raises `ValueError` without the name of a header."""
        if not parameters.header.strip():
            raise ValueError("encodedEndpointHeaderConfig.header must not be empty")
        self._header = parameters.header.strip().lower()
        self._profile = profile

    def choose(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Candidate | None:
        """The endpoint in the token; a token that says nothing is no token."""
        key = _decoded(request.headers.get(self._header, ""))
        return _by_key(candidates, key) if key else None

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Nothing to remember."""

    def response_headers(self, result: SchedulingResult) -> Mapping[str, str] | None:
        """The token of the endpoint that was picked."""
        picked = _picked(result, self._profile)
        if picked is None:
            return None
        return {self._header: base64.b64encode(picked.key.encode()).decode()}


class BoundSessions:
    """The strategy `session_id`. Owns the bindings of its plugin."""

    def __init__(self, name: str, parameters: SessionIdConfig, profile: str) -> None:
        """Raises `ValueError` for sources that name nothing or two things, and for times ≤ 0."""
        if not parameters.sources:
            raise ValueError("sessionIdConfig.sources must not be empty")
        for word, seconds in (
            ("evictionTtlSeconds", parameters.eviction_ttl_seconds),
            ("evictionSweepSeconds", parameters.eviction_sweep_seconds),
        ):
            if not seconds > 0:
                raise ValueError(f"sessionIdConfig.{word} must be positive, got {seconds}")
        self._sources = tuple(
            _source(source, f"sessionIdConfig.sources[{index}]")
            for index, source in enumerate(parameters.sources)
        )
        self._profile = profile
        self._bindings = SessionBindings(
            parameters.eviction_ttl_seconds, parameters.eviction_sweep_seconds
        )
        # All candidates that this plugin was shown for a request, to be asked when it is decided.
        self._seen_key: DataKey[tuple[Sequence[Candidate], ...]] = DataKey("SessionSeen", name)

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The findings among the sources."""
        return tuple(source for source in self._sources if isinstance(source, DataKey))

    @property
    def bindings(self) -> SessionBindings:
        """The sessions that are bound now."""
        return self._bindings

    def choose(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Candidate | None:
        """The endpoint that the session is bound to, when it is a candidate."""
        session = self._session(request, attributes)
        if not session:
            return None
        attributes.put(self._seen_key, (*(attributes.get(self._seen_key) or ()), candidates))
        bound = self._bindings.endpoint(session, request.received_at_seconds)
        return _by_key(candidates, bound) if bound else None

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Bind the session, keep it alive, or move it; see the module."""
        session, picked = self._session(request, attributes), _picked(result, self._profile)
        if not session or picked is None:
            return
        bound = self._bindings.endpoint(session, request.received_at_seconds)
        if bound is not None and bound != picked.key:
            seen = attributes.get(self._seen_key)
            if not seen or any(_by_key(candidates, bound) for candidates in seen):
                return
        self._bindings.bind(session, picked.key, request.received_at_seconds)

    def response_headers(self, result: SchedulingResult) -> Mapping[str, str] | None:
        """None: the client has its own id."""
        return None

    def _session(self, request: InferenceRequest, attributes: Attributes) -> str:
        """The id from the first source that has one, else ""."""
        for source in self._sources:
            if isinstance(source, DataKey):
                value: Any = attributes.get(source)
            else:
                value = request.headers.get(source)
            if isinstance(value, str) and value:
                return value
        return ""


def _source(source: SessionSource, where: str) -> str | DataKey[str]:
    """The header's name, or the key of the finding."""
    if bool(source.header) == bool(source.attribute):
        raise ValueError(f"{where} needs exactly one of header and attribute")
    if source.header:
        if source.producer:
            raise ValueError(f"{where}.producer goes with attribute, not with header")
        return source.header.lower()
    producer = source.producer or _PRODUCERS.get(source.attribute)
    if not producer:
        raise ValueError(f"{where}.producer is needed: who finds out '{source.attribute}'?")
    return DataKey(source.attribute, producer)


def _picked(result: SchedulingResult, profile: str) -> Candidate | None:
    return first_picked(result.profiles, profile or result.primary_profile)


def _by_key(candidates: Sequence[Candidate], key: str) -> Candidate | None:
    return next((candidate for candidate in candidates if candidate.key == key), None)


def _decoded(token: str) -> str:
    """The endpoint key in a token, "" when there is none; clients may send anything."""
    try:
        return base64.b64decode(token, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
