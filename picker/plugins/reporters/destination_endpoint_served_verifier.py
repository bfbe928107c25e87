"""destination-endpoint-served-verifier: report the serving endpoint to clients; for conformance.

x-conformance-test-served-endpoint = the endpoint that the proxy says has served
  | fail: missing envoy lb metadata                          the proxy sent none at all
  | fail: missing destination endpoint served metadata       it did not say which endpoint
"""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import ResponseHead

HEADER = "x-conformance-test-served-endpoint"


class DestinationEndpointServedVerifier:
    """Sets one response header. Stateless."""

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """Who has served, or why that is not known."""
        del flight
        return self.bare_response_head(head)

    def bare_response_head(self, head: ResponseHead) -> Mapping[str, str]:
        """The same on the response to a request of which nothing else is known."""
        if head.served_by:
            return {HEADER: head.served_by}
        missing = "destination endpoint served" if head.has_destination_metadata else "envoy lb"
        return {HEADER: f"fail: missing {missing} metadata"}


PLUGIN = PluginType(
    "destination-endpoint-served-verifier", Parameters, plain(DestinationEndpointServedVerifier)
)
