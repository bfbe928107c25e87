"""The knowledge of replicas after received and lost messages."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import EndpointLoad
from picker.peers.exchange import MAX_LOADS_PER_MESSAGE, OwnAddressError, PeerRefusedError
from picker.peers.inbox import InboxLimits
from picker.peers.outbox import OutboxLimits
from picker.peers.wire import Hello, PeerMessageError, PeerReport, Seed, encoded_report
from picker.types import Endpoint
from tests.depth import examples
from tests.support.picker.replica_mesh import KEYS, Node, call, messages_for, node, round_of

SILENCE = InboxLimits().silence_seconds


def two(**first: object) -> list[Node]:
    rng = Random(1)
    nodes = [node(rng, **first), node(rng)]  # type: ignore[arg-type]
    round_of(nodes, 0.1)
    return nodes


def test_each_replica_learns_the_decisions_of_the_other() -> None:
    one, other = two()
    one.placements.place(KEYS[0], 1, 2, 3)
    one.sessions.session_bindings.bind("s", KEYS[1], 5.0)
    one.inflight.acquire(KEYS[0])
    one.counted.ledger.take(KEYS[0], 70)
    round_of([one, other], 1.0)
    assert (KEYS[0], (1, 2, 3)) in other.placements.known
    assert other.sessions.session_bindings.endpoint("s", 5.0) == KEYS[1]
    assert other.inflight.counts == {KEYS[0]: 1}
    assert other.counted.ledger.loads == {KEYS[0]: EndpointLoad(1, 70)}
    assert not other.inflight.own_counts
    assert other.exchange.outbox.sequence == 0


def test_a_third_replica_follows_the_seed_of_two_others() -> None:
    rng = Random(2)
    nodes = [node(rng), node(rng)]
    round_of(nodes, 0.1)
    nodes[0].placements.place(KEYS[0], 1)
    for second in range(1, 30):
        round_of(nodes, float(second))
    agreed = nodes[0].exchange.hash_seed
    nodes.append(node(rng, 30.0, unix=0.0))  # by a clock that is years behind
    nodes[2].placements.place(KEYS[0], 99)
    round_of(nodes, 30.0)
    round_of(nodes, 30.1)
    assert {one.exchange.hash_seed for one in nodes} == {agreed}
    assert {one.placements.hash_seed for one in nodes} == {agreed}
    assert all((KEYS[0], (1,)) in one.placements.known for one in nodes)
    assert not any((KEYS[0], (99,)) in one.placements.known for one in nodes)


def test_replicas_with_another_configured_seed_learn_no_placements() -> None:
    rng = Random(3)
    secret = 0x1234_5678_9ABC_DEF0
    one, other = node(rng, seed=secret), node(rng)
    assert secret.to_bytes(8, "little") not in one.exchange.hello(0.0)
    round_of([one, other], 0.1)
    one.placements.place(KEYS[0], 1)
    round_of([one, other], 0.2)
    assert one.exchange.hash_seed == secret != other.exchange.hash_seed
    assert other.placements.known == set()
    assert other.exchange.learned.other_seed == 1


def test_replicas_with_one_configured_seed_learn_placements() -> None:
    rng = Random(4)
    nodes = [node(rng, seed=7), node(rng, seed=7)]
    round_of(nodes, 0.1)
    nodes[0].placements.place(KEYS[0], 1)
    round_of(nodes, 0.2)
    assert (KEYS[0], (1,)) in nodes[1].placements.known


def test_the_loads_of_a_silent_replica_expire_and_its_placements_stay() -> None:
    one, other = two()
    one.inflight.acquire(KEYS[0])
    one.placements.place(KEYS[0], 1)
    round_of([one, other], 1.0)
    other.exchange.tick(1.0 + SILENCE)
    assert other.inflight.requests(KEYS[0]) == 1
    other.exchange.tick(1.1 + SILENCE)
    assert other.inflight.requests(KEYS[0]) == 0
    assert other.counted.ledger.loads == {}
    assert (KEYS[0], (1,)) in other.placements.known
    assert other.exchange.inbox.expired == 1


def test_a_goodbye_drops_the_loads_of_a_replica_at_once() -> None:
    one, other = two()
    one.inflight.acquire(KEYS[0])
    round_of([one, other], 1.0)
    other.exchange.receive(one.exchange.replica_id, one.exchange.goodbye(), 1.1)
    assert other.inflight.counts == {}


def test_unchanged_loads_are_sent_again_and_do_not_expire() -> None:
    one, other = two()
    one.inflight.acquire(KEYS[0])
    for second in range(1, 40):
        round_of([one, other], float(second))
    assert other.inflight.requests(KEYS[0]) == 1


def test_entries_about_another_server_or_plugin_are_ignored() -> None:
    one, other = two()
    one.datastore.set_endpoints(
        [Endpoint("a", "10.9.9.9", 80, "ns"), Endpoint("new", "10.0.0.1", 80, "ns")]
    )
    one.placements.place(KEYS[0], 1)
    one.placements.place("ns/new", 2)
    other.exchange.use({"prefix": other.placements})
    one.sessions.session_bindings.bind("s", KEYS[0], 1.0)
    round_of([one, other], 1.0)
    learned = other.exchange.learned
    assert (learned.other_endpoint, learned.other_plugin, learned.placements) == (2, 1, 0)
    assert other.placements.known == set()


def test_a_session_that_two_replicas_bind_at_once_ends_at_one_endpoint() -> None:
    one, other = two()
    one.sessions.session_bindings.bind("s", KEYS[1], 1.0)
    other.sessions.session_bindings.bind("s", KEYS[0], 1.0)
    round_of([one, other], 1.0)
    bound = [each.sessions.session_bindings.endpoint("s", 1.0) for each in (one, other)]
    assert bound == [KEYS[0], KEYS[0]]
    other.sessions.session_bindings.bind("s", KEYS[2], 2.0)
    round_of([one, other], 2.0)
    assert one.sessions.session_bindings.endpoint("s", 2.0) == KEYS[2]


def test_the_plugins_of_another_configuration_take_over_the_exchange() -> None:
    one, other = two()
    one.inflight.acquire(KEYS[0])
    round_of([one, other], 1.0)
    before, other.placements = other.placements, type(other.placements)(seed=5)
    other.exchange.use({"prefix": other.placements})
    assert before.report is None
    assert other.placements.hash_seed == one.exchange.hash_seed
    other.placements.place(KEYS[1], 8)
    round_of([one, other], 1.1)
    assert (KEYS[1], (8,)) in one.placements.known
    assert other.inflight.requests(KEYS[0]) == 1


def test_replicas_refuse_other_versions_and_pools_and_themselves() -> None:
    rng = Random(5)
    one, stranger = node(rng), node(rng, pool="another")
    hello = Hello(bytes(16), "pool", Seed(1), version=2)
    with pytest.raises(PeerRefusedError, match="version 2"):
        one.exchange.greeted(encoded_report(PeerReport(hello=hello)), 0.0)
    with pytest.raises(PeerRefusedError, match="pool"):
        call(one, stranger, 0.0)
    with pytest.raises(OwnAddressError):
        call(one, one, 0.0)
    with pytest.raises(PeerMessageError, match="hello"):
        one.exchange.greeted(encoded_report(PeerReport(goodbye=True)), 0.0)


@examples(300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_of_a_peer_break_no_invariant(data: bytes) -> None:
    one, other = two()
    try:
        other.exchange.receive(one.exchange.replica_id, data, 1.0)
        other.exchange.greeted(data, 1.0)
    except (PeerMessageError, PeerRefusedError):
        pass
    other.check_integrity()


# The weights of the steps: messages are sent and received more often than anything else happens.
STEPS = {
    "acquire": 3,
    "release": 2,
    "place": 2,
    "bind": 2,
    "tick": 4,
    "send": 5,
    "deliver": 10,
    "lose": 2,
    "duplicate": 2,
    "call": 3,
    "kill": 1,
}


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.nodes = [node(self.rng) for _ in range(3)]
        self.wires: list[tuple[bytes, int, bytes]] = []  # sender, receiver, message
        self.number = 0

    def step(self, action: str) -> None:
        getattr(self, action)(self.rng.choice(self.nodes))
        for one in self.nodes:
            one.check_integrity()

    def acquire(self, one: Node) -> None:
        one.inflight.acquire(self.rng.choice(KEYS))

    def release(self, one: Node) -> None:
        if one.inflight.own_counts:
            one.inflight.release(self.rng.choice(sorted(one.inflight.own_counts)))

    def place(self, one: Node) -> None:
        self.number += 1
        hashes = range(self.number, self.number + self.rng.randrange(1, 60))
        one.placements.place(self.rng.choice(KEYS), *hashes)

    def bind(self, one: Node) -> None:
        session = f"s{self.rng.randrange(3)}"
        one.sessions.session_bindings.bind(session, self.rng.choice(KEYS), self.now)

    def tick(self, one: Node) -> None:
        self.now += self.rng.uniform(0.0, 1.0)
        one.exchange.tick(self.now)

    def send(self, one: Node) -> None:
        for index, other in enumerate(self.nodes):
            if other.exchange.replica_id in one.cursors:
                for message in messages_for(one, other, self.now):
                    self.wires.append((one.exchange.replica_id, index, message))

    def call(self, one: Node) -> None:
        other = self.rng.choice(self.nodes)
        if other is not one:
            call(one, other, self.now)

    def deliver(self, _: Node) -> None:
        self._deliver(keep=False)

    def duplicate(self, _: Node) -> None:
        self._deliver(keep=True)

    def lose(self, _: Node) -> None:
        if self.wires:
            self.wires.pop(self.rng.randrange(len(self.wires)))

    def kill(self, one: Node) -> None:
        self.nodes[self.nodes.index(one)] = node(self.rng, self.now)

    def _deliver(self, keep: bool) -> None:
        if self.wires:
            at = self.rng.randrange(len(self.wires))
            who, index, message = self.wires[at] if keep else self.wires.pop(at)
            if who != self.nodes[index].exchange.replica_id:
                self.nodes[index].exchange.receive(who, message, self.now)

    def converge(self) -> None:
        for _ in range(20):
            self.now += 1.0
            round_of(self.nodes, self.now)


@examples(40)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_loads_and_seeds_converge_after_any_losses(seed: int, length: int) -> None:
    walk = Walk(seed)
    for action in Random(seed).choices(list(STEPS), list(STEPS.values()), k=length):
        walk.step(action)
    walk.converge()
    truth: dict[str, int] = {}
    for one in walk.nodes:
        for key, count in one.inflight.own_counts.items():
            truth[key] = truth.get(key, 0) + count
    assert [dict(one.inflight.counts) for one in walk.nodes] == [truth] * 3
    assert len({one.exchange.hash_seed for one in walk.nodes}) == 1
    for one in walk.nodes:
        one.check_integrity()


def test_a_peer_that_does_not_read_loses_only_its_own_batches() -> None:
    rng = Random(6)
    limits = OutboxLimits(log_bytes=2000, pending_bytes=100_000, batch_bytes=500)
    one, slow, fast = (node(rng, limits=limits) for _ in range(3))
    cursor = call(one, slow, 0.0)
    call(one, fast, 0.0)
    messages_for(one, slow, 0.0)
    for number in range(100):
        one.placements.place(KEYS[0], number)
        one.exchange.tick(number / 100)
        for message in messages_for(one, fast, number / 100):
            fast.exchange.receive(one.exchange.replica_id, message, number / 100)
        if number == 0:
            messages_for(one, slow, 0.0)
    one.check_integrity()
    messages_for(one, slow, 2.0)
    assert cursor.skipped > 50
    assert len(fast.placements.known) == 100


def test_few_loads_are_added_up_at_once_and_many_with_a_delay() -> None:
    names = tuple(f"ns/e{number}" for number in range(MAX_LOADS_PER_MESSAGE + 50))
    rng = Random(9)
    nodes = [node(rng, endpoints=KEYS), node(rng, endpoints=KEYS)]
    one, other = nodes
    for key in names:
        one.inflight.acquire(key)
    round_of(nodes, 0.1)
    one.inflight.acquire(names[0])
    one.exchange.tick(0.1001)
    for message in messages_for(one, other, 0.1001):
        other.exchange.receive(one.exchange.replica_id, message, 0.1001)
    assert other.inflight.counts[names[0]] == 1
    other.exchange.tick(0.2)
    assert other.inflight.counts[names[0]] == 2
    one.inflight.acquire(names[0])
    round_of(nodes, 0.2)
    other.exchange.receive(one.exchange.replica_id, one.exchange.goodbye(), 0.2001)
    assert other.inflight.total == len(names) + 1
    other.exchange.tick(0.25)
    assert other.inflight.total == 0
