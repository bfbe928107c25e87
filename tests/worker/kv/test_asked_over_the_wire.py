"""Questions to the caches of other engines, on the wire; and takers that are killed."""

import dataclasses
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tests.support.worker.kv_connectors import KEY, TOKEN_BYTES, ended, engine
from tests.support.worker.kv_engines import until
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.tcp import TcpConnector
from worker.kv.wire import LENGTH_BYTES, VERSION, Challenge, Hello, Seal
from worker.types import KvOffer, KvPart, KvPeer, KvSource

TOKENS = tuple(range(70_000, 70_064))
DATA = memoryview(bytes(range(256)) * len(TOKENS))
WANTED = WantedKv(TOKENS, 3, "salt", "adapter")
LARGE = 1 << 26  # more than sockets buffer


def peer_of(keeper: TcpConnector, promise: str = "") -> KvPeer:
    return KvPeer("127.0.0.1", keeper.port, promise)


def question_of(keeper: TcpConnector) -> KvQuestion:
    assert keeper.has_questions or select.select([keeper.bell], [], [], 60)[0]
    until(lambda: keeper.has_questions)
    return keeper.next_question()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", [61, 60, 1, 0])
def test_a_question_comes_as_it_was_asked_and_so_does_the_answer(
    num_tokens: int, keeper: TcpConnector, taker: TcpConnector
) -> None:
    pull = taker.ask(peer_of(keeper), WANTED)
    question = question_of(keeper)
    assert (tuple(question.wanted.token_ids), question.wanted.start) == (TOKENS, 3)
    assert (question.wanted.cache_salt, question.wanted.adapter) == ("salt", "adapter")
    assert keeper.lend(question, num_tokens)
    question.answer(DATA[: num_tokens * TOKEN_BYTES] if num_tokens else None)
    part = ended(pull)
    expected = KvPart(3, 3 + num_tokens, DATA[: num_tokens * TOKEN_BYTES])
    assert part == (expected if num_tokens else None)
    assert (taker.counts.num_failed, keeper.num_promised) == (0, 0)
    until(lambda: keeper.counts.num_bytes_sent == num_tokens * TOKEN_BYTES)


def test_the_tokens_and_the_answer_are_encrypted_differently() -> None:
    """A key stream that is used twice would give both away."""
    ours, theirs = Seal(KEY), Seal(KEY)
    for frame in (Hello(VERSION, Seal.nonce()), Challenge(Seal.nonce())):
        theirs.decode(ours.encode(frame)[LENGTH_BYTES:], type(frame))
    asked, answered = (ours.data_cipher().encryptor().update(bytes(64)) for _ in range(2))
    assert asked != answered
    for sealed in (asked, answered):
        assert theirs.data_cipher().decryptor().update(sealed) == bytes(64)


def test_an_answer_larger_than_asked_is_refused(keeper: TcpConnector, taker: TcpConnector) -> None:
    pull = taker.ask(peer_of(keeper), WANTED)
    question_of(keeper).answer(DATA[: 62 * TOKEN_BYTES])
    assert ended(pull) is None
    assert taker.counts.num_failed == 1


def test_answers_are_bounded_and_nothing_gives_way_to_them() -> None:
    limit = 64 * TOKEN_BYTES
    with engine(kv_buffer_size=limit) as keeper, engine() as taker:
        offer = keeper.keep("r", b"d", DATA[: 4 * TOKEN_BYTES], ())
        assert isinstance(offer, KvOffer)
        pulls, questions = [], []
        for _ in range(2):  # in this order
            pulls.append(taker.ask(peer_of(keeper), WANTED))
            questions.append(question_of(keeper))
        assert keeper.lend(questions[0], 60)
        assert not keeper.lend(questions[1], 1)
        questions[0].answer(DATA[: 60 * TOKEN_BYTES])
        assert ended(pulls[0]) is not None
        until(lambda: keeper.lend(questions[1], 60))
        pulls[1].close()
        questions[1].answer(DATA[: 60 * TOKEN_BYTES])
        assert ended(taker.pull(offer.source, b"d", 0)) is not None
        until(lambda: keeper.has_room(64))


def test_a_promise_holds_until_it_was_asked_for() -> None:
    """It also ends when nothing is needed, so that no peer waits for it in vain."""
    with engine() as keeper, engine() as taker, engine(kv_lease_duration=1e-6) as late:
        for name in "abc":
            keeper.promise(name)
        pull = taker.ask(peer_of(keeper, "a"), WANTED)
        question_of(keeper).answer(None)
        ended(pull)
        until(lambda: keeper.num_promised == 2)
        nothing = WantedKv(TOKENS, len(TOKENS), None, None)
        assert ended(taker.ask(peer_of(keeper, "b"), nothing)) is None
        until(lambda: keeper.num_promised == 1)
        assert (keeper.has_questions, keeper.num_expired, taker.counts.num_failed) == (False, 0, 0)
        late.promise("a")
        until(lambda: (late.num_promised, late.num_expired) == (0, 1))


