"""Session affinity: to which endpoint the next request of a session belongs.

Two strategies. `encoded_endpoint_header` remembers nothing: every response carries a token, the
base64 of `namespace/name` of the endpoint that the request was sent to, and the client repeats it
with its next request. `session_id` needs nothing of the client but an id of its session: the first
endpoint that a session is sent to is remembered, for as long as the session goes on.

A remembered session moves to another endpoint only when the one it is bound to was not among the
candidates that this request could choose from; when it was, and another was picked all the same
(another scorer had more weight), the session stays bound. The filter and the scorer of this name
each have bindings of their own.

Times are those of requests, on their monotonic clock. Requests may be decided in another order than
they came in, so the newest time seen counts as now. A binding older than the time to live is never
used; the next sweep drops it, and a sweep happens at most every sweep interval. Beyond
`MAX_BINDINGS` sessions the one that was used longest ago is dropped.

Replicas send each other what they bind. Two may bind one session to two endpoints before they
have exchanged them; so that all end with the same one, a binding counts how often its session has
moved: the higher count is right, and of two equal ones that of the endpoint whose key is less.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from picker.framework.attributes import AGENT_IDENTITY, SESSION_ID, Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PositiveFloat
from picker.framework.replicas import TellBinding
from picker.plugins._shared.stages import first_picked
from picker.types import Candidate, Candidates, InferenceRequest, ResponseHead, SchedulingResult

MAX_BINDINGS = 100_000
MAX_SESSION_ID = 128
# The producers of the attributes that are known by name, for sources that name none.
_PRODUCERS = {SESSION_ID: "session-id-producer", AGENT_IDENTITY: "agent-identity"}


class EncodedEndpointHeaderConfig(Parameters, frozen=True):
    """`encodedEndpointHeaderConfig`: the header of requests and responses with the token."""

    header: str = "x-session-token"


class SessionSource(Parameters, frozen=True):
    """Where a session's id is found: in a header, or among the attributes of the request."""

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionIdConfig(Parameters, frozen=True):
    """`sessionIdConfig`: sources by priority, and how long an unused binding lasts."""

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: PositiveFloat = 300.0
    eviction_sweep_seconds: PositiveFloat = 10.0


