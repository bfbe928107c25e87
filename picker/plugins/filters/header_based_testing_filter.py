"""header-based-testing-filter: keep the endpoints that a request header lists; for conformance.

    keep = the endpoints of `test-epp-endpoint-selection: IP[:port], …`, in the header's order

An entry with a port is one endpoint; without one it is every endpoint of that address, in the
candidates' order. IPv6 addresses may stand in brackets, and have to before a port. An endpoint is
kept once, however often it is listed; an entry that is no endpoint's address keeps nothing.

Requests without a body are filtered, too (the reference sends those anywhere).

Without the header all are kept: the conformance suite expects that any endpoint may serve then (the
reference keeps none, and so refuses). A header that is present but blank keeps none. The reference
takes ports of one address for one endpoint; here they are distinguished, as the suite's
data-parallel pools need.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Candidate, Candidates, InferenceRequest

HEADER = "test-epp-endpoint-selection"
_MAX_PORT_DIGITS = 5


class HeaderBasedTestingFilter:
    """Keeps what the client lists. Stateless."""

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The listed candidates in the list's order, all without a list."""
        return self.narrow(request.headers, candidates)

    def narrow(self, headers: Mapping[str, str], candidates: Candidates) -> Candidates:
        """The same for a request of which no more than the headers is known."""
        listed = headers.get(HEADER)
        if listed is None:
            return candidates
        # Addresses are read once: how long the list is, is the client's choice.
        at: dict[str | None, list[Candidate]] = {}
        for candidate in candidates:
            at.setdefault(_canonical(candidate.endpoint.address), []).append(candidate)
        kept: dict[str, Candidate] = {}
        for address, port in filter(None, map(_entry, listed.split(","))):
            for candidate in at.get(address, ()):
                if port in (None, candidate.endpoint.port):
                    kept.setdefault(candidate.key, candidate)
        return tuple(kept.values())


def _entry(text: str) -> tuple[str, int | None] | None:
    """The address and the port, if one is named; None for what is no address."""
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
    """The one way to write an IP address; None for what is none."""
    try:
        return str(ip_address(address))
    except ValueError:
        return None


PLUGIN = PluginType("header-based-testing-filter", Parameters, plain(HeaderBasedTestingFilter))
