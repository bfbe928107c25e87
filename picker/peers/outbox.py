"""The reports of this replica to its peers: bounded batches, with the same bytes for all.

The entries that plugins learn become batches in a log: numbered, encoded once, and limited in
bytes; the oldest batches are dropped first. Each peer has a cursor in the log, so a slow peer
loses only its own batches, one that returns resumes after its last batch, and a new one receives
the whole log.

Loads are absolute numbers outside of the log: a cursor sends the changes since its last version,
and all loads every few seconds, which repairs losses and shows that this replica is alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from picker.framework.attributes import EndpointLoad
from picker.peers.wire import (
    Batch,
    Binding,
    EndpointName,
    LoadKey,
    LoadReport,
    Loads,
    PeerReport,
    Placement,
    Seed,
    encoded_batch,
    encoded_report,
)
from picker.prefix.block_hash import BlockHashes

_ENTRY_BYTES = 64  # estimated size of an entry without its hashes or session
_NOTHING = EndpointLoad()


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Limits of the log, of the entries between two flushes, and of one message, in bytes."""

    log_bytes: int = 8 * 2**20
    pending_bytes: int = 2 * 2**20  # gathered in 50 ms
    batch_bytes: int = 32 * 2**10
    resend_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class _Logged:
    sequence: int
    encoded: bytes
    made_at_seconds: float


_Entry = tuple[str, str, BlockHashes | str, int]  # plugin, endpoint, hashes or session, number


class LoadBoard:
    """Owns the load of this replica, and the versions of its recent changes."""

    _MAX_VERSIONS = 1000  # in which changes are remembered

    def __init__(self) -> None:
        self.version = 0
        self._loads: dict[LoadKey, EndpointLoad] = {}
        self._changed: dict[LoadKey, int] = {}  # includes loads that have ended, for a while
        self._oldest = 0  # the version after which all changes are known

    def update(self, loads: Loads) -> None:
        before = self._loads
        self._loads = {key: load for key, load in loads.items() if load != _NOTHING}
        changed = [
            key
            for key in before.keys() | self._loads.keys()
            if before.get(key) != self._loads.get(key)
        ]
        if not changed:
            return
        self.version += 1
        for key in changed:
            self._changed[key] = self.version
        if self.version - self._oldest >= 2 * self._MAX_VERSIONS:
            self._oldest = self.version - self._MAX_VERSIONS
            self._changed = {
                key: version for key, version in self._changed.items() if version > self._oldest
            }

    def whole(self) -> LoadReport:
        return LoadReport(self.version, True, dict(self._loads))

    def since(self, version: int) -> LoadReport | None:
        """Return the changes since `version`; None if there are none."""
        if version == self.version:
            return None
        if version < self._oldest:
            return self.whole()
        changed = {
            key: self._loads.get(key, _NOTHING) for key, at in self._changed.items() if at > version
        }
        return LoadReport(self.version, False, changed)


