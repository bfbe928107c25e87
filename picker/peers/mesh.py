"""Everything that goes on between this replica and its peers, in tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from picker.metrics.families import PeerSeries
from picker.peers.client import Connected, PeerAddress, PeerClient, Rounds
from picker.peers.credentials import PeerCredentials
from picker.peers.exchange import Exchange

log = logging.getLogger(__name__)

GOODBYES_SECONDS = 2.0


class Mesh:
    """Owns a client for each address. `follow` says which there are."""

    def __init__(
        self,
        exchange: Exchange,
        series: PeerSeries,
        clock: Callable[[], float],
        credentials: PeerCredentials | None,
        interval_seconds: float = 0.05,
    ) -> None:
        """`interval_seconds` lie between two rounds of messages; it may change."""
        self._exchange, self._series, self._clock = exchange, series, clock
        self._credentials = credentials
        self.interval_seconds = interval_seconds
        self._connected, self._rounds = Connected(series), Rounds()
        self._wanted: Sequence[PeerAddress] = ()
        self._changed = asyncio.Event()
        self._clients: dict[PeerAddress, asyncio.Task[None]] = {}
        self._counted = _Counted(exchange, series)

    def follow(self, addresses: Sequence[PeerAddress]) -> None:
        """Tell the replicas at these addresses, and no others."""
        if addresses != self._wanted:
            self._wanted = addresses
            self._changed.set()

    async def tick(self) -> None:
        """Have what was gathered told every few milliseconds, until cancelled."""
        while True:
            await asyncio.sleep(self.interval_seconds)
            self._exchange.tick(self._clock())
            self._counted.look()
            self._rounds.begin()

    async def run(self) -> None:
        """Keep a client for each address until cancelled; then all say goodbye."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    self._changed.clear()
                    self._match(group)
                    await self._changed.wait()
            finally:
                for task in self._clients.values():
                    task.cancel()
                if self._clients:
                    await asyncio.wait(self._clients.values(), timeout=GOODBYES_SECONDS)

    def _match(self, group: asyncio.TaskGroup) -> None:
        for address in set(self._clients) - set(self._wanted):
            self._clients.pop(address).cancel()
        for address in self._wanted:
            if address not in self._clients:
                client = PeerClient(
                    address,
                    self._exchange,
                    self._connected,
                    self._rounds,
                    self._series,
                    self._clock,
                    self._credentials,
                )
                task = group.create_task(client.run(), name=f"peer {address.target}")
                self._clients[address] = task


class _Counted:
    """Brings the exchange's own counts into the series. Owns how far it has got."""

    def __init__(self, exchange: Exchange, series: PeerSeries) -> None:
        self._exchange, self._series = exchange, series
        self._told: dict[str, int] = {}

    def look(self) -> None:
        """Count what has happened since the last look."""
        series, exchange, learned = self._series, self._exchange, self._exchange.learned
        for name, counter, now in (
            ("missed", series.batches_missed_total, exchange.inbox.missed),
            ("dropped", series.entries_dropped_total, exchange.outbox.dropped),
            ("expired", series.loads_expired_total, exchange.inbox.expired),
        ):
            counter.inc(now - self._told.get(name, 0))
            self._told[name] = now
        for name, now in (
            ("placement", learned.placements),
            ("session", learned.bindings),
            ("other_seed", learned.other_seed),
            ("other_endpoint", learned.other_endpoint),
            ("other_plugin", learned.other_plugin),
        ):
            if now != self._told.get(name, 0):
                series.entries_total.labels(name).inc(now - self._told.get(name, 0))
                self._told[name] = now
