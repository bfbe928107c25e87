"""One replica's side of the exchange, without sockets and clocks: bytes in, bytes out.

`server` and `client` carry the bytes. Nothing here waits, and all of it may be lost on the way.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field

from picker.errors import PickerError
from picker.peers.inbox import Inbox, InboxLimits
from picker.peers.knowledge import Knowledge, Learned
from picker.peers.outbox import Cursor, Outbox, OutboxLimits
from picker.peers.seeds import SeedAgreement
from picker.peers.wire import (
    ID_BYTES,
    VERSION,
    Hello,
    PeerMessageError,
    PeerReport,
    PeerWelcome,
    Seed,
    decoded_report,
    decoded_welcome,
    encoded_report,
    encoded_welcome,
)

log = logging.getLogger(__name__)

# Adding up what peers have under way takes about half a microsecond for each load. Few are added up
# with every message; many not before this much time for each, so that it costs a twentieth of it.
ADDING_UP_SECONDS = 10e-6
FEW_LOADS = 250


class PeerRefusedError(PickerError):
    """A replica that cannot be spoken with: of another version, or of another pool."""


class OneselfError(PickerError):
    """The replica at the other end is this one."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Of which pool this is a replica. With `hash_seed` its hashes go by a seed that was
    configured, and is neither told nor changed.
    """

    pool: str
    hash_seed: int
    is_seed_configured: bool = False
    outbox: OutboxLimits = field(default_factory=OutboxLimits)
    inbox: InboxLimits = field(default_factory=InboxLimits)


class PeerExchange:
    """Owns what is told to peers and what was heard of them. Times are monotonic seconds."""

    def __init__(
        self,
        settings: ExchangeSettings,
        knowledge: Knowledge,
        now_seconds: float,
        unix_seconds: float,
        replica_id: bytes | None = None,
    ) -> None:
        """`replica_id` is 16 random bytes of this life of this replica (None: they are drawn)."""
        self.replica_id = replica_id or secrets.token_bytes(ID_BYTES)
        self.learned = Learned()
        self.pool = settings.pool
        self._knowledge = knowledge
        self._seeds = SeedAgreement(
            settings.hash_seed,
            self.replica_id,
            now_seconds,
            unix_seconds,
            is_configured=settings.is_seed_configured,
        )
        self.outbox = Outbox(knowledge.identify, settings.outbox)
        self.inbox = Inbox(settings.inbox)
        self._strangers: set[int] = set()  # fingerprints of seeds that were complained of
        self._are_loads_old = False  # those that were added up
        self._add_up_at_seconds = now_seconds  # not before
        knowledge.connect(self.outbox)
        knowledge.use_hash_seed(settings.hash_seed)

    @property
    def hash_seed(self) -> int:
        """The seed that is gone by now."""
        return self._seeds.value

    def use(self, plugins: dict[str, object]) -> None:
        """Go on with the plugins of another configuration, by name."""
        self._knowledge.use(plugins)
        self._knowledge.use_hash_seed(self._seeds.value)

    def tick(self, now_seconds: float) -> None:
        """Make what was gathered ready to be told, and drop what silent peers had said. To be
        called every few milliseconds.
        """
        knowledge = self._knowledge
        self.outbox.flush(knowledge.fingerprints(), knowledge.loads(), now_seconds)
        self._are_loads_old |= self.inbox.expire(now_seconds)
        self._add_up_loads(now_seconds)

    # As the one that calls

    def hello(self, now_seconds: float) -> bytes:
        """How a call begins."""
        seed = self._seeds.offer(now_seconds)
        return encoded_report(PeerReport(hello=Hello(self.replica_id, self.pool, seed)))

    def welcomed(self, data: bytes, now_seconds: float) -> tuple[bytes, Cursor]:
        """The answer has come: who it is, and what to tell.

        Raises `PeerMessageError`, or `OneselfError`.
        """
        heard = decoded_welcome(data)
        if heard.replica_id == self.replica_id:
            raise OneselfError("this replica has called itself")
        self._hear_seed(heard.seed, now_seconds)
        return heard.replica_id, self.outbox.open(heard.last_sequence)

    def next(self, cursor: Cursor, now_seconds: float) -> bytes | None:
        """The next message to the peer of `cursor`; None: there is nothing to tell now."""
        return cursor.next(self._seeds.offer(now_seconds), now_seconds)

    def goodbye(self) -> bytes:
        """The last message of all: nothing is under way here any more."""
        return encoded_report(PeerReport(goodbye=True))

    # As the one that is called

    def greeted(self, data: bytes, now_seconds: float) -> tuple[bytes, bytes]:
        """A call has begun: who it is (perhaps this replica itself), and the answer.

        Raises `PeerMessageError` or `PeerRefusedError`, with words for the caller.
        """
        hello = decoded_report(data).hello
        if hello is None:
            raise PeerMessageError("a call begins with a hello")
        if hello.version != VERSION:
            text = f"version {hello.version} of the exchange is spoken there, {VERSION} here"
            raise PeerRefusedError(text)
        if hello.pool != self.pool:
            raise PeerRefusedError(f"this is a replica of the pool {self.pool!r}")
        last = 0
        if hello.replica_id != self.replica_id:
            self._hear_seed(hello.seed, now_seconds)
            last = self.inbox.greet(hello.replica_id, now_seconds)
        seed = self._seeds.offer(now_seconds)
        return hello.replica_id, encoded_welcome(PeerWelcome(self.replica_id, last, seed))

    def receive(self, peer: bytes, data: bytes, now_seconds: float) -> Learned:
        """A peer reports something. Raises `PeerMessageError`, and then nothing of it counts."""
        told = decoded_report(data)
        learned = Learned()
        if told.goodbye:
            self._are_loads_old |= self.inbox.say_goodbye(peer)
            self._add_up_loads(now_seconds)
            return learned
        if told.seed is not None:
            self._hear_seed(told.seed, now_seconds)
        batch = told.batch
        if batch is not None and self.inbox.take_batch(peer, batch.sequence, now_seconds):
            learned = self._knowledge.learn(batch, told.age_seconds, now_seconds)
            learned.unusable = batch.unusable
        if told.loads is not None:
            learned.unusable += told.loads.unusable
            self._are_loads_old |= self.inbox.take_loads(peer, told.loads, now_seconds)
            self._add_up_loads(now_seconds)
        if learned.unusable and not self.learned.unusable:
            log.warning("a peer sends entries that make no sense; the others of its messages count")
        self.learned.add(learned)
        return learned

    def _add_up_loads(self, now_seconds: float) -> None:
        """Have the plugins know the loads of now, unless it was done just before: then by `tick`.

        Otherwise every message of every peer would cost what all loads of all peers do.
        """
        if not self._are_loads_old or now_seconds < self._add_up_at_seconds:
            return
        self._are_loads_old = False
        size = self.inbox.size
        if size > FEW_LOADS:
            self._add_up_at_seconds = now_seconds + size * ADDING_UP_SECONDS
        self._knowledge.set_loads_elsewhere(self.inbox.loads())

    def _hear_seed(self, seed: Seed, now_seconds: float) -> None:
        if self._seeds.hear(seed, now_seconds):
            log.info("prompts are hashed by a peer's seed from now on")
            self._knowledge.use_hash_seed(self._seeds.value)
            self.outbox.reseeded()
        elif not self._seeds.matches(seed) and seed.value is None:
            self._complain(seed)

    def _complain(self, seed: Seed) -> None:
        if seed.fingerprint not in self._strangers and len(self._strangers) < 100:
            self._strangers.add(seed.fingerprint)
            log.warning(
                "a peer hashes prompts by another seed; what it tells of them is of no use here: "
                "give all replicas the same --hash-seed-file"
            )