def test_a_peer_that_has_left_is_not_answered(keeper: TcpConnector, taker: TcpConnector) -> None:
    left = taker.ask(peer_of(keeper), WANTED)
    until(lambda: keeper.has_questions)
    waiting = [keeper._state.questions._questions[0]]
    left.close()
    until(lambda: not waiting[0].is_open)
    taker.ask(peer_of(keeper), dataclasses.replace(WANTED, start=4))
    until(lambda: len(keeper._state.questions) == 2)
    question = keeper.next_question()
    assert question.wanted.start == 4
    assert keeper.next_question() is None


def test_a_refusal_redeems_the_promise(keeper: TcpConnector, taker: TcpConnector) -> None:
    keeper.promise("r")
    taker.leave_model()
    assert ended(taker.ask(peer_of(keeper, "r"), WANTED)) is None
    until(lambda: keeper.num_promised == 0)


def test_a_consumer_promises_nothing() -> None:
    with engine(kv_role="kv_consumer") as keeper:
        keeper.promise("a")
        assert keeper.num_promised == 0


@pytest.mark.parametrize(
    ("networks", "host"),
    [
        (None, "8.8.8.8"),
        (None, "169.254.169.254"),
        (None, "0.0.0.0"),
        (None, "localhost"),
        (("10.0.0.0/8", "fd00::/8"), "127.0.0.1"),
    ],
)
def test_others_are_not_asked(caplog: pytest.LogCaptureFixture, networks: Any, host: str) -> None:
    """The host that a request names gives no access to other services: nothing is sent there."""
    with engine() as keeper, engine(kv_peer_networks=networks) as taker:
        assert ended(taker.ask(KvPeer(host, keeper.port), WANTED)) is None
        assert taker.counts.num_failed == 1
        assert not keeper.has_questions
    assert "kv_peer_networks" in caplog.text or host == "localhost"


@pytest.mark.parametrize("port", [-1, 70_000])
def test_an_invalid_port_fails_like_an_unused_one(port: int) -> None:
    with engine() as taker:
        assert ended(taker.ask(KvPeer("127.0.0.1", port), WANTED)) is None
        assert taker.counts.num_failed == 1


# A real taker that stops once it receives bytes.
TAKER = """
import sys, threading
import msgspec
from worker.config import KvTransferConfig
from worker.kv import channel, fetching, tcp
from worker.kv.asked import WantedKv
from worker.kv.content import KvShape
from worker.types import KvPeer, KvSource

fill = channel.Channel._fill

async def stand_still(self, data):
    if data.nbytes > 1 << 20:  # no frame
        print("receiving", flush=True)
        threading.Event().wait()
    await fill(self, data)

channel.Channel._fill = stand_still
fetching._PEER_SECONDS = 60.0
config = KvTransferConfig(kv_port=0, engine_id="t", kv_transfer_timeout=120.0)
taker = tcp.TcpConnector(config, b"k" * 32, KvShape("m", "float32", 2, 2, 8), 256)
source = msgspec.json.decode(sys.argv[1], type=KvSource)
if source.engine_id:
    taker.pull(source, b"d" * 32, 0)
else:
    wanted = WantedKv(tuple(range(source.num_tokens)), 0, None, None)
    taker.ask(KvPeer(source.host, source.port), wanted)
threading.Event().wait()
"""


@contextmanager
def stalled_taker(source: KvSource) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TAKER, msgspec.json.encode(source).decode()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "receiving\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("sends")
@pytest.mark.parametrize("then", ["another takes it", "it gives way"])
def test_a_decoder_that_is_killed_leaves_nothing_at_the_prefiller(then: str) -> None:
    """SIGKILL comes while bytes are on their way. What was being sent could not be evicted or
    fetched again; afterwards it can.
    """
    with engine(kv_buffer_size=LARGE) as keeper, engine() as taker:
        offer = keeper.keep("r", b"d" * 32, memoryview(bytes(LARGE)), ())
        assert isinstance(offer, KvOffer)
        with stalled_taker(offer.source) as process:
            assert not keeper.has_room(1)
            process.send_signal(signal.SIGKILL)
        if then == "another takes it":
            until(lambda: ended(taker.pull(offer.source, b"d" * 32, 0)) is not None)
        until(lambda: keeper.has_room(LARGE // TOKEN_BYTES))


@pytest.mark.usefixtures("sends")
def test_a_taker_that_is_killed_leaves_nothing_of_its_question() -> None:
    num_tokens = LARGE // TOKEN_BYTES
    with engine(kv_buffer_size=LARGE) as keeper:
        source = KvSource("127.0.0.1", keeper.port, "", "", num_tokens)
        answering = threading.Thread(target=_answer_with_zeros, args=(keeper, num_tokens))
        answering.start()
        with stalled_taker(source) as process:
            answering.join()
            assert not keeper.has_room(1)
            process.send_signal(signal.SIGKILL)
        until(lambda: keeper.has_room(num_tokens))


def _answer_with_zeros(keeper: TcpConnector, num_tokens: int) -> None:
    question = question_of(keeper)
    assert keeper.lend(question, num_tokens)
    question.answer(memoryview(bytes(LARGE)))
