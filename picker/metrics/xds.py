"""The series of endpoint discovery: who follows the pool, and how far."""

from __future__ import annotations

from picker.metrics.declarations import Declarations
from picker.metrics.series import AnySeries

VARIANT = ("variant",)


class XdsSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.clients = self._own_gauge("xds_clients", "Streams of endpoint discovery now open.")
        self.responses_total = self._own_counter(
            "xds_responses_total", "Responses to clients of endpoint discovery.", VARIANT
        )
        self.acks_total = self._own_counter(
            "xds_acks_total", "Responses that a client has taken over.", VARIANT
        )
        self.nacks_total = self._own_counter(
            "xds_nacks_total", "Responses that a client has refused.", VARIANT
        )
        self.version = self._own_gauge(
            "xds_version", "How many different sets of endpoints there have been to tell of."
        )
        self.endpoints = self._own_gauge("xds_endpoints", "Endpoints that clients are told of.")
