"""How replicas come to hash by one seed without anybody configuring it.

Theory of operation. A hash says something to another replica only if both use one seed, and clients
must not know it. Each replica draws one when it starts, and tells it to its peers, over a channel
that only they can read. Of two seeds all follow the one of less rank; ranks are totally ordered, so
whoever talks to each other, in whatever order, ends with the same seed. A seed that was just drawn
ranks behind every settled one, so that a replica that joins follows those that have something to
lose, whatever its clock says; a seed is settled some seconds after it was drawn.

A seed that was configured is never told and never changes. Replicas then see from its fingerprint
whether they have the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from picker.peers.wire import Seed

SETTLING_SECONDS = 10.0
_NAME = b"pointsman prompt hash seed"


def fingerprint(seed: int) -> int:
    """Tells seeds apart, and nothing else about them."""
    digest = hashlib.sha256(_NAME + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def seed_of_secret(secret: bytes) -> int:
    """The seed of a shared secret of any length."""
    return int.from_bytes(hashlib.sha256(_NAME + b"\0" + secret).digest()[:8], "little")


class SeedAgreement:
    """Owns the seed that this replica goes by.

    Times are monotonic seconds; `unix_seconds` is the time of day when it begins.
    """

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
        told = None if is_configured else value
        self._seed = Seed(fingerprint(value), told, False, int(unix_seconds * 1000), chosen_by)
        self._settles_at = now_seconds + SETTLING_SECONDS

    @property
    def value(self) -> int:
        """The seed now."""
        return self._value

    def offer(self, now_seconds: float) -> Seed:
        """What peers are told now."""
        if not self._is_configured and now_seconds >= self._settles_at:
            self._seed = replace(self._seed, is_settled=True)
        return self._seed

    def matches(self, other: Seed) -> bool:
        """Whether a peer hashes by the same seed."""
        return other.fingerprint == self._seed.fingerprint

    def hear(self, other: Seed, now_seconds: float) -> bool:
        """A peer goes by `other`; whether this replica follows it, and has another seed now."""
        value = other.value
        if self._is_configured or value is None or fingerprint(value) != other.fingerprint:
            return False
        own = self.offer(now_seconds)
        if self.matches(other):
            if other.rank < own.rank:  # it was settled there before
                self._seed = other
            return False
        if other.rank >= own.rank:
            return False
        self._seed, self._value = other, value
        return True
