"""What both variants of the protocol have in common: which names a client wants to hear of, and the
one response that it has not answered yet.

Source: "xDS REST and gRPC protocol" of Envoy's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

WILDCARD = "*"


class Verdict(Enum):
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
        """Whether the client wants to hear of `name`."""
        return self.is_wildcard or name in self.names

    def use(self, names: Iterable[str], is_wildcard: bool) -> None:
        """Want these, in place of what was wanted; `*` among them is every name."""
        given = frozenset(names)
        self.names = given - {WILDCARD}
        self.is_wildcard = is_wildcard or WILDCARD in given


class Flight:
    """Gives out nonces, and knows which response is under way: at most one."""

    def __init__(self) -> None:
        self._count = 0
        self.is_under_way = False

    @property
    def nonce(self) -> str:
        """Of the response that was sent last; "" before the first one."""
        return str(self._count) if self._count else ""

    def launch(self) -> str:
        """A response leaves; its nonce."""
        self._count += 1
        self.is_under_way = True
        return self.nonce

    def land(self, nonce: str, problem: str | None) -> Verdict:
        """A request names `nonce`; `problem` is why the client could not use that response."""
        if nonce != self.nonce:
            return Verdict.STALE
        if not self.is_under_way:
            return Verdict.NONE
        self.is_under_way = False
        return Verdict.ACK if problem is None else Verdict.NACK
