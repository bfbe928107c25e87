"""The series about KV caches as engines tell of them: what was heard, and what was looked up.

A pod is told by the key of its endpoint.
"""

from __future__ import annotations

from picker.metrics.declarations import KV_CACHE_PREFIX, Declarations
from picker.metrics.series import AnySeries, Counter, Twin

POD = ("pod_identifier",)
# The library's own bounds, which the reference leaves as they are.
LOOKUP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class KvSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.lookup_requests_total = self._of_index(
            "lookup_requests_total", "Prompts that were looked up."
        )
        self.lookup_hits_total = self._of_index(
            "lookup_hits_total", "Blocks of prompts, from their beginning, that some engine holds."
        )
        self.max_pod_hit_count_total = self._of_index(
            "max_pod_hit_count_total", "Blocks of prompts that the best engine holds."
        )
        self.lookup_latency_seconds = self._histogram(
            "kv_cache_index_lookup_latency_seconds",
            "Duration of one look-up.",
            LOOKUP_SECONDS,
            twins=(Twin(KV_CACHE_PREFIX + "index_lookup_latency_seconds"),),
        )
        self.active_subscribers = self._gauge(
            "kv_cache_events_active_subscribers", "Engines, or addresses, that are listened to."
        )
        self.messages_received_total = self._counter(
            "kv_cache_events_messages_received_total", "Messages of engines.", POD
        )
        self.zmq_errors_total = self._counter(
            "kv_cache_events_zmq_errors_total",
            "Messages that could not be understood, and addresses that could not be reached.",
            (*POD, "operation"),
        )
        self.replays_total = self._own_counter(
            "kv_event_replays_total",
            "Times that an engine was asked for messages again, by how that ended.",
            (*POD, "result"),
        )
        self.gaps_total = self._own_counter(
            "kv_event_gaps_total", "Times that messages of an engine were missing.", POD
        )
        self.restarts_total = self._own_counter(
            "kv_event_restarts_total", "Times that an engine began to count anew.", POD
        )

    def _of_index(self, name: str, text: str) -> Counter:
        twins = (Twin(f"{KV_CACHE_PREFIX}index_{name}"),)
        return self._counter(f"kv_cache_index_{name}", text, twins=twins)
