"""KV over TCP on this machine: the right bytes or none, and no hang if a process is killed."""

import dataclasses
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from tests.support.waiting import pass_time
from tests.support.worker.kv_connectors import KEY, SHAPE, TOKEN_BYTES, ended, engine
from tests.support.worker.kv_engines import until
from worker.config import KvTransferConfig
from worker.errors import ConfigError, KvTransferError
from worker.kv.access import read_key
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.exports import ExportedKv, Exports
from worker.kv.shared import SharedMemory, map_shared
from worker.kv.tcp import TcpConnector
from worker.kv.wire import LENGTH_BYTES, VERSION, Challenge, Hello, Seal, Shared
from worker.types import KvOffer, KvPart, KvPeer, KvSource

DIGEST = b"d" * 32
DATA = memoryview(bytes(range(256)) * 4096)  # a MiB: 4,096 tokens of 256 bytes


def exported(keeper: TcpConnector, data: memoryview = DATA) -> KvSource:
    offer = keeper.keep("r", DIGEST, data, (1, 2))
    assert isinstance(offer, KvOffer)
    return offer.source


class Relay:
    """A proxy between two engines that alters the exporter's bytes by `spoil`."""

    def __init__(self, source: KvSource, spoil: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._spoil = (source.host, source.port), spoil
        self._sockets: list[socket.socket] = [self._listener]
        self.source = msgspec.structs.replace(source, port=self._listener.getsockname()[1])
        self.requests = b""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            taker, _ = self._listener.accept()
            keeper = socket.create_connection(self._target)
            self._sockets += [taker, keeper]
            threading.Thread(target=self._forward, args=(taker, keeper), daemon=True).start()
            seen = 0
            while data := keeper.recv(1 << 16):
                spoilt = self._spoil(bytearray(data), seen)
                seen += len(data)
                if spoilt is None:
                    break
                taker.sendall(spoilt)
            self.close()

    def _forward(self, taker: socket.socket, keeper: socket.socket) -> None:
        with suppress(OSError):
            while data := taker.recv(1 << 16):
                self.requests += data
                keeper.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("start", [0, 1, 4000])
def test_kv_arrives_exactly_and_once(start: int, keeper: TcpConnector, taker: TcpConnector) -> None:
    source = exported(keeper)
    part = ended(taker.pull(source, DIGEST, start))
    assert (part.start, part.end, part.data) == (start, 4096, DATA[start * TOKEN_BYTES :])
    assert taker.counts.num_bytes_received == part.data.nbytes
    until(lambda: keeper.counts.num_bytes_sent == part.data.nbytes)
    assert ended(taker.pull(source, DIGEST, start)) is None
    assert taker.counts.num_failed == 1


def test_a_simulated_transfer_takes_its_time() -> None:
    asked: list[int] = []

    def pace(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 3600.0

    config = KvTransferConfig(kv_port=0, engine_id="t", kv_transfer_timeout=3000.0)
    slow = TcpConnector(config, KEY, SHAPE, TOKEN_BYTES, pace)
    config = KvTransferConfig(kv_port=0, engine_id="t", kv_transfer_timeout=5000.0)
    patient = TcpConnector(config, KEY, SHAPE, TOKEN_BYTES, pace)
    with engine() as keeper, closing(slow), closing(patient):
        for taker, start, comes in ((slow, 0, False), (patient, 96, True)):
            pull = taker.pull(exported(keeper), DIGEST, start)
            until(lambda start=start: asked[-1:] == [4096 - start])
            pass_time(taker._loop)
            assert (ended(pull) is not None) is comes
    assert asked == [4096, 4000]


def test_an_export_that_is_not_needed_is_freed(keeper: TcpConnector, taker: TcpConnector) -> None:
    source = exported(keeper)
    ended(taker.pull(source, DIGEST, source.num_tokens))
    assert ended(taker.pull(source, DIGEST, 0)) is None
    assert keeper.counts.num_bytes_sent == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"key": b"x" * 32}, "another key"),
        (
            {"shape": msgspec.structs.replace(SHAPE, dtype="bfloat16")},
            "its dtype is float32, and bfloat16 here",
        ),
        ({"shape": msgspec.structs.replace(SHAPE, model="n")}, "its model is m, and n here"),
        (
            {"shape": msgspec.structs.replace(SHAPE, num_layers=3)},
            "its num_layers is 2, and 3 here",
        ),
    ],
)
def test_engines_that_do_not_fit_refuse_each_other(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any], said: str
) -> None:
    with engine() as keeper, engine() as taker, engine(**fields) as stranger:
        source = exported(keeper)
        assert ended(stranger.pull(source, DIGEST, 0)) is None
        assert said in caplog.text
        assert ended(taker.pull(source, DIGEST, 0)) is not None


