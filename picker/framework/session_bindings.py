"""Which endpoint each session was sent to: a bounded map whose entries end when they are not used.

Times are those of requests, on their monotonic clock. Requests may be decided in another order than
they came in, so the newest time seen counts as now. An entry older than the time to live is never
answered with; it is dropped by the next sweep, and a sweep happens at most every sweep interval.
Beyond `MAX_BINDINGS` sessions the one that was used longest ago is dropped.

Replicas tell each other what they bind. Two may bind one session to two endpoints before they have
heard of each other; so that all end with the same one, a binding counts how often its session has
moved: the higher count is right, and of two equal ones that of the endpoint whose key is less.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

MAX_BINDINGS = 100_000
MAX_SESSION_ID = 128
# A session was sent to an endpoint, the so-manieth that it has: (session, endpoint key, moves).
TellBinding: TypeAlias = Callable[[str, str, int], None]


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
        self._keep(key, _Binding(endpoint, self._now_seconds, moves))
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
        told = _Binding(endpoint, self._now_seconds, moves)
        if before is not None and (before.moves, told.endpoint) > (moves, before.endpoint):
            told = _Binding(before.endpoint, self._now_seconds, before.moves)
        self._keep(key, told)

    def _keep(self, key: str, binding: _Binding) -> None:
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
