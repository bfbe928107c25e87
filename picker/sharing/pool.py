"""The pool's snapshot ↔ bytes, in pieces of one endpoint each, of which only changes are coded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec

from picker.pool.datastore import Datastore, Snapshot
from picker.sharing.block import BlockFullError, BlockReader, BlockWriter
from picker.sharing.values import restored, shareable
from picker.types import Candidate, Endpoint, EndpointMetrics

log = logging.getLogger(__name__)

POOL_BYTES = 64 * 2**20  # an endpoints file of the largest size makes a tenth of that


class _Row(msgspec.Struct, array_like=True):
    """An endpoint on its way. `life` changes whenever what is known of its cache is void.

    `is_fresh` says that `last_metrics` are its metrics; otherwise its load is unknown.
    """

    endpoint: msgspec.Raw
    life: int
    is_fresh: bool
    last_metrics: EndpointMetrics | None
    attributes: dict[str, Any]


class Lives:
    """Numbers the lives of endpoints: from joining or restarting to the next such moment.

    An `EndpointObserver`. No number is given twice, so that a reader notices however many lives it
    has missed.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._current: dict[str, int] = {}

    def endpoint_removed(self, key: str) -> None:
        """Another life of `key` begins, if there is one."""
        self._current[key] = next(self._numbers)

    def of(self, key: str) -> int:
        """The number of the life of `key`, which is in the pool."""
        if key not in self._current:
            self._current[key] = next(self._numbers)
        return self._current[key]

    def keep(self, keys: Mapping[str, Any]) -> None:
        """Forget about endpoints that are not in the pool."""
        if len(self._current) > len(keys):
            self._current = {key: one for key, one in self._current.items() if key in keys}


class PoolWriter:
    """Publishes snapshots. Owns what was coded last, by endpoint."""

    def __init__(self, block: BlockWriter, lives: Lives) -> None:
        self._block = block
        self._lives = lives
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._version: int | None = None
        self._rows: dict[str, tuple[Candidate, int, msgspec.Raw | None]] = {}
        self._complaints: set[str] = set()

    def publish(self, snapshot: Snapshot) -> bool:
        """Show `snapshot` to the readers; whether it is another one than they saw before.

        What cannot be shared is left out, and told once. A snapshot beyond all bounds is not
        published.
        """
        if snapshot.version == self._version:
            return False
        self._version = snapshot.version
        rows: dict[str, tuple[Candidate, int, msgspec.Raw | None]] = {}
        for candidate in snapshot.candidates:
            key = candidate.key
            life, known = self._lives.of(key), self._rows.get(key)
            if known is None or known[0] is not candidate or known[1] != life:
                known = (candidate, life, self._row(candidate, life))
            rows[key] = known
        self._rows = rows
        self._lives.keep(rows)
        message = self._encoder.encode([raw for _, _, raw in rows.values() if raw is not None])
        try:
            self._block.publish(message)
        except BlockFullError as error:
            self._complain(f"the pool cannot be shared, what was known before stays: {error}")
        return True

    def _row(self, candidate: Candidate, life: int) -> msgspec.Raw | None:
        encode = self._encoder.encode
        metrics, last = candidate.metrics, candidate.last_metrics
        try:
            row = _Row(
                msgspec.Raw(encode(candidate.endpoint)),
                life,
                metrics is not None,
                last if metrics is None else metrics,
                self._attributes(candidate),
            )
            return msgspec.Raw(encode(row))
        except (TypeError, ValueError, OverflowError) as error:
            self._complain(f"endpoint {candidate.key!r} cannot be shared: {error}")
            return None

    def _attributes(self, candidate: Candidate) -> dict[str, Any]:
        shared: dict[str, Any] = {}
        for name, value in candidate.attributes.items():
            try:
                shared[name] = shareable(value)
                self._encoder.encode(shared[name])
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                shared.pop(name, None)
                self._complain(f"attribute {name!r} cannot be shared: {error}")
        return shared

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            log.error("%s", text)


def _plain(value: Any) -> Any:
    """Immutable mappings, as labels are, for msgpack."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be shared between processes")


@dataclass(frozen=True, slots=True)
class _Known:
    """What a row came to."""

    candidate: Candidate
    life: int


class PoolReader:
    """Keeps a datastore equal to what is published. Owns what was decoded last, by its bytes."""

    def __init__(self, block: BlockReader, datastore: Datastore) -> None:
        self._block = block
        self._datastore = datastore
        self._split = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._row = msgspec.msgpack.Decoder(_Row)
        self._endpoint = msgspec.msgpack.Decoder(Endpoint)
        self._known: dict[bytes, _Known] = {}
        self._endpoints: dict[bytes, Endpoint] = {}
        self._lives: dict[str, int] = {}

    def poll(self) -> bool:
        """Take what is new; whether there was anything."""
        message = self._block.read()
        if message is None:
            return False
        known: dict[bytes, _Known] = {}
        endpoints: dict[bytes, Endpoint] = {}
        for raw in map(bytes, self._split.decode(message)):
            known[raw] = self._known.get(raw) or self._decoded(raw, endpoints)
        self._known = known
        self._endpoints.update(endpoints)
        if len(self._endpoints) > 2 * len(known):
            self._endpoints = endpoints
        lives = {one.candidate.key: one.life for one in known.values()}
        before, self._lives = self._lives, lives
        renewed = [key for key, life in lives.items() if before.get(key, life) != life]
        self._datastore.mirror((one.candidate for one in known.values()), renewed)
        return True

    def _decoded(self, raw: bytes, endpoints: dict[bytes, Endpoint]) -> _Known:
        row = self._row.decode(raw)
        named = bytes(row.endpoint)
        endpoint = self._endpoints.get(named) or self._endpoint.decode(named)
        endpoints[named] = endpoint
        candidate = Candidate(
            endpoint,
            row.last_metrics if row.is_fresh else None,
            0,
            row.last_metrics,
            MappingProxyType({name: restored(value) for name, value in row.attributes.items()}),
        )
        return _Known(candidate, row.life)
