"""Tells clients who served them: headers on the response, for those who want to look it up."""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.interfaces import Flight
from picker.requestcontrol.headers import REQUEST_ID
from picker.types import ResponseHead

SERVED_ENDPOINT = "x-pointsman-endpoint"


class DecisionHeader:
    """A `ResponseHeadHook`. Stateless."""

    name = "decision-header"

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str]:
        """The id to ask `pointsman explain` for, and the name of the endpoint that served."""
        return {
            REQUEST_ID: flight.request.request_id,
            SERVED_ENDPOINT: _served(flight, head.served_by),
        }


def _served(flight: Flight, served_by: str | None) -> str:
    """The name behind what the proxy says, else that of the endpoint that was chosen."""
    chosen = flight.result.endpoints
    if served_by is None or served_by == chosen[0].host_port:
        return chosen[0].name
    for profile in flight.result.profiles.values():
        for one in profile.scored:
            if one.candidate.endpoint.host_port == served_by:
                return one.candidate.endpoint.name
    others = (one.name for one in chosen if one.host_port == served_by)
    return next(others, served_by)
