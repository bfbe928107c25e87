"""The endpoints of the pool that one request may use, each with the picker's own load."""

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from picker.types import Candidate

_SLACK = 64  # cached endpoints without load


class LoadedCandidates:
    """Candidates with their in-flight counts, cached between decisions. Owned by the director.

    Few counts change between two decisions, and in a pool of thousands most of the time of a
    decision would go into creating all candidates again.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Candidate, Candidate]] = {}  # by key: without, and with load

    def of(self, pool: Sequence[Candidate], inflight: Mapping[str, int]) -> list[Candidate]:
        if len(self._made) > 2 * len(inflight) + _SLACK:
            self._made.clear()  # it contains idle or removed endpoints
        made = self._made
        loaded = []
        for candidate in pool:
            key = candidate.endpoint.key
            count = inflight.get(key)
            if count is None:
                loaded.append(candidate)
                continue
            known = made.get(key)
            if known is None or known[0] is not candidate or known[1].inflight_requests != count:
                known = made[key] = (candidate, _with_load(candidate, count))
            loaded.append(known[1])
        return loaded


def candidates_for(
    pool: Sequence[Candidate],
    subset_hint: Iterable[str] | None,
    inflight: Mapping[str, int],
    loaded: LoadedCandidates,
) -> Sequence[Candidate]:
    """Narrow `pool` to `subset_hint`, in its order, and fill in the in-flight counts.

    An entry `ip:port` selects exactly that endpoint, an `ip` alone every port of that address; IPv6
    needs brackets before a port. No hint (None) selects the whole pool, an empty one no endpoint.
    """
    eligible = pool if subset_hint is None else _within(pool, subset_hint)
    if not inflight:
        return eligible
    return loaded.of(eligible, inflight)


def _with_load(candidate: Candidate, count: int) -> Candidate:
    return Candidate(
        candidate.endpoint, candidate.metrics, count, candidate.last_metrics, candidate.attributes
    )


def _within(pool: Sequence[Candidate], subset_hint: Iterable[str]) -> list[Candidate]:
    # Addresses of endpoints are in canonical form already.
    anywhere: set[str] = set()
    ports: dict[str, set[int]] = {}
    for entry in subset_hint:
        address, port = _read(entry.strip().lower())
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
    """Return the address and port of a subset entry; a malformed one matches no endpoint."""
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
    if ":" not in address:
        return address
    try:
        return str(ip_address(address))
    except ValueError:
        return ""
