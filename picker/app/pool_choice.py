"""The choice of one of several pools at their common port by the metadata of the proxy's call.

`x-pointsman-pool` is the name of a pool, alone or after its namespace and a slash. There is no
fallback: if the proxy names no pool, an unknown one, or two, the request is refused, with the
Gateway API's status for a route with an invalid backend.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from base.series import Counter
from picker.app.model_choice import shown
from picker.errors import Code, RefusedError
from picker.extproc.server import ExchangeSource
from picker.rpc.calls import Metadata
from picker.types import FinishCause, RawRequest, RouteDecision

log = logging.getLogger(__name__)

POOL_METADATA: Final = b"x-pointsman-pool"
_MAX_WARNINGS: Final = 100


class PoolChoice:
    """Chooses the director of a call. `pools` maps all names that proxies may use. `unnamed` serves
    calls that name no pool; if it is None, these are refused unless there is only one pool.
    """

    def __init__(
        self,
        pools: Mapping[str, ExchangeSource],
        keys: Sequence[str],
        unknown: Counter,
        unnamed: ExchangeSource | None = None,
    ) -> None:
        self._pools = {name.encode(): source for name, source in pools.items()}
        self._keys = ", ".join(keys)
        self._warned: set[str] = set()
        # With one pool there is nothing to guess.
        only = next(iter(pools.values())) if len(keys) == 1 else None
        self._unnamed = unnamed or only or _Refusing(self._message(""), unknown)
        self._others = _Refusing(f"the proxy asks for another pool than {self._keys}", unknown)

    def choose(self, metadata: Metadata) -> ExchangeSource:
        named = metadata.get(POOL_METADATA)
        if named is None:
            return self._unnamed
        # A proxy may append to the metadata of a client, so equal names are one.
        source = self._pools.get(named) or self._pools.get(_alone(named))
        if source is not None:
            return source
        self._warn(shown(named.decode(errors="replace")))
        return self._others

    def _warn(self, name: str) -> None:
        if name not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(name)
            log.warning("%s", self._message(name))

    def _message(self, name: str) -> str:
        asked = f"the pool '{name}'" if name else "no pool"
        return (
            f"the proxy asks for {asked}; its gRPC initial metadata {POOL_METADATA.decode()} must "
            f"name one of {self._keys}"
        )


def _alone(named: bytes) -> bytes:
    names = {name.strip() for name in named.split(b",")}
    return names.pop() if len(names) == 1 else named


class _Refusing:
    """An `ExchangeSource` and a `RequestExchange` that refuses every request."""

    def __init__(self, message: str, refused: Counter) -> None:
        self._message, self._refused = message, refused

    def begin(self, evict: object, /) -> _Refusing:
        return self

    def decides_at_once(self, raw: RawRequest) -> bool:
        return True

    async def route(self, raw: RawRequest) -> RouteDecision:
        self._refused.inc()
        # A 500, the Gateway API's status for a route with an invalid backend.
        raise RefusedError(Code.INTERNAL, self._message)

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        pass
