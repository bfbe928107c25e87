"""The loads that peers report, until they fall silent, and the numbers of their batches.

The newest load of each peer counts, and expires when the peer is silent for a while, for whatever
reason, so no count outlives its replica. The plugins merge the batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from picker.framework.attributes import EndpointLoad
from picker.peers.wire import LoadKey, LoadReport, Loads

_NOTHING = EndpointLoad()
_MAX_MISSING = 1024  # batches of a peer


@dataclass(frozen=True, slots=True)
class InboxLimits:
    """Loads are valid for `silence_seconds`, a peer's last batch number for `memory_seconds`."""

    silence_seconds: float = 6.0  # three reports of a replica
    memory_seconds: float = 900.0
    max_peers: int = 256  # four times the replicas that one calls
    max_loads: int = 65_536  # ten times a large pool


@dataclass(slots=True)
class _Peer:
    last_message_seconds: float
    last_sequence: int = 0
    missing: set[int] = field(default_factory=set)  # recent batches that may still arrive
    version: int = -1
    loads: dict[LoadKey, EndpointLoad] = field(default_factory=dict)


class Inbox:
    """Owns the state of the peers, by their ids. Times are monotonic seconds."""

    def __init__(self, limits: InboxLimits | None = None) -> None:
        self._limits = limits or InboxLimits()
        self._peers: dict[bytes, _Peer] = {}
        self.missed = 0  # batches that were skipped by later ones
        self.expired = 0  # how often the loads of a silent peer were dropped
        self._has_lost_loads = False  # of a peer that was evicted

    @property
    def known(self) -> int:
        return len(self._peers)

    def greet(self, peer: bytes, now_seconds: float) -> int:
        """Begin a peer's call; return the number of its last batch, 0 for none."""
        return self._peer(peer, now_seconds).last_sequence

    def take_batch(self, peer: bytes, sequence: int, now_seconds: float) -> bool:
        """Note the arrival of a batch; return False for a duplicate."""
        known = self._peer(peer, now_seconds)
        last = known.last_sequence
        if sequence <= last:
            is_late = sequence in known.missing
            known.missing.discard(sequence)
            return is_late
        if last:  # batches before the first one may have been for other peers only
            self.missed += sequence - last - 1
        known.missing.update(range(max(last + 1, sequence - _MAX_MISSING), sequence))
        if len(known.missing) > 2 * _MAX_MISSING:
            known.missing = {one for one in known.missing if one >= sequence - _MAX_MISSING}
        known.last_sequence = sequence
        return True

    def take_loads(self, peer: bytes, report: LoadReport, now_seconds: float) -> bool:
        """Store reported loads; return whether they changed."""
        known = self._peer(peer, now_seconds)
        # Messages may arrive out of order: an older report must not undo a newer one.
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
        """Remove a peer that shuts down; return whether it had loads."""
        known = self._peers.pop(peer, None)
        return known is not None and bool(known.loads)

    def expire(self, now_seconds: float) -> bool:
        """Drop the state of silent peers; return whether any loads were dropped."""
        changed, self._has_lost_loads = self._has_lost_loads, False
        for peer, known in list(self._peers.items()):
            silent = now_seconds - known.last_message_seconds
            if silent > self._limits.silence_seconds and known.loads:
                known.loads, changed = {}, True
                # Its next report counts, whatever its version.
                known.version = -1
                self.expired += 1
            if silent > self._limits.memory_seconds:
                del self._peers[peer]
        return changed

    @property
    def size(self) -> int:
        return sum(len(known.loads) for known in self._peers.values())

    def loads(self) -> dict[str, dict[str, EndpointLoad]]:
        """Return the sum of the loads of all peers, by plugin and endpoint."""
        total: dict[str, dict[str, EndpointLoad]] = {}
        for known in self._peers.values():
            _add(total, known.loads)
        return total

    def check_integrity(self) -> None:
        if len(self._peers) > self._limits.max_peers:
            raise AssertionError(f"{len(self._peers)} peers are remembered")
        for known in self._peers.values():
            if len(known.loads) > self._limits.max_loads or _NOTHING in known.loads.values():
                raise AssertionError("a peer has too many loads, or empty ones")
            if len(known.missing) > 2 * _MAX_MISSING or known.last_sequence in known.missing:
                raise AssertionError("too many missing batches are remembered")

    def _peer(self, peer: bytes, now_seconds: float) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(now_seconds)
            if len(self._peers) > self._limits.max_peers:
                self._evict_one()
        known.last_message_seconds = max(known.last_message_seconds, now_seconds)
        return known

    def _evict_one(self) -> None:
        oldest = min(self._peers, key=lambda one: self._peers[one].last_message_seconds)
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