class Outbox:
    """Owns the pending entries and the log; `identify` maps an endpoint's key to its server."""

    def __init__(
        self, identify: Callable[[str], EndpointName | None], limits: OutboxLimits | None = None
    ) -> None:
        self.limits = limits or OutboxLimits()
        self.board = LoadBoard()
        self.seed_changes = 0
        self.dropped = 0  # pending entries that never reached the log
        self._identify = identify
        self._pending: deque[_Entry] = deque()
        self.pending_bytes = 0
        self._log: deque[_Logged] = deque()
        self.log_bytes = 0
        self.sequence = 0

    def placed(self, plugin: str, endpoint: str, hashes: BlockHashes, capacity: int) -> None:
        self._gather((plugin, endpoint, hashes, capacity))

    def bound(self, plugin: str, session: str, endpoint: str, moves: int) -> None:
        self._gather((plugin, endpoint, session, moves))

    def flush(self, fingerprints: Mapping[str, int], loads: Loads, now_seconds: float) -> None:
        """Turn the pending entries into batches; `fingerprints` are those of the plugins' seeds."""
        self.board.update(loads)
        pending, self._pending, self.pending_bytes = self._pending, deque(), 0
        while pending:
            size = 0
            entries: list[_Entry] = []
            while pending and (not entries or size + _size(pending[0]) <= self.limits.batch_bytes):
                entries.append(pending.popleft())
                size += _size(entries[-1])
            # Also while no peer is connected: one that comes reads the whole log.
            self._append(entries, fingerprints, now_seconds)

    def reseeded(self) -> None:
        """Drop everything that was hashed with the previous seed."""
        self.seed_changes += 1
        self._log.clear()
        self._pending.clear()
        self.log_bytes = self.pending_bytes = 0

    def open(self, last_sequence: int) -> Cursor:
        """Return a cursor after batch `last_sequence`, the last one that the peer has received."""
        return Cursor(self, min(last_sequence, self.sequence))

    def after(self, sequence: int) -> _Logged | None:
        """Return the first batch after `sequence` that is still in the log."""
        if sequence >= self.sequence or not self._log:
            return None
        # A slow peer loses the beginning of what it has not read.
        return self._log[max(0, sequence + 1 - self._log[0].sequence)]

    def check_integrity(self) -> None:
        if sum(len(one.encoded) for one in self._log) != self.log_bytes:
            raise AssertionError("the log is miscounted")
        if self.log_bytes > self.limits.log_bytes or (
            self.pending_bytes > self.limits.pending_bytes
        ):
            raise AssertionError("the outbox is too large")
        numbers = [one.sequence for one in self._log]
        if numbers != list(range(self.sequence - len(numbers) + 1, self.sequence + 1)):
            raise AssertionError(f"the log has gaps: {numbers}")

    def _gather(self, entry: _Entry) -> None:
        size = _size(entry)
        self._pending.append(entry)
        self.pending_bytes += size
        while self.pending_bytes > self.limits.pending_bytes:
            self.pending_bytes -= _size(self._pending.popleft())
            self.dropped += 1

    def _append(
        self, entries: Iterable[_Entry], fingerprints: Mapping[str, int], now_seconds: float
    ) -> None:
        placements: list[Placement] = []
        bindings: list[Binding] = []
        for plugin, key, what, number in entries:
            endpoint = self._identify(key)
            if endpoint is None:
                continue
            if isinstance(what, str):
                bindings.append(Binding(plugin, endpoint, what, number))
            else:
                placements.append(Placement(plugin, endpoint, number, what))
        if not placements and not bindings:
            return
        self.sequence += 1
        batch = Batch(self.sequence, tuple(placements), tuple(bindings), fingerprints)
        encoded = encoded_batch(batch)
        self._log.append(_Logged(self.sequence, encoded, now_seconds))
        self.log_bytes += len(encoded)
        while self.log_bytes > self.limits.log_bytes:
            self.log_bytes -= len(self._log.popleft().encoded)


class Cursor:
    """Owns the position of one peer in the log and in the versions of the loads."""

    def __init__(self, outbox: Outbox, sequence: int) -> None:
        self.skipped = 0  # batches that left the log before this peer read them
        self.batches = 0  # batches that this peer has read
        self._outbox = outbox
        self._sequence = sequence
        self._loads: int | None = None
        self._sent_at_seconds = 0.0
        self._seed_changes = outbox.seed_changes

    def next(self, seed: Seed, now_seconds: float) -> bytes | None:
        """Return the next message; None if there is nothing to report now."""
        logged = self._outbox.after(self._sequence)
        loads = self._report(now_seconds)
        changed = self._seed_changes != self._outbox.seed_changes
        if logged is None and loads is None and not changed:
            return None
        self._seed_changes = self._outbox.seed_changes
        new_seed = seed if changed else None
        if logged is None:
            return encoded_report(PeerReport(loads=loads, seed=new_seed))
        # A new peer has not lost the batches from before its arrival.
        if self._sequence:
            self.skipped += logged.sequence - self._sequence - 1
        self._sequence = logged.sequence
        self.batches += 1
        age = max(0.0, now_seconds - logged.made_at_seconds)
        # Concatenated protobuf messages mean their merge.
        return logged.encoded + encoded_report(
            PeerReport(loads=loads, seed=new_seed, age_seconds=age)
        )

    def _report(self, now_seconds: float) -> LoadReport | None:
        board, resend = self._outbox.board, self._outbox.limits.resend_seconds
        # Whole now and then, so that a lost message leaves no wrong sum.
        if self._loads is None or now_seconds - self._sent_at_seconds >= resend:
            self._sent_at_seconds = now_seconds
            self._loads = board.version
            return board.whole()
        report = board.since(self._loads)
        self._loads = board.version
        return report


def _size(entry: _Entry) -> int:
    return _ENTRY_BYTES + len(entry[2])
