"""The parts of both variants of the protocol: which names a client subscribes to, and the one
response that it has not answered yet.

Source: "xDS REST and gRPC protocol" of Envoy's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

WILDCARD = "*"


class Acknowledgement(Enum):
    """What a request says of the response before it."""

    NONE = "none"  # nothing: it is the first one, or changes a subscription
    ACK = "ack"
    NACK = "nack"
    STALE = "stale"  # it was written before the client has read the response


class Subscription:
    """The names of one client; it owns them. With `is_wildcard` every name counts."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.is_wildcard = False

    def covers(self, name: str) -> bool:
        """True if the client subscribes to `name`."""
        return self.is_wildcard or name in self.names

    def use(self, names: Iterable[str], is_wildcard: bool) -> None:
        """Subscribe to these, in place of those before; `*` among them is every name."""
        given = frozenset(names)
        self.names = given - {WILDCARD}
        self.is_wildcard = is_wildcard or WILDCARD in given


class PendingResponse:
    """Gives out nonces, and knows whether a response is unanswered: at most one."""

    def __init__(self) -> None:
        self._count = 0
        self.is_unanswered = False

    @property
    def nonce(self) -> str:
        """Of the response that was sent last; "" before the first one."""
        return str(self._count) if self._count else ""

    def send(self) -> str:
        """A response leaves; its nonce."""
        self._count += 1
        self.is_unanswered = True
        return self.nonce

    def answer(self, nonce: str, problem: str | None) -> Acknowledgement:
        """A request names `nonce`; `problem` is why the client could not use that response."""
        if nonce != self.nonce:
            return Acknowledgement.STALE
        if not self.is_unanswered:
            return Acknowledgement.NONE
        self.is_unanswered = False
        return Acknowledgement.ACK if problem is None else Acknowledgement.NACK
