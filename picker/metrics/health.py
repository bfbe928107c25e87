"""The series about endpoints that failed: ejected, tried out, and back."""

from __future__ import annotations

from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries

ENDPOINT = ("endpoint_name", "namespace")


class HealthSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.ejections_total = self._own_counter(
            "endpoint_ejections_total",
            "Times that an endpoint was ejected for its failures.",
            ENDPOINT,
        )
        self.probes_total = self._own_counter(
            "endpoint_probes_total",
            "Requests that tried out an ejected endpoint, by what they found.",
            ("result",),
        )
        self.ejected = self._own_gauge("endpoints_ejected", "Endpoints that are ejected now.")
