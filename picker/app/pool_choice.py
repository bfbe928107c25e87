"""Which of several pools a request at their common port is for: the proxy says so.

The proxy's call has the gRPC metadata `x-pointsman-pool`, whose value is the name of a pool, alone
or after its namespace and a slash. Nothing is guessed: a request whose proxy names no pool, one
that is not served here, or two, is refused, with the status that the Gateway API has for a route
with an invalid backend. With `--route-by-model` the model chooses where the proxy names no pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from base.series import Counter
from picker.errors import Code, RefusedError
from picker.extproc.pump import ExchangeSource
from picker.rpc.calls import Metadata
from picker.types import FinishCause, RawRequest, RouteDecision

log = logging.getLogger(__name__)

POOL_METADATA: Final = b"x-pointsman-pool"
_MAX_WARNINGS: Final = 100
_SHOWN_LENGTH: Final = 100


class PoolChoice:
    """Finds the director of a call. `pools` are those by all names that proxies may use."""

    def __init__(
        self,
        pools: Mapping[str, ExchangeSource],
        keys: Sequence[str],
        unknown: Counter,
        unnamed: ExchangeSource | None = None,
    ) -> None:
        """`keys` are told to whoever names another pool, and `unknown` counts these. `unnamed` is
        for calls that name no pool; None: those are refused, unless there is only one.
        """
        self._pools = {name.encode(): source for name, source in pools.items()}
        self._keys = ", ".join(keys)
        self._warned: set[str] = set()
        only = next(iter(pools.values())) if len(keys) == 1 else None
        self._unnamed = unnamed or only or _Refusing(self._told(""), unknown)
        self._others = _Refusing(f"the proxy asks for another pool than {self._keys}", unknown)

    def choose(self, metadata: Metadata) -> ExchangeSource:
        """The director, or somebody who refuses the request."""
        named = metadata.get(POOL_METADATA)
        if named is None:
            return self._unnamed
        source = self._pools.get(named) or self._pools.get(_alone(named))
        if source is not None:
            return source
        self._warn(_shown(named))
        return self._others

    def _warn(self, name: str) -> None:
        if name not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(name)
            log.warning("%s", self._told(name))

    def _told(self, name: str) -> str:
        asked = f"the pool '{name}'" if name else "no pool"
        return (
            f"the proxy asks for {asked}; its gRPC initial metadata {POOL_METADATA.decode()} must "
            f"name one of {self._keys}"
        )


def _alone(named: bytes) -> bytes:
    """The only name there, perhaps several times; else all that was said."""
    names = {name.strip() for name in named.split(b",")}
    return names.pop() if len(names) == 1 else named


def _shown(named: bytes) -> str:
    """What was said, in one line of the log that is not too long."""
    text = named.decode(errors="replace")[:_SHOWN_LENGTH]
    return "".join(letter if letter.isprintable() else " " for letter in text)


class _Refusing:
    """An `ExchangeSource` and a `RequestExchange` that refuses every request."""

    def __init__(self, message: str, refused: Counter) -> None:
        self._message, self._refused = message, refused

    def begin(self, evict: object, /) -> _Refusing:
        """A request has started to arrive."""
        return self

    def decides_at_once(self, raw: RawRequest) -> bool:
        """It does."""
        return True

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Refuse it."""
        self._refused.inc()
        raise RefusedError(Code.INTERNAL, self._message)

    def finish(
        self,
        cause: FinishCause,
        response_status: int | None = None,
        served_by: str | None = None,
    ) -> None:
        """The request is over."""
