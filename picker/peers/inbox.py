"""What peers have told: their loads, until they fall silent, and which of their batches came.

Batches are merged by whoever remembers prompts and sessions; here it is only seen to that none is
taken twice, and counted how many never came. Loads are absolute numbers by version: the newest of
each peer counts, and all of them vanish once nothing was heard of it for a while, whatever became
of it; a counter cannot be left standing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from picker.framework.attributes import EndpointLoad
from picker.peers.wire import LoadKey, LoadReport, Loads

_NOTHING = EndpointLoad()
_MAX_MISSING = 1024  # batches of a peer


@dataclass(frozen=True, slots=True)
class InboxLimits:
    """A peer's loads count for `silence_seconds` after the last word of it; how far its batches
    were heard is remembered for `memory_seconds`, for it to go on from there. At most `max_peers`
    are known and `max_loads` kept of each.
    """

    silence_seconds: float = 6.0
    memory_seconds: float = 900.0
    max_peers: int = 256
    max_loads: int = 65_536


@dataclass(slots=True)
class _Peer:
    """What is known of one replica, which has another id after a restart."""

    heard_at_seconds: float
    last_sequence: int = 0
    missing: set[int] = field(default_factory=set)  # of the last batches, those that may yet come
    version: int = -1
    loads: dict[LoadKey, EndpointLoad] = field(default_factory=dict)


class Inbox:
    """Owns what is known of the peers, by their ids. Times are monotonic seconds."""

    def __init__(self, limits: InboxLimits | None = None) -> None:
        self._limits = limits or InboxLimits()
        self._peers: dict[bytes, _Peer] = {}
        self.missed = 0  # batches that did not come in their turn
        self.expired = 0  # times that the loads of a silent peer were dropped
        self._has_lost_loads = False  # with a peer that had to go for another one

    @property
    def known(self) -> int:
        """How many peers are remembered."""
        return len(self._peers)

    def greet(self, peer: bytes, now_seconds: float) -> int:
        """A peer begins a call: the last batch heard of it, 0 for none."""
        return self._heard(peer, now_seconds).last_sequence

    def take_batch(self, peer: bytes, sequence: int, now_seconds: float) -> bool:
        """A batch came; whether it is news."""
        known = self._heard(peer, now_seconds)
        last = known.last_sequence
        if sequence <= last:
            is_late = sequence in known.missing
            known.missing.discard(sequence)
            return is_late
        if last:  # what was told before the first that came may have been told to others only
            self.missed += sequence - last - 1
        known.missing.update(range(max(last + 1, sequence - _MAX_MISSING), sequence))
        if len(known.missing) > 2 * _MAX_MISSING:
            known.missing = {one for one in known.missing if one >= sequence - _MAX_MISSING}
        known.last_sequence = sequence
        return True

    def take_loads(self, peer: bytes, report: LoadReport, now_seconds: float) -> bool:
        """Loads came; whether those that count are others now."""
        known = self._heard(peer, now_seconds)
        if report.version < known.version or (
            report.version == known.version and not report.is_whole
        ):
            return False
        known.version = report.version
        before = known.loads
        after = {} if report.is_whole else dict(before)
        for key, load in report.loads.items():
            if load == _NOTHING:
                after.pop(key, None)
            elif key in after or len(after) < self._limits.max_loads:
                after[key] = load
        known.loads = after
        return before != after

    def say_goodbye(self, peer: bytes) -> bool:
        """A peer ends in order; whether loads that counted do not any more."""
        known = self._peers.pop(peer, None)
        return known is not None and bool(known.loads)

    def expire(self, now_seconds: float) -> bool:
        """Drop what has stood for too long; whether loads that counted do not any more."""
        changed, self._has_lost_loads = self._has_lost_loads, False
        for peer, known in list(self._peers.items()):
            silent = now_seconds - known.heard_at_seconds
            if silent > self._limits.silence_seconds and known.loads:
                known.loads, changed = {}, True
                # What it says next counts, whichever version that is.
                known.version = -1
                self.expired += 1
            if silent > self._limits.memory_seconds:
                del self._peers[peer]
        return changed

    @property
    def size(self) -> int:
        """How many loads are kept, of all peers."""
        return sum(len(known.loads) for known in self._peers.values())

    def loads(self) -> dict[str, dict[str, EndpointLoad]]:
        """What all peers have under way together, by plugin and endpoint."""
        total: dict[str, dict[str, EndpointLoad]] = {}
        for known in self._peers.values():
            _add(total, known.loads)
        return total

    def check_integrity(self) -> None:
        """Raise `AssertionError` when a bound is broken."""
        if len(self._peers) > self._limits.max_peers:
            raise AssertionError(f"{len(self._peers)} peers are remembered")
        for known in self._peers.values():
            if len(known.loads) > self._limits.max_loads or _NOTHING in known.loads.values():
                raise AssertionError("a peer's loads are too many, or nothing")
            if len(known.missing) > 2 * _MAX_MISSING or known.last_sequence in known.missing:
                raise AssertionError("too much is remembered of batches that did not come")

    def _heard(self, peer: bytes, now_seconds: float) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(now_seconds)
            if len(self._peers) > self._limits.max_peers:
                self._forget_one()
        known.heard_at_seconds = max(known.heard_at_seconds, now_seconds)
        return known

    def _forget_one(self) -> None:
        oldest = min(self._peers, key=lambda one: self._peers[one].heard_at_seconds)
        self._has_lost_loads |= bool(self._peers.pop(oldest).loads)


def _add(
    total: dict[str, dict[str, EndpointLoad]], loads: Loads | Mapping[LoadKey, EndpointLoad]
) -> None:
    for (plugin, endpoint), load in loads.items():
        of_plugin = total.setdefault(plugin, {})
        known = of_plugin.get(endpoint, _NOTHING)
        of_plugin[endpoint] = EndpointLoad(
            known.requests + load.requests, known.tokens + load.tokens
        )