@pytest.mark.parametrize(
    "change",
    [{"engine_id": "f"}, {"transfer_id": "s"}, {"num_tokens": 5}, {"port": 1}, {"host": "x" * 80}],
)
def test_wrong_sources_give_nothing(
    change: dict[str, Any], keeper: TcpConnector, taker: TcpConnector
) -> None:
    source = exported(keeper)
    assert ended(taker.pull(msgspec.structs.replace(source, **change), DIGEST, 0)) is None
    assert ended(taker.pull(source, b"e" * 32, 0)) is None
    assert ended(taker.pull(source, DIGEST, 0)) is not None


@pytest.mark.usefixtures("sends")
def test_an_eavesdropper_learns_nothing() -> None:
    """No stretch of the KV is on the wire, and not the same bytes twice."""
    overheard: list[bytes] = []
    with engine() as keeper, engine() as taker:
        for _ in range(2):
            said = bytearray()

            def listen(data: bytearray, seen: int, said: bytearray = said) -> bytearray:
                said += data
                return data

            relay = Relay(exported(keeper), listen)
            assert ended(taker.pull(relay.source, DIGEST, 0)).data == DATA
            relay.close()
            overheard.append(bytes(said))
    stretches = [bytes(DATA[at : at + 16]) for at in range(0, len(DATA), 1024)]
    assert not any(stretch in said for stretch in stretches for said in overheard)
    assert overheard[0][-500_000:-100] != overheard[1][-500_000:-100]


def _flipped(data: bytearray, seen: int) -> bytearray:
    if seen <= 500_000 < seen + len(data):
        data[500_000 - seen] ^= 1
    return data


def _cut(data: bytearray, seen: int) -> bytearray | None:
    return data if seen + len(data) < 500_000 else None


def _swapped(data: bytearray, seen: int) -> bytearray:
    if seen > 300_000 and len(data) >= 64:  # however the bytes come in pieces
        data[:32], data[32:64] = data[32:64], data[:32]
    return data


@pytest.mark.usefixtures("sends")
@pytest.mark.parametrize("spoil", [_flipped, _cut, _swapped, lambda data, seen: None])
def test_damaged_bytes_are_not_used(spoil: Any, keeper: TcpConnector, taker: TcpConnector) -> None:
    relay = Relay(exported(keeper), spoil)
    assert ended(taker.pull(relay.source, DIGEST, 0)) is None
    relay.close()


@pytest.mark.usefixtures("sends")
def test_a_transfer_that_stands_still_ends() -> None:
    """A partly sent export can be fetched again."""
    waits = threading.Event()

    def stall(data: bytearray, seen: int) -> bytearray:
        if seen > 100_000:
            waits.wait(60)
        return data

    with engine(kv_transfer_timeout=0.3) as keeper, engine(kv_transfer_timeout=0.3) as taker:
        relay = Relay(exported(keeper, memoryview(bytes(1 << 26))), stall)
        assert ended(taker.pull(relay.source, DIGEST, 0)) is None
        waits.set()
        relay.close()


def test_a_recorded_request_is_worth_nothing(keeper: TcpConnector, taker: TcpConnector) -> None:
    """Its nonce is wrong when it is played again."""
    relay = Relay(exported(keeper), lambda data, seen: data)
    assert ended(taker.pull(relay.source, DIGEST, 0)) is not None
    relay.close()
    source = exported(keeper)
    with socket.create_connection((source.host, source.port)) as replayed:
        replayed.sendall(relay.requests)
        received = b""
        with suppress(OSError):
            while data := replayed.recv(1 << 16):
                received += data
    assert len(received) < 200  # the challenge
    assert ended(taker.pull(source, DIGEST, 0)) is not None


