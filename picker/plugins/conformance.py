"""Types for the conformance suite of the Gateway API Inference Extension.

header-based-testing-filter: keep endpoints that a request header lists; for conformance.

    keep = the endpoints of `test-epp-endpoint-selection: IP[:port], …`, in the header's order

An entry without a port means every endpoint of that address, in the candidates' order; an IPv6
address must be in brackets before a port. An entry that is no endpoint's address lets none pass;
nor does a blank header. Requests without a body are filtered, too (the reference sends those
anywhere). Without the header all pass, because the suite expects that any endpoint may serve then
(the reference keeps none). The suite's data-parallel pools need the ports of one address to be
distinguished (the reference treats them as one endpoint).

destination-endpoint-served-verifier: report the serving endpoint to clients; for conformance.

    x-conformance-test-served-endpoint = the endpoint that served, as the proxy reports it
      | fail: missing envoy lb metadata                     the proxy sent no metadata
      | fail: missing destination endpoint served metadata  its metadata do not name the endpoint
"""

from collections.abc import Mapping
from ipaddress import ip_address
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.framework.registry import PluginType
from picker.types import Candidate, Candidates, InferenceRequest, ResponseHead

SELECTION_HEADER = "test-epp-endpoint-selection"
_MAX_PORT_DIGITS = 5


class HeaderBasedTestingFilter:
    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        return self.narrow(request.headers, candidates)

    def narrow(self, headers: Mapping[str, str], candidates: Candidates) -> Candidates:
        """Filter the candidates of a request of which only the headers are known."""
        listed = headers.get(SELECTION_HEADER)
        if listed is None:
            return candidates
        # Addresses are parsed once, because clients choose the length of the list.
        at: dict[str | None, list[Candidate]] = {}
        for candidate in candidates:
            at.setdefault(_canonical(candidate.endpoint.address), []).append(candidate)
        found: dict[str, Candidate] = {}
        for address, port in filter(None, map(_entry, listed.split(","))):
            for candidate in at.get(address, ()):
                if port in (None, candidate.endpoint.port):
                    found.setdefault(candidate.key, candidate)
        return tuple(found.values())


def _entry(text: str) -> tuple[str, int | None] | None:
    """Parse an address and its port, if it has one; None for text that is not an address."""
    text = text.strip()
    alone = _canonical(text.removeprefix("[").removesuffix("]"))
    if alone is not None:
        return alone, None
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= _MAX_PORT_DIGITS):
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    address = _canonical(host)
    return None if address is None else (address, int(port))


def _canonical(address: str) -> str | None:
    try:
        return str(ip_address(address))
    except ValueError:
        return None


SERVED_HEADER = "x-conformance-test-served-endpoint"


class DestinationEndpointServedVerifier:
    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        del flight
        return self.bodyless_response_head(head)

    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str]:
        """Return the header for a response of which only the head is known."""
        if head.served_by:
            return {SERVED_HEADER: head.served_by}
        missing = "destination endpoint served" if head.has_destination_metadata else "envoy lb"
        return {SERVED_HEADER: f"fail: missing {missing} metadata"}


PLUGINS = (
    PluginType("header-based-testing-filter", HeaderBasedTestingFilter),
    PluginType("destination-endpoint-served-verifier", DestinationEndpointServedVerifier),
)
