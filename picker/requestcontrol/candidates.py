"""Which endpoints of the pool one request may use, each with the picker's own load on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from picker.types import Candidate


def candidates_for(
    pool: Sequence[Candidate], subset_hint: Iterable[str] | None, inflight: Mapping[str, int]
) -> Sequence[Candidate]:
    """Narrow `pool` to `subset_hint` and fill in the in-flight counts; the pool's order is kept.

    An entry `ip:port` means exactly that endpoint, a bare `ip` every port of that address; IPv6
    needs brackets before a port. No hint (None) means the whole pool, an empty one means nothing.
    """
    eligible = pool if subset_hint is None else _within(pool, subset_hint)
    if not inflight:
        return eligible
    return [_with_load(candidate, inflight) for candidate in eligible]


def _with_load(candidate: Candidate, inflight: Mapping[str, int]) -> Candidate:
    requests = inflight.get(candidate.key)
    if requests is None:
        return candidate
    return Candidate(
        candidate.endpoint,
        candidate.metrics,
        requests,
        candidate.last_metrics,
        candidate.attributes,
    )


def _within(pool: Sequence[Candidate], subset_hint: Iterable[str]) -> list[Candidate]:
    wanted = frozenset(_normal_form(entry) for entry in subset_hint)
    if not wanted:
        return []
    return [candidate for candidate in pool if _matches(candidate, wanted)]


def _matches(candidate: Candidate, wanted: frozenset[tuple[str, int | None]]) -> bool:
    address = _normal_address(candidate.endpoint.address)
    return (address, candidate.endpoint.port) in wanted or (address, None) in wanted


def _normal_form(entry: str) -> tuple[str, int | None]:
    """`(address, port)` of a subset entry; port None when it names none."""
    entry = entry.strip()
    host, colon, port = entry.rpartition(":")
    bare_ipv6 = entry.count(":") > 1 and not entry.startswith("[")
    if not colon or bare_ipv6 or entry.endswith("]"):
        return _normal_address(entry), None
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        return entry, None  # equals no address, so it matches nothing
    return _normal_address(host), int(port)


def _normal_address(address: str) -> str:
    """One spelling per IPv6 address; anything else as it stands."""
    if ":" not in address:
        return address
    try:
        return str(ip_address(address.removeprefix("[").removesuffix("]")))
    except ValueError:
        return address