def test_memory_that_is_shared_is_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the bytes are sent: another name, another size, or memory that may still change."""
    real, spoilt = map_shared, 0

    def spoil(shared: Shared, size: int) -> memoryview | None:
        nonlocal spoilt
        for wrong in (
            real(msgspec.structs.replace(shared, name="pointsman-kv-0"), size),
            real(msgspec.structs.replace(shared, pid=2**22 + 1), size),
            real(shared, size - 1),
        ):
            assert wrong is None
            spoilt += 1
        fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
        os.write(fd, DATA)
        unsealed = Shared(os.getpid(), fd, "open")
        assert real(unsealed, len(DATA)) is None
        os.close(fd)
        return None

    monkeypatch.setattr("worker.kv.fetching.map_shared", spoil)
    with engine() as keeper, engine() as taker:
        assert ended(taker.pull(exported(keeper), DIGEST, 0)).data == DATA
    assert spoilt == 3


def test_shared_memory_outlives_its_keeper_and_is_given_back() -> None:
    gc.collect()  # files of other tests are not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with engine() as taker:
        with engine() as keeper:
            part = ended(taker.pull(exported(keeper), DIGEST, 1))
        assert part.data == DATA[TOKEN_BYTES:]
    del part  # its mapping has a file of its own
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("way")
def test_kv_that_is_being_sent_takes_room() -> None:
    waits, seen = threading.Event(), threading.Event()

    def stall(data: bytearray, num_seen: int) -> bytearray:
        seen.set()
        waits.wait(60)
        return data

    with engine(kv_buffer_size=3 << 20) as keeper, engine() as taker:
        relay = Relay(exported(keeper, memoryview(bytes(2 << 20))), stall)
        pull = taker.pull(relay.source, DIGEST, 0)
        assert seen.wait(60)
        assert keeper.has_room(4096)
        waits.set()
        assert ended(pull) is not None
        relay.close()
        until(lambda: keeper.has_room(3 * 4096))
        assert not keeper.has_room(3 * 4096 + 1)


def test_a_closed_transfer_leaves_room() -> None:
    with engine(kv_buffer_size=1e9) as keeper, engine(kv_buffer_size=1 << 20) as taker:
        sources = [exported(keeper) for _ in range(3)]
        pulls = [taker.pull(source, DIGEST, 0) for source in sources]
        assert ended(pulls[0]) is not None
        assert not pulls[1].done
        pulls[1].close()
        ended(pulls[1])
        pulls[0].close()
        assert ended(pulls[2]) is not None
        pulls[2].close()
        pulls[2].close()


def test_exports_are_bounded() -> None:
    with engine(kv_buffer_size=2 << 20) as keeper, engine() as taker:
        sources = [exported(keeper) for _ in range(3)]
        assert keeper.num_expired == 1
        parts = [ended(taker.pull(source, DIGEST, 0)) for source in sources]
        assert [part is None for part in parts] == [True, False, False]
        assert keeper.keep("r", DIGEST, memoryview(bytes(3 << 20)), ()) is None


def test_silent_connections_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have plenty of time while there are seats, and enough when there are none."""
    monkeypatch.setattr("worker.kv.serving.MAX_GIVEN", 4)
    monkeypatch.setattr("worker.kv.serving._HANDSHAKE_SECONDS", 1e6)
    with engine() as keeper, engine() as taker, ExitStack() as opened:
        sources = [exported(keeper) for _ in range(2)]
        where = (sources[0].host, sources[0].port)
        silent = [opened.enter_context(socket.create_connection(where)) for _ in range(3)]
        until(lambda: len(keeper._server._handshakes) == 3)
        assert ended(taker.pull(sources[0], DIGEST, 0)) is not None
        assert len(keeper._server._handshakes) == 3
        silent.append(opened.enter_context(socket.create_connection(where)))
        until(lambda: len(keeper._server._handshakes) == 4)
        monkeypatch.setattr("worker.kv.serving._SHORT_HANDSHAKE_SECONDS", 0.0)
        assert ended(taker.pull(sources[1], DIGEST, 0)) is not None
        assert [one.recv(1) for one in silent] == [b""] * 4


def test_a_silent_connection_ends() -> None:
    with engine() as keeper, socket.create_connection(("127.0.0.1", keeper.port)) as silent:
        until(lambda: bool(keeper._server._handshakes))
        pass_time(keeper._loop)
        assert silent.recv(1) == b""


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\xff" * 4])
def test_noise_does_no_harm(noise: bytes, keeper: TcpConnector, taker: TcpConnector) -> None:
    source = exported(keeper)
    with socket.create_connection((source.host, source.port)) as stranger, suppress(OSError):
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert ended(taker.pull(source, DIGEST, 0)) is not None


