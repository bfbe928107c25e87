"""The series of ext_proc streams; 0 where nobody was asked to count them."""

from __future__ import annotations

from picker.metrics.buckets import STREAM_SECONDS
from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries


class StreamSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.inflight = self._gauge("extproc_streams_inflight", "ext_proc streams that are open.")
        self.duration_seconds = self._histogram(
            "extproc_stream_duration_seconds", "How long streams were open.", STREAM_SECONDS
        )
        self.total = self._counter(
            "extproc_streams_total", "Streams that ended, by their gRPC status.", ("code",)
        )
