"""The series about what replicas tell each other."""

from __future__ import annotations

from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries


class PeerSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.connected = self._own_gauge(
            "peers_connected", "Replicas that this one tells what it does."
        )
        self.heard = self._own_gauge("peers_heard", "Replicas that tell this one what they do.")
        self.calls_total = self._own_counter(
            "peer_calls_total",
            "Calls to replicas, by how they ended.",
            ("result",),
        )
        self.bytes_total = self._own_counter(
            "peer_bytes_total", "Bytes of messages to and from replicas.", ("direction",)
        )
        self.messages_total = self._own_counter(
            "peer_messages_total", "Messages to and from replicas.", ("direction",)
        )
        self.entries_total = self._own_counter(
            "peer_entries_total",
            "Placements of prompts and sessions that replicas told, by what became of them.",
            ("result",),
        )
        self.batches_missed_total = self._own_counter(
            "peer_batches_missed_total", "Batches of replicas that did not come in their turn."
        )
        self.entries_dropped_total = self._own_counter(
            "peer_entries_dropped_total", "Entries that were not told: too many at once."
        )
        self.loads_expired_total = self._own_counter(
            "peer_loads_expired_total", "Times that the load of a silent replica was dropped."
        )
        self.messages_refused_total = self._own_counter(
            "peer_messages_refused_total",
            "Calls and messages of replicas that were refused: not understood, or of others.",
        )
