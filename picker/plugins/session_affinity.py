"""Session affinity: the endpoint that the next request of a session belongs to.

session-affinity-filter: keep a session at its endpoint.

    keep = {the session's endpoint}      when it is a candidate, else all

session-affinity-scorer: prefer a session's endpoint.

    score = 1.0 for the session's endpoint, 0.0 for every other

Theory of operation. `encoded_endpoint_header` remembers nothing: every response carries a token,
the base64 of `namespace/name` of the endpoint that the request was sent to, and the client repeats
it. `session_id` needs only an id of the session: the plugin remembers the first endpoint that a
session is sent to while the session is in use. It moves the session only when its endpoint was not
among the candidates of a request; when another endpoint merely had more weight, the session stays
bound.

Times are those of requests. Requests may be decided in a different order from their arrival, so the
newest time seen counts as now. A binding older than the time to live is never used, and the next
sweep drops it. Beyond `MAX_BINDINGS` sessions, the least recently used one is dropped.

Replicas report their bindings to each other. Two may bind one session to two endpoints before they
have exchanged them; so that all agree in the end, a binding counts how often its session has
moved: the higher count wins, and at equal counts the endpoint with the lesser key.
"""

import base64
import binascii
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from picker.framework.attributes import AGENT_IDENTITY, SESSION_ID, Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType, PositiveFloat, Stability
from picker.framework.replicas import ReportBinding
from picker.plugins._shared.stages import first_picked
from picker.types import Candidate, Candidates, InferenceRequest, ResponseHead, SchedulingResult

MAX_BINDINGS = 100_000  # bounds the memory
MAX_SESSION_ID = 128  # characters; clients choose it


# The producers of the well-known attributes, for sources that name no producer.
_PRODUCERS = {SESSION_ID: "session-id-producer", AGENT_IDENTITY: "agent-identity"}


class EncodedEndpointHeaderConfig(Parameters, frozen=True):
    """`encodedEndpointHeaderConfig`: the header that carries the token, in both directions."""

    header: str = "x-session-token"


class SessionSource(Parameters, frozen=True):
    """The place of a session's id: a header, or an attribute of the request."""

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionIdConfig(Parameters, frozen=True):
    """`sessionIdConfig`: sources by priority, and the lifetime of an unused binding."""

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: PositiveFloat = 300.0
    eviction_sweep_seconds: PositiveFloat = 10.0


class SessionAffinityParameters(Parameters, frozen=True):
    """`profile_name` is the profile whose pick the session is bound to; "" is the primary one."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeaderConfig = EncodedEndpointHeaderConfig()
    session_id_config: SessionIdConfig = SessionIdConfig()
    profile_name: str = ""


class SessionAffinity:
    """The common part of filter and scorer. Owns the bindings of the strategy `session_id`."""

    def __init__(self, name: str, parameters: SessionAffinityParameters) -> None:
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
        # All candidates that this plugin got for a request, to be compared with the decision.
        self._seen_key: DataKey[tuple[Candidates, ...]] = DataKey("SessionSeen", name)

    def session_endpoint(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Candidate | None:
        """Return the candidate that the request's session is bound to, if there is one."""
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
        """Bind the session, refresh its binding, or move it."""
        if self.session_bindings is None:
            return
        session, picked = self._session(request, attributes), self._picked(result)
        if not session or picked is None:
            return
        bound = self.session_bindings.endpoint(session, request.received_at_seconds)
        if bound is not None and bound != picked.key:
            seen = attributes.get(self._seen_key)
            # The bound endpoint was available and outvoted: the session stays, and may return.
            if not seen or any(_by_key(candidates, bound) for candidates in seen):
                return
        self.session_bindings.bind(session, picked.key, request.received_at_seconds)

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        picked = self._picked(flight.result)
        if not self._header or picked is None:
            return None
        return {self._header: base64.b64encode(picked.key.encode()).decode()}

    def _picked(self, result: SchedulingResult) -> Candidate | None:
        return first_picked(result.profiles, self._profile or result.primary_profile)

    def _session(self, request: InferenceRequest, attributes: Attributes) -> str:
        """Return the id from the first source that has one, else ""."""
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
    if not config.sources:
        raise ValueError("sessionIdConfig.sources must not be empty")
    return tuple(
        _source(source, f"sessionIdConfig.sources[{index}]")
        for index, source in enumerate(config.sources)
    )


