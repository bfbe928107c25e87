"""Several pickers over one virtual fleet that exchange their state over lossy wires."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Self

from fleet.sim.virtual_fleet import Simulation, VirtualFleet, VirtualPicker, now
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.outbox import Cursor

INTERVAL_SECONDS = 0.05  # between two messages to one peer
DELAY_SECONDS = 0.001  # of a message
FOLLOWS_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Peers:
    """`count` pickers. With `shares` they exchange state, and lose the share `loss` of messages."""

    count: int = 2
    shares: bool = True
    loss: float = 0.0


class PeerPicker(VirtualPicker):
    def __init__(self, simulation: Simulation, rng: Random) -> None:
        super().__init__(simulation, rng)
        knowledge = Knowledge(self.datastore, self.inflight)
        settings = ExchangeSettings("simulation", self.seed)
        self.exchange = PeerExchange(settings, knowledge, now(), now(), rng.randbytes(16))
        self.exchange.use({name: one.plugin for name, one in self.assembly.instances.items()})
        self.cursors: dict[bytes, Cursor] = {}  # by the receiving replica
        self.messages_sent = 0


class PeerFleet(VirtualFleet):
    """A virtual fleet with replicas of its picker. Nothing passes between them while `is_cut`."""

    def __init__(self, simulation: Simulation, peers: Peers) -> None:
        super().__init__(simulation)
        self._peers = peers
        self._wire = Random(simulation.seed + 1)
        self._replicas: list[PeerPicker] = []
        self.is_cut = False

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._replicas = [self._new_replica() for _ in range(self._peers.count)]
        self.pickers = [*self._replicas]
        if self._group is not None and self._peers.shares:
            rounds = self._group.create_task(self._rounds())
            self._stack.callback(rounds.cancel)
        return self

    def restart(self, index: int) -> None:
        """Replace a replica by one without state; its requests continue at the workers."""
        self.pickers[index] = self._replicas[index] = self._new_replica()

    def _new_replica(self) -> PeerPicker:
        return self._started(PeerPicker(self.simulation, self._rng))

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            for one in self._replicas:
                one.exchange.tick(now())
            for one in self._replicas:
                for other in self._replicas:
                    if one is not other and not self.is_cut:
                        self._send(one, other)

    def _send(self, one: PeerPicker, other: PeerPicker) -> None:
        there = other.exchange.replica_id
        if there not in one.cursors:
            _, answer = other.exchange.greeted(one.exchange.hello(now()), now())
            _, one.cursors[there] = one.exchange.welcomed(answer, now())
        while (message := one.exchange.next(one.cursors[there], now())) is not None:
            one.messages_sent += 1
            if self._wire.random() >= self._peers.loss:
                # One after the other, as over a connection.
                arrives = DELAY_SECONDS + one.messages_sent * FOLLOWS_SECONDS
                asyncio.get_running_loop().call_later(arrives, _receive, other, one, message)


def _receive(replica: PeerPicker, peer: PeerPicker, message: bytes) -> None:
    replica.exchange.receive(peer.exchange.replica_id, message, now())