class SessionAffinityParameters(Parameters, frozen=True):
    """`parameters` of the session affinity plugins.

    `profile_name` says which profile's pick the session is about; "" is the primary one.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeaderConfig = EncodedEndpointHeaderConfig()
    session_id_config: SessionIdConfig = SessionIdConfig()
    profile_name: str = ""


class SessionAffinity:
    """What the filter and the scorer have in common. Owns the bindings, with `session_id`."""

    def __init__(self, name: str, parameters: SessionAffinityParameters) -> None:
        """`name` is the plugin's. Raises `ValueError` that names the parameter at fault."""
        self._profile = parameters.profile_name
        self._header = ""
        self._sources: tuple[str | DataKey[str], ...] = ()
        self.session_bindings: SessionBindings | None = None
        if parameters.strategy == "session_id":
            config = parameters.session_id_config
            self._sources = _sources(config)
            self.session_bindings = SessionBindings(
                config.eviction_ttl_seconds, config.eviction_sweep_seconds
            )
        else:
            self._header = parameters.encoded_endpoint_header_config.header.strip().lower()
            if not self._header:
                raise ValueError("encodedEndpointHeaderConfig.header must not be empty")
        self.consumes = tuple(source for source in self._sources if isinstance(source, DataKey))
        # All candidates that this plugin was shown for a request, to be compared with the decision.
        self._seen_key: DataKey[tuple[Candidates, ...]] = DataKey("SessionSeen", name)

    def session_endpoint(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Candidate | None:
        """The candidate that the request's session belongs to, if there is one."""
        if self.session_bindings is None:
            key = _decoded(request.headers.get(self._header, ""))
            return _by_key(candidates, key) if key else None
        session = self._session(request, attributes)
        if not session:
            return None
        attributes[self._seen_key] = (*(attributes.get(self._seen_key) or ()), candidates)
        bound = self.session_bindings.endpoint(session, request.received_at_seconds)
        return _by_key(candidates, bound) if bound else None

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Bind the session, refresh its binding, or move it; see the module."""
        if self.session_bindings is None:
            return
        session, picked = self._session(request, attributes), self._picked(result)
        if not session or picked is None:
            return
        bound = self.session_bindings.endpoint(session, request.received_at_seconds)
        if bound is not None and bound != picked.key:
            seen = attributes.get(self._seen_key)
            if not seen or any(_by_key(candidates, bound) for candidates in seen):
                return
        self.session_bindings.bind(session, picked.key, request.received_at_seconds)

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """The token of the endpoint that was picked; None with `session_id`."""
        picked = self._picked(flight.result)
        if not self._header or picked is None:
            return None
        return {self._header: base64.b64encode(picked.key.encode()).decode()}

    def _picked(self, result: SchedulingResult) -> Candidate | None:
        return first_picked(result.profiles, self._profile or result.primary_profile)

    def _session(self, request: InferenceRequest, attributes: Attributes) -> str:
        """The id from the first source that has one, else ""."""
        for source in self._sources:
            value: Any = (
                attributes.get(source)
                if isinstance(source, DataKey)
                else request.headers.get(source)
            )
            if isinstance(value, str) and value:
                return value
        return ""


def _sources(config: SessionIdConfig) -> tuple[str | DataKey[str], ...]:
    """Header names and keys of attributes. Raises `ValueError` for sources that name nothing or two
    things.
    """
    if not config.sources:
        raise ValueError("sessionIdConfig.sources must not be empty")
    return tuple(
        _source(source, f"sessionIdConfig.sources[{index}]")
        for index, source in enumerate(config.sources)
    )


def _source(source: SessionSource, where: str) -> str | DataKey[str]:
    """The header's name, or the key of the attribute."""
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


def _by_key(candidates: Candidates, key: str) -> Candidate | None:
    return next((candidate for candidate in candidates if candidate.key == key), None)


def _decoded(token: str) -> str:
    """The endpoint key in a token, "" when there is none; clients may send anything."""
    try:
        return base64.b64decode(token, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class _Binding:
    endpoint: str
    used_at_seconds: float
    moves: int


class SessionBindings:
    """Session id → endpoint key. Owns the map; one instance per plugin that binds sessions."""

    def __init__(
        self, ttl_seconds: float, sweep_seconds: float, max_bindings: int = MAX_BINDINGS
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._sweep_seconds = sweep_seconds
        self._max_bindings = max_bindings
        self._now_seconds = -math.inf
        self._swept_seconds = -math.inf
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()  # the least recently used first
        self._tell: TellBinding | None = None

    def __len__(self) -> int:
        return len(self._bindings)

    def endpoint(self, session: str, now_seconds: float) -> str | None:
        """Where the session is bound; None when it is not, or was not used for too long."""
        self._pass_time(now_seconds)
        binding = self._bindings.get(_bounded(session))
        if binding is None or self._is_expired(binding):
            return None
        return binding.endpoint

    def bind(self, session: str, endpoint: str, now_seconds: float) -> None:
        """The session was sent there now; replaces what it was bound to."""
        self._pass_time(now_seconds)
        key = _bounded(session)
        before = self._bindings.get(key)
        moves = 1
        if before is not None:
            moves = before.moves + (before.endpoint != endpoint)
        self._put(key, _Binding(endpoint, self._now_seconds, moves))
        if self._tell is not None:
            self._tell(key, endpoint, moves)

    def tell(self, tell: TellBinding | None) -> None:
        """Call `tell` with every session that is bound here from now on."""
        self._tell = tell

    def bound_elsewhere(
        self, session: str, endpoint: str, moves: int, age_seconds: float, now_seconds: float
    ) -> None:
        """Another replica has sent the session there, `age_seconds` ago."""
        self._pass_time(now_seconds)
        if age_seconds > self._ttl_seconds:
            return
        key = _bounded(session)
        before = self._bindings.get(key)
        binding = _Binding(endpoint, self._now_seconds, moves)
        if before is not None and (before.moves, binding.endpoint) > (moves, before.endpoint):
            binding = _Binding(before.endpoint, self._now_seconds, before.moves)
        self._put(key, binding)

    def _put(self, key: str, binding: _Binding) -> None:
        self._bindings[key] = binding
        self._bindings.move_to_end(key)
        if len(self._bindings) > self._max_bindings:
            self._bindings.popitem(last=False)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the map is out of order or too large."""
        times = [binding.used_at_seconds for binding in self._bindings.values()]
        if times != sorted(times) or len(times) > self._max_bindings:
            raise AssertionError("bindings are not ordered by use, or too many")

    def _pass_time(self, now_seconds: float) -> None:
        self._now_seconds = max(self._now_seconds, now_seconds)
        if self._now_seconds - self._swept_seconds < self._sweep_seconds:
            return
        self._swept_seconds = self._now_seconds
        while self._bindings:
            key = next(iter(self._bindings))
            if not self._is_expired(self._bindings[key]):
                return
            del self._bindings[key]

    def _is_expired(self, binding: _Binding) -> bool:
        return self._now_seconds - binding.used_at_seconds > self._ttl_seconds


def _bounded(session: str) -> str:
    """The id, or its digest when it is long: clients choose ids, and must not choose our memory."""
    if len(session) <= MAX_SESSION_ID:
        return session
    return hashlib.sha256(session.encode(errors="surrogatepass")).hexdigest()
