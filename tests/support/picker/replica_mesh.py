"""Replicas that exchange reports over wires that lose, reorder and repeat messages."""

from dataclasses import dataclass, field
from random import Random

from picker.framework.replicas import ReportPlacement
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.outbox import Cursor, OutboxLimits
from picker.plugins.producers.inflight_load_producer import Ledger
from picker.plugins.session_affinity import SessionBindings
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.prefix.block_hash import packed, unpacked
from picker.types import Endpoint

KEYS = ("ns/a", "ns/b", "ns/c")
LIMITS = OutboxLimits(log_bytes=4096, pending_bytes=1024, batch_bytes=256)


class RememberedPlacements:
    def __init__(self, seed: int = 0) -> None:
        self.hash_seed = seed
        self.report: ReportPlacement | None = None
        self.known: set[tuple[str, tuple[int, ...]]] = set()

    def use_hash_seed(self, seed: int) -> None:
        if seed != self.hash_seed:
            self.hash_seed = seed
            self.known.clear()

    def report_placements(self, report: ReportPlacement | None) -> None:
        self.report = report

    def placed_elsewhere(self, key: str, hashes: bytes, capacity: int) -> None:
        self.known.add((key, unpacked(hashes)))

    def place(self, key: str, *hashes: int, capacity: int = 100) -> None:
        self.known.add((key, hashes))
        if self.report is not None:
            self.report(key, packed(list(hashes)), capacity)


class BoundSessions:
    def __init__(self) -> None:
        self.session_bindings = SessionBindings(ttl_seconds=300.0, sweep_seconds=10.0)


class CountedLoads:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.own_loads = self.ledger.own_loads

    def set_loads_elsewhere(self, loads) -> None:  # type: ignore[no-untyped-def]
        self.ledger.set_elsewhere(loads)


@dataclass
class Node:
    datastore: Datastore
    inflight: InflightLoad
    placements: RememberedPlacements
    sessions: BoundSessions
    counted: CountedLoads
    exchange: PeerExchange
    cursors: dict[bytes, Cursor] = field(default_factory=dict)

    def check_integrity(self) -> None:
        self.exchange.outbox.check_integrity()
        self.exchange.inbox.check_integrity()
        self.inflight.check_integrity()
        self.counted.ledger.check_integrity()
        self.sessions.session_bindings.check_integrity()


def node(
    rng: Random,
    now: float = 0.0,
    *,
    seed: int | None = None,
    limits: OutboxLimits = LIMITS,
    endpoints: tuple[str, ...] = KEYS,
    pool: str = "pool",
    unix: float | None = None,
) -> Node:
    datastore, inflight = Datastore(), InflightLoad()
    names = [key.partition("/")[2] for key in endpoints]
    datastore.set_endpoints([Endpoint(name, f"10.0.0.{ord(name)}", 80, "ns") for name in names])
    drawn = rng.getrandbits(64) if seed is None else seed
    settings = ExchangeSettings(pool, drawn, seed is not None, limits)
    placements, sessions, counted = RememberedPlacements(drawn), BoundSessions(), CountedLoads()
    knowledge = Knowledge(datastore, inflight)
    time_of_day = 1_000_000.0 + now if unix is None else unix
    exchange = PeerExchange(settings, knowledge, now, time_of_day, rng.randbytes(16))
    exchange.use({"prefix": placements, "session": sessions, "load": counted})
    return Node(datastore, inflight, placements, sessions, counted, exchange)


def call(one: Node, other: Node, now: float) -> Cursor:
    _, answer = other.exchange.greeted(one.exchange.hello(now), now)
    peer, cursor = one.exchange.welcomed(answer, now)
    one.cursors[peer] = cursor
    return cursor


def messages_for(one: Node, other: Node, now: float) -> list[bytes]:
    messages = []
    cursor = one.cursors[other.exchange.replica_id]
    while (message := one.exchange.next(cursor, now)) is not None:
        messages.append(message)
    return messages


def round_of(nodes: list[Node], now: float) -> None:
    for one in nodes:
        one.exchange.tick(now)
    for one in nodes:
        for other in nodes:
            if one is other:
                continue
            if other.exchange.replica_id not in one.cursors:
                call(one, other, now)
            for message in messages_for(one, other, now):
                other.exchange.receive(one.exchange.replica_id, message, now)
