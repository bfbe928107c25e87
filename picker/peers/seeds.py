"""The agreement of replicas on one hash seed that no configuration names.

A hash means something to another replica only if both use the same seed, which clients must not
know. Each replica draws one and sends it to its peers over a private channel. All follow the seed
of lowest rank, so they end with the same one in any order. A fresh seed ranks behind every settled
one, so a replica that joins follows those that would lose their index, whatever its clock says.

A configured seed is never sent and never changes. Replicas compare its fingerprint instead.
"""

import hashlib
from dataclasses import replace

from picker.peers.wire import Seed

SETTLE_SECONDS = 10.0  # a replica that joins yields to those that have an index to lose
_NAME = b"pointsman prompt hash seed"


def fingerprint(seed: int) -> int:
    """Return a number that identifies a seed without revealing it."""
    digest = hashlib.sha256(_NAME + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def seed_of_secret(secret: bytes) -> int:
    """Derive a seed from a shared secret of any length."""
    return int.from_bytes(hashlib.sha256(_NAME + b"\0" + secret).digest()[:8], "little")


class SeedAgreement:
    """Owns the seed of this replica. Times are monotonic; `unix_seconds` is the time of day now."""

    def __init__(
        self,
        value: int,
        chosen_by: bytes,
        now_seconds: float,
        unix_seconds: float,
        *,
        is_configured: bool = False,
    ) -> None:
        self._is_configured = is_configured
        self._value = value
        sent = None if is_configured else value
        self._seed = Seed(fingerprint(value), sent, False, int(unix_seconds * 1000), chosen_by)
        self._settles_at = now_seconds + SETTLE_SECONDS

    @property
    def value(self) -> int:
        return self._value

    def offer(self, now_seconds: float) -> Seed:
        if not self._is_configured and now_seconds >= self._settles_at:
            self._seed = replace(self._seed, is_settled=True)
        return self._seed

    def matches(self, other: Seed) -> bool:
        return other.fingerprint == self._seed.fingerprint

    def receive(self, other: Seed, now_seconds: float) -> bool:
        """Compare the seed with a peer's; return whether this replica switches to the peer's."""
        value = other.value
        if self._is_configured or value is None or fingerprint(value) != other.fingerprint:
            return False
        own = self.offer(now_seconds)
        if self.matches(other):
            if other.rank < own.rank:  # the peer settled it earlier
                self._seed = other
            return False
        if other.rank >= own.rank:
            return False
        self._seed, self._value = other, value
        return True