def test_an_engine_that_ends_ends_its_transfers() -> None:
    with engine() as taker:
        with engine() as keeper:
            source = exported(keeper)
        assert ended(taker.pull(source, DIGEST, 0)) is None
        with engine(kv_port=source.port) as again:
            assert again.port == source.port
            with pytest.raises(ConfigError, match="kv_port 0 is any"), engine(kv_port=source.port):
                pass


def test_frames_of_one_kind_do_not_pass_for_another() -> None:
    ours, theirs = Seal(KEY), Seal(KEY)
    frame = ours.encode(Hello(1, Seal.nonce()))
    theirs.decode(frame[4:], Hello)
    with pytest.raises(KvTransferError, match="no Hello"):
        ours.decode(theirs.encode(Challenge(Seal.nonce()))[4:], Hello)


def room(keeper: TcpConnector, num_tokens: int = 4096) -> KvSource:
    return KvSource("127.0.0.1", keeper.port, None, "room 5", num_tokens)


def waiting(keeper: TcpConnector, connections: int) -> None:
    until(lambda: keeper._server.num_waiting == connections)


@pytest.mark.usefixtures("way")
def test_kv_is_waited_for_where_its_name_is_known(
    monkeypatch: pytest.MonkeyPatch, keeper: TcpConnector, taker: TcpConnector
) -> None:
    """The order of arrival does not matter. A wait takes no seat from a transfer."""
    monkeypatch.setattr("worker.kv.serving.MAX_GIVEN", 2)
    pull = taker.pull(room(keeper), DIGEST, 96)
    other = taker.pull(msgspec.structs.replace(room(keeper), transfer_id="r"), DIGEST, 0)
    waiting(keeper, 2)
    assert ended(taker.pull(exported(keeper), DIGEST, 0)) is not None
    assert not pull.done
    keeper.keep("r", DIGEST, DATA, (), "room 5")
    assert ended(pull).data == DATA[96 * TOKEN_BYTES :]
    waiting(keeper, 1)
    assert not other.done
    keeper.keep("r", DIGEST, DATA, (), "room 5")
    assert ended(taker.pull(room(keeper), DIGEST, 0)) is not None


def test_a_wait_has_an_end() -> None:
    """An exporter that ends or is missing ends it at once."""
    with engine() as taker, engine(kv_lease_duration=0.3) as impatient:
        with engine() as keeper:
            assert ended(impatient.pull(room(keeper), DIGEST, 0)) is None
            pull = taker.pull(room(keeper), DIGEST, 0)
            waiting(keeper, 1)
        assert ended(pull) is None
        with engine(kv_lease_duration=0.3) as keeper:
            assert ended(taker.pull(room(keeper), DIGEST, 0)) is None
            waiting(keeper, 0)
            keeper.keep("r", b"e" * 32, DATA, (), "room 5")
            assert ended(taker.pull(room(keeper), DIGEST, 0)) is None
        assert ended(taker.pull(room(keeper), DIGEST, 0)) is None


def test_a_disconnected_peer_frees_its_wait(keeper: TcpConnector, taker: TcpConnector) -> None:
    pull = taker.pull(room(keeper), DIGEST, 0)
    waiting(keeper, 1)
    pull.close()
    waiting(keeper, 0)


def test_waits_are_bounded(
    monkeypatch: pytest.MonkeyPatch, keeper: TcpConnector, taker: TcpConnector
) -> None:
    monkeypatch.setattr("worker.kv.serving.MAX_WAITING", 1)
    first = taker.pull(room(keeper), DIGEST, 0)
    waiting(keeper, 1)
    assert ended(taker.pull(room(keeper), DIGEST, 0)) is None
    keeper.keep("r", DIGEST, DATA, (), "room 5")
    assert ended(first) is not None


def test_a_name_is_of_the_last_export() -> None:
    with engine(kv_buffer_size=2 << 20) as keeper, engine() as taker:
        keeper.keep("r", b"e" * 32, DATA, (), "room 5")
        keeper.keep("r", DIGEST, DATA, (), "room 5")
        assert keeper.num_expired == 1
        assert ended(taker.pull(room(keeper), DIGEST, 0)) is not None
        until(lambda: keeper.has_room(2 * 4096))


