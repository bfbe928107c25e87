"""One replica's side of the exchange, without sockets or clocks: bytes in, bytes out."""

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

# Adding up the loads of all peers takes about half a microsecond per load. Up to this number they
# are added up with every message; above it, once per this time per load, a twentieth of the CPU.
MAX_LOADS_PER_MESSAGE = 250
ADD_UP_SECONDS = 10e-6


class PeerRefusedError(PickerError):
    """The replica speaks another version of the exchange, or belongs to another pool."""


class OwnAddressError(PickerError): ...


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The pool and the hash seed of this replica; a configured seed is neither sent nor changed."""

    pool: str
    hash_seed: int
    is_seed_configured: bool = False
    outbox: OutboxLimits = field(default_factory=OutboxLimits)
    inbox: InboxLimits = field(default_factory=InboxLimits)


class PeerExchange:
    """Owns the outbox, the inbox and the seed. Times are monotonic seconds."""

    def __init__(
        self,
        settings: ExchangeSettings,
        knowledge: Knowledge,
        now_seconds: float,
        unix_seconds: float,
        replica_id: bytes | None = None,
    ) -> None:
        """`replica_id` identifies this process by 16 random bytes; with None, they are drawn."""
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
        self._strangers: set[int] = set()  # fingerprints of seeds that a warning named
        self._are_loads_old = False  # the sums that the plugins know
        self._add_up_at_seconds = now_seconds  # the earliest time
        knowledge.connect(self.outbox)
        knowledge.use_hash_seed(settings.hash_seed)

    @property
    def hash_seed(self) -> int:
        return self._seeds.value

    def use(self, plugins: dict[str, object]) -> None:
        """Switch to the plugins of another configuration, by name."""
        self._knowledge.use(plugins)
        self._knowledge.use_hash_seed(self._seeds.value)

    def tick(self, now_seconds: float) -> None:
        """Flush the outbox and expire the loads of silent peers; called every few milliseconds."""
        knowledge = self._knowledge
        self.outbox.flush(knowledge.fingerprints(), knowledge.loads(), now_seconds)
        self._are_loads_old |= self.inbox.expire(now_seconds)
        self._add_up_loads(now_seconds)

    # The calling side

    def hello(self, now_seconds: float) -> bytes:
        seed = self._seeds.offer(now_seconds)
        return encoded_report(PeerReport(hello=Hello(self.replica_id, self.pool, seed)))

    def welcomed(self, data: bytes, now_seconds: float) -> tuple[bytes, Cursor]:
        """Accept the answer to a hello; return the peer's id, and a cursor on the outbox."""
        welcome = decoded_welcome(data)
        if welcome.replica_id == self.replica_id:
            raise OwnAddressError("this replica has called itself")
        self._receive_seed(welcome.seed, now_seconds)
        return welcome.replica_id, self.outbox.open(welcome.last_sequence)

    def next(self, cursor: Cursor, now_seconds: float) -> bytes | None:
        """Return the next message to the peer of `cursor`, if there is something to report."""
        return cursor.next(self._seeds.offer(now_seconds), now_seconds)

    def goodbye(self) -> bytes:
        """Return the last message of this replica, whose load is now zero."""
        return encoded_report(PeerReport(goodbye=True))

    # The called side

    def greeted(self, data: bytes, now_seconds: float) -> tuple[bytes, bytes]:
        """Accept a call; return the caller's id and the answer. The caller sees the error texts."""
        hello = decoded_report(data).hello
        if hello is None:
            raise PeerMessageError("a call must begin with a hello")
        if hello.version != VERSION:
            text = f"version {hello.version} of the exchange is not {VERSION}, the version here"
            raise PeerRefusedError(text)
        if hello.pool != self.pool:
            raise PeerRefusedError(f"this is a replica of the pool {self.pool!r}")
        last = 0
        # A call of this replica itself is answered, so that its client learns whose address it has.
        if hello.replica_id != self.replica_id:
            self._receive_seed(hello.seed, now_seconds)
            last = self.inbox.greet(hello.replica_id, now_seconds)
        seed = self._seeds.offer(now_seconds)
        return hello.replica_id, encoded_welcome(PeerWelcome(self.replica_id, last, seed))

    def receive(self, peer: bytes, data: bytes, now_seconds: float) -> Learned:
        """Process a report. A `PeerMessageError` discards all of it."""
        report = decoded_report(data)
        learned = Learned()
        if report.goodbye:
            self._are_loads_old |= self.inbox.say_goodbye(peer)
            self._add_up_loads(now_seconds)
            return learned
        if report.seed is not None:
            self._receive_seed(report.seed, now_seconds)
        batch = report.batch
        if batch is not None and self.inbox.take_batch(peer, batch.sequence, now_seconds):
            learned = self._knowledge.learn(batch, report.age_seconds, now_seconds)
            learned.unusable = batch.unusable
        if report.loads is not None:
            learned.unusable += report.loads.unusable
            self._are_loads_old |= self.inbox.take_loads(peer, report.loads, now_seconds)
            self._add_up_loads(now_seconds)
        if learned.unusable and not self.learned.unusable:
            log.warning(
                "a peer sends invalid entries, which are skipped; the rest of its messages counts"
            )
        self.learned.add(learned)
        return learned

    def _add_up_loads(self, now_seconds: float) -> None:
        """Publish the sums of all loads unless they were just published; then `tick` does it."""
        if not self._are_loads_old or now_seconds < self._add_up_at_seconds:
            return
        self._are_loads_old = False
        size = self.inbox.size
        if size > MAX_LOADS_PER_MESSAGE:
            self._add_up_at_seconds = now_seconds + size * ADD_UP_SECONDS
        self._knowledge.set_loads_elsewhere(self.inbox.loads())

    def _receive_seed(self, seed: Seed, now_seconds: float) -> None:
        if self._seeds.receive(seed, now_seconds):
            log.info("prompts are now hashed with a peer's seed")
            self._knowledge.use_hash_seed(self._seeds.value)
            self.outbox.reseeded()
        elif not self._seeds.matches(seed) and seed.value is None:
            self._complain(seed)

    def _complain(self, seed: Seed) -> None:
        if seed.fingerprint not in self._strangers and len(self._strangers) < 100:
            self._strangers.add(seed.fingerprint)
            log.warning(
                "a peer hashes prompts with another seed, so its placements are useless here: "
                "give all replicas the same --hash-seed-file"
            )
