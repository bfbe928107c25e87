"""The subscription of a client and its one unanswered response, for both variants.

Source: "xDS REST and gRPC protocol" of Envoy's documentation.
"""

from collections.abc import Iterable
from enum import Enum

WILDCARD = "*"


class Acknowledgement(Enum):
    """The answer that a request gives to the response before it."""

    NONE = "none"  # the first request, or a change of the subscription
    ACK = "ack"
    NACK = "nack"
    STALE = "stale"  # the client wrote it before it read the response


class Subscription:
    """Owns the names that a client subscribes to; `is_wildcard` means every name."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.is_wildcard = False

    def covers(self, name: str) -> bool:
        return self.is_wildcard or name in self.names

    def use(self, names: Iterable[str], is_wildcard: bool) -> None:
        """Replace the subscription; `*` among the names means every name."""
        given = frozenset(names)
        self.names = given - {WILDCARD}
        self.is_wildcard = is_wildcard or WILDCARD in given


class PendingResponse:
    """Issues nonces, and knows whether the last response is unanswered."""

    def __init__(self) -> None:
        self._count = 0
        self.is_unanswered = False

    @property
    def nonce(self) -> str:
        return str(self._count) if self._count else ""

    def send(self) -> str:
        """Note that a response is sent; return its nonce."""
        self._count += 1
        self.is_unanswered = True
        return self.nonce

    def answer(self, nonce: str, problem: str | None) -> Acknowledgement:
        """Interpret a request by its `nonce`; `problem` is the reason for a rejection."""
        if nonce != self.nonce:
            return Acknowledgement.STALE
        if not self.is_unanswered:
            return Acknowledgement.NONE
        self.is_unanswered = False
        return Acknowledgement.ACK if problem is None else Acknowledgement.NACK