def _source(source: SessionSource, where: str) -> str | DataKey[str]:
    if bool(source.header) == bool(source.attribute):
        raise ValueError(f"{where} needs exactly one of header and attribute")
    if source.header:
        if source.producer:
            raise ValueError(f"{where}.producer goes with attribute, not with header")
        return source.header.lower()
    producer = source.producer or _PRODUCERS.get(source.attribute)
    if not producer:
        raise ValueError(f"{where}.producer is needed: which one finds '{source.attribute}'?")
    return DataKey(source.attribute, producer)


def _by_key(candidates: Candidates, key: str) -> Candidate | None:
    return next((candidate for candidate in candidates if candidate.key == key), None)


def _decoded(token: str) -> str:
    """Return the endpoint key in a token, "" without one; clients may send anything."""
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
    """Owns the map from session ids to endpoint keys; each plugin that binds sessions has one."""

    def __init__(
        self, ttl_seconds: float, sweep_seconds: float, max_bindings: int = MAX_BINDINGS
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._sweep_seconds = sweep_seconds
        self._max_bindings = max_bindings
        self._now_seconds = -math.inf
        self._swept_seconds = -math.inf
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()  # least recently used first
        self._report: ReportBinding | None = None

    def __len__(self) -> int:
        return len(self._bindings)

    def endpoint(self, session: str, now_seconds: float) -> str | None:
        """Return the endpoint of the session; None when it is not bound, or its binding expired."""
        self._pass_time(now_seconds)
        binding = self._bindings.get(_bounded(session))
        if binding is None or self._is_expired(binding):
            return None
        return binding.endpoint

    def bind(self, session: str, endpoint: str, now_seconds: float) -> None:
        self._pass_time(now_seconds)
        key = _bounded(session)
        before = self._bindings.get(key)
        moves = 1
        if before is not None:
            moves = before.moves + (before.endpoint != endpoint)
        self._put(key, _Binding(endpoint, self._now_seconds, moves))
        if self._report is not None:
            self._report(key, endpoint, moves)

    def report_bindings(self, report: ReportBinding | None) -> None:
        self._report = report

    def bound_elsewhere(
        self, session: str, endpoint: str, moves: int, age_seconds: float, now_seconds: float
    ) -> None:
        """Take over a binding of another replica, made `age_seconds` ago."""
        self._pass_time(now_seconds)
        if age_seconds > self._ttl_seconds:  # it expired on its way
            return
        key = _bounded(session)
        before = self._bindings.get(key)
        binding = _Binding(endpoint, self._now_seconds, moves)
        # The higher count wins, of equal ones the lesser key, so that all replicas end alike.
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
    """Return the id, or a long id's digest, so that clients cannot choose how much is stored."""
    if len(session) <= MAX_SESSION_ID:
        return session
    return hashlib.sha256(session.encode(errors="surrogatepass")).hexdigest()


class SessionAffinityFilter(SessionAffinity):
    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        chosen = self.session_endpoint(request, candidates, attributes)
        return candidates if chosen is None else (chosen,)


class SessionAffinityScorer(SessionAffinity):
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        chosen = self.session_endpoint(request, candidates, attributes)
        return [float(candidate is chosen) for candidate in candidates]


PLUGINS = (
    PluginType("session-affinity-filter", SessionAffinityFilter, Stability.ALPHA),
    PluginType("session-affinity-scorer", SessionAffinityScorer, Stability.ALPHA),
)