def test_a_name_that_is_used_again_takes_no_room_twice() -> None:
    kvs = Exports(1000)
    first, second = (ExportedKv(DIGEST, 1, memoryview(bytes(100)), 9.0) for _ in range(2))
    assert kvs.add("room", first, 0.0)
    assert kvs.take("room") is first
    assert kvs.add("room", second, 0.0)
    kvs.put_back("room", first)
    assert kvs.take("room") is second
    kvs.sent(second)
    assert kvs.num_bytes == 0


def test_nothing_moves_once_the_model_may_differ(keeper: TcpConnector, taker: TcpConnector) -> None:
    before, after = exported(keeper), exported(keeper)
    keeper.leave_model()
    assert ended(taker.pull(before, DIGEST, 0)) is None
    keeper.leave_model()
    taker.leave_model()
    assert ended(taker.pull(after, DIGEST, 0)) is None


def test_only_networks_that_were_named_are_connected_to() -> None:
    with engine() as keeper, engine(kv_peer_networks=("10.0.0.0/8",)) as taker:
        source = exported(keeper)
        assert ended(taker.pull(source, DIGEST, 0)) is None
        mapped = msgspec.structs.replace(source, host="::ffff:169.254.169.254")
        assert ended(taker.pull(mapped, DIGEST, 0)) is None
        assert len(keeper._exports._exports) == 1


def test_a_key_is_needed_beyond_this_machine(tmp_path: Any) -> None:
    """The file goes before the environment."""
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="common key"):
        read_key(KvTransferConfig(kv_ip="10.0.0.1"), {})
    variable = {"POINTSMAN_KV_TRANSFER_KEY": "a"}
    given = read_key(KvTransferConfig(kv_ip="10.0.0.1"), variable)
    config = KvTransferConfig(kv_ip="10.0.0.1", key_file=str(file))
    with pytest.raises(ConfigError, match="key_file"):
        read_key(config, variable)
    file.write_text("a\n")
    assert read_key(config, {}) == given
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_key(config, variable)


def test_without_a_key_nothing_is_taken_from_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """A client names the source, and could answer itself."""
    with engine(read_key(KvTransferConfig(), {})) as taker:
        assert ended(taker.pull(KvSource("192.0.2.1", 1, "e", "t", 2), DIGEST, 0)) is None
    assert "without a key nothing is taken from 192.0.2.1" in caplog.text


def test_memory_of_a_cancelled_transfer_is_closed() -> None:
    """It is closed even if the transfer was cancelled while a thread copied for it."""
    memory = SharedMemory.of(DATA)
    fd = memory.shared.fd
    assert os.fstat(fd).st_size == len(DATA)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


TOKENS = tuple(range(70_000, 70_064))
ASKED = memoryview(bytes(range(256)) * len(TOKENS))
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
    question.answer(ASKED[: num_tokens * TOKEN_BYTES] if num_tokens else None)
    part = ended(pull)
    expected = KvPart(3, 3 + num_tokens, ASKED[: num_tokens * TOKEN_BYTES])
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
    question_of(keeper).answer(ASKED[: 62 * TOKEN_BYTES])
    assert ended(pull) is None
    assert taker.counts.num_failed == 1


def test_answers_are_bounded_and_nothing_gives_way_to_them() -> None:
    limit = 64 * TOKEN_BYTES
    with engine(kv_buffer_size=limit) as keeper, engine() as taker:
        offer = keeper.keep("r", b"d", ASKED[: 4 * TOKEN_BYTES], ())
        assert isinstance(offer, KvOffer)
        pulls, questions = [], []
        for _ in range(2):  # in this order
            pulls.append(taker.ask(peer_of(keeper), WANTED))
            questions.append(question_of(keeper))
        assert keeper.lend(questions[0], 60)
        assert not keeper.lend(questions[1], 1)
        questions[0].answer(ASKED[: 60 * TOKEN_BYTES])
        assert ended(pulls[0]) is not None
        until(lambda: keeper.lend(questions[1], 60))
        pulls[1].close()
        questions[1].answer(ASKED[: 60 * TOKEN_BYTES])
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
