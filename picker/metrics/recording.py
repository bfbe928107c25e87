"""The series about a recording of decisions; 0 while nothing is recorded."""

from __future__ import annotations

from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries


class RecordingSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.active = self._own_gauge("recording_active", "1 while decisions are recorded.")
        self.bytes_total = self._own_counter("recording_bytes_total", "Written to the recording.")
        self.lost_lines_total = self._own_counter(
            "recording_lost_lines_total", "Lines that could not be written to the recording."
        )
