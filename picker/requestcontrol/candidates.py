"""Which endpoints of the pool one request may use, each with the picker's own load on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from picker.types import Candidate


def candidates_for(
    pool: Sequence[Candidate],
    subset_hint: Iterable[str] | None,
    inflight: Mapping[str, int],
) -> Sequence[Candidate]:
    """Narrow `pool` to `subset_hint` and fill in the in-flight counts; the pool's order is kept.

    An entry `ip:port` means exactly that endpoint, a bare `ip` every port of that address; IPv6
    needs brackets before a port, and may be spelled in any way. Other entries mean nothing. No hint
    (None) means the whole pool, an empty one nobody.
    """
    eligible = pool if subset_hint is None else _within(pool, subset_hint)
    if not inflight:
        return eligible
    return [
        _with_load(candidate, inflight) if candidate.endpoint.key in inflight else candidate
        for candidate in eligible
    ]


def _with_load(candidate: Candidate, inflight: Mapping[str, int]) -> Candidate:
    return Candidate(
        candidate.endpoint,
        candidate.metrics,
        inflight[candidate.endpoint.key],
        candidate.last_metrics,
        candidate.attributes,
    )


def _within(pool: Sequence[Candidate], subset_hint: Iterable[str]) -> list[Candidate]:
    # Addresses of endpoints are in canonical form, so only the hint's need to be brought into it.
    anywhere: set[str] = set()
    ports: dict[str, set[int]] = {}
    for entry in subset_hint:
        address, port = _read(entry.strip())
        if port is None:
            anywhere.add(address)
        else:
            ports.setdefault(address, set()).add(port)
    return [
        candidate
        for candidate in pool
        if candidate.endpoint.address in anywhere
        or candidate.endpoint.port in ports.get(candidate.endpoint.address, ())
    ]


def _read(entry: str) -> tuple[str, int | None]:
    """`(address, port)` of a subset entry; port None when it names none.

    What is no such entry comes back as an address that no endpoint has.
    """
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return "", None
        return _with_port(_canonical(host), rest[1:] if rest else None)
    host, colon, port = entry.rpartition(":")
    if ":" in host or not colon:
        return _canonical(entry), None
    return _with_port(host, port)


def _with_port(address: str, port: str | None) -> tuple[str, int | None]:
    if port is None:
        return address, None
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    return (address, int(port)) if is_number else ("", None)


def _canonical(address: str) -> str:
    """One spelling per IPv6 address; anything else as it stands."""
    if ":" not in address:
        return address
    try:
        return str(ip_address(address))
    except ValueError:
        return ""
