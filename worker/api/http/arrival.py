"""The headers that identify and rank a request: its id, tenant, priority and source of KV."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from worker.api.http.exchange import Exchange
from worker.errors import RequestError

FAIRNESS_ID = b"x-gateway-inference-fairness-id"
PRIORITY = b"x-vllm-priority"
KV_SOURCE = "x-kv-cache-source-host-port"
MAX_TENANT_CHARS = 128
_MAX_DIGITS = 20  # a 64-bit number has 19; `int` raises beyond 4,300
_INT64 = 1 << 63


class ApiKeys:
    """Bearer keys, stored as digests: the time of a comparison reveals nothing about them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def let_in(self, exchange: Exchange) -> bool:
        token = hashlib.sha256(given_key(exchange).encode("latin-1")).digest()
        matches = [hmac.compare_digest(token, digest) for digest in self._digests]
        return any(matches)


def given_key(exchange: Exchange) -> str:
    """Return the bearer token, or the key in the header of Anthropic's clients; empty if none."""
    scheme, _, token = (exchange.header(b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return token
    return exchange.header(b"x-api-key") or ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrived. `request_id` is the client's, `seconds` is monotonic, `priority`
    is the header's, `kv_source` is the worker that a picker names because it has KV of the prompt.
    """

    request_id: str | None
    seconds: float
    tenant: str = ""
    priority: int | None = None
    kv_source: str | None = None


def arrival_of(
    exchange: Exchange, request_id: str | None, now: float, api_keys: Sequence[str] = ()
) -> Arrival:
    """Read the headers. The tenant is the API key in use, if there are several, with the gateway's
    fairness id; with neither it is "", the tenant of all anonymous clients. Raises `RequestError`
    (400).
    """
    tenant, priority = _tenant(exchange, api_keys), _priority(exchange)
    return Arrival(request_id, now, tenant, priority, exchange.header(KV_SOURCE.encode()))


def _tenant(exchange: Exchange, api_keys: Sequence[str]) -> str:
    named = _short((exchange.header(FAIRNESS_ID) or "").strip(" \t"))
    # One key is one client: it says no more than none.
    if len(api_keys) < 2:
        return named
    given = given_key(exchange).encode("latin-1")
    # Every key is compared, so that the time does not show which matched.
    matches = [hmac.compare_digest(given, key.encode()) for key in api_keys]
    key = f"key-{matches.index(True)}" if any(matches) else "no-key"
    return f"{key}/{named}" if named else key


def _short(name: str) -> str:
    """Return a name, or a long one's digest, so that no two tenants share the shortened name."""
    if len(name) <= MAX_TENANT_CHARS and name.isprintable():
        return name
    # No printable name begins so: none can pose as the digest of another one.
    return "\0" + hashlib.sha256(name.encode()).hexdigest()


def _priority(exchange: Exchange) -> int | None:
    given = exchange.header(PRIORITY)
    if given is None:
        return None
    digits = given.strip()
    unsigned = digits.removeprefix("-")
    is_number = unsigned.isascii() and unsigned.isdecimal() and len(unsigned) < _MAX_DIGITS
    priority = int(digits) if is_number else None
    if priority is None or not -_INT64 <= priority < _INT64:
        name = PRIORITY.decode()
        raise RequestError(f"{name} must be a 64-bit integer, got {digits[:40]!r}", param=name)
    return priority
