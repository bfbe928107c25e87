"""HTTP/2 without I/O: the rules of the engine, and header blocks."""

from typing import Any

import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack import Decoder, Encoder, HPACKError
from hpack.struct import HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc.calls import joined
from picker.rpc.http2.engine import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_BYTES,
    STREAM_WINDOW_BYTES,
    Http2Engine,
    Http2Error,
    Http2Stream,
)
from picker.rpc.http2.frames import (
    ACK,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    NUMBER,
    PADDED,
    PREFACE,
    PRIORITY,
    TWO_NUMBERS,
    ErrorCode,
    FrameType,
    frame,
)
from picker.rpc.http2.headers import HeaderBlocks, changes_table, encode_fields
from tests.depth import examples
from tests.support.picker.http2_peer import REQUEST


class LibraryTwin:
    """The library's server with our settings; `chores` counts work that was made for nothing."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.chores = 0
        unchecked = {"validate_inbound_headers": False, "normalize_inbound_headers": False}
        self.http2 = H2Connection(
            H2Configuration(client_side=False, header_encoding=None, **unchecked)
        )
        self.http2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
            },
        )
        self.http2.decoder.max_header_list_size = MAX_HEADER_LIST_BYTES
        self.http2.initiate_connection()
        self.http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)

    def receive(self, data: bytes) -> None:
        for event in self.http2.receive_data(data):
            self._note(event)

    def _note(self, event: events.Event) -> None:
        match event:
            case events.RequestReceived():
                self.events.append(("request", event.stream_id, joined(event.headers or [])))
            case events.DataReceived():
                length = event.flow_controlled_length
                if length:
                    self.events.append(("data", event.stream_id, event.data, length))
                elif event.stream_ended is None:
                    self.chores += 1
            case events.StreamEnded():
                self.events.append(("end", event.stream_id))
            case events.StreamReset():
                self.events.append(("reset", event.stream_id))
            case events.WindowUpdated():
                if event.stream_id:
                    self.events.append(("window", event.stream_id))
            case events.PingAckReceived():
                self.events.append(("pong", event.ping_data))
            case (
                events.PingReceived()
                | events.PriorityUpdated()
                | events.UnknownFrameReceived()
                | events.RemoteSettingsChanged()
            ):
                self.chores += 1
            case _:
                pass


SETTINGS = frame(FrameType.SETTINGS, 0, 0, b"")
OPENING = PREFACE + SETTINGS
BLOCK = encode_fields([(name.encode(), value.encode()) for name, value in REQUEST])
HEADERS = frame(FrameType.HEADERS, END_HEADERS, 1, BLOCK)


class Stream(Http2Stream, eq=False, kw_only=True):
    """Records its events, except those without an effect."""

    events: list[tuple[Any, ...]]

    def on_data(self, data: bytes, flow_controlled_bytes: int) -> None:
        self.events.append(("data", self.stream_id, bytes(data), flow_controlled_bytes))

    def on_end(self) -> None:
        self.events.append(("end", self.stream_id))

    def on_reset(self) -> None:
        self.events.append(("reset", self.stream_id))

    def on_window(self) -> None:
        self.events.append(("window", self.stream_id))


class Record:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.chores = 0
        self.streams: dict[int, Stream] = {}

    def on_request(self, stream_id: int, send_window: int, headers: Any) -> Stream:
        self.events.append(("request", stream_id, dict(headers)))
        stream = self.streams[stream_id] = Stream(stream_id, send_window, events=self.events)
        return stream

    def on_window(self) -> None:
        pass

    def on_ping_answered(self, data: bytes) -> None:
        self.events.append(("pong", data))

    def on_chore(self) -> None:
        self.chores += 1

    def on_goaway(self, error_code: int) -> None:
        self.events.append(("goaway", error_code))


def sent_by(engine: Http2Engine) -> bytes:
    data = b"".join(engine.out)
    engine.out.clear()
    return data


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, at)
        end = at + 9 + (high << 16 | low)
        found.append((kind, flags, stream_id, data[at + 9 : end]))
        at = end
    return found


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def engine(record: Record) -> Http2Engine:
    engine = Http2Engine(record)
    engine.start()
    engine.receive(OPENING)
    sent_by(engine)
    return engine


P, C = ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(FrameType.DATA, 0, 0, b"x"), P),
        (frame(FrameType.DATA, 0, 5, b"x"), P),
        (HEADERS + frame(FrameType.DATA, PADDED, 1, b"\x05abc"), P),
        (HEADERS + frame(FrameType.DATA, PADDED, 1, b""), P),
        (frame(FrameType.HEADERS, END_HEADERS, 2, BLOCK), P),
        (frame(FrameType.HEADERS, END_HEADERS, 0, BLOCK), P),
        (HEADERS + HEADERS, P),
        (frame(FrameType.HEADERS, END_HEADERS | PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.HEADERS, 0, 1, BLOCK) + SETTINGS, P),
        (
            frame(FrameType.HEADERS, 0, 1, BLOCK)
            + frame(FrameType.CONTINUATION, END_HEADERS, 3, b""),
            P,
        ),
        (frame(FrameType.CONTINUATION, END_HEADERS, 1, BLOCK), P),
        (frame(FrameType.HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(FrameType.HEADERS, END_HEADERS, 1, b"\x40\x05a"), ErrorCode.COMPRESSION_ERROR),
        (
            frame(FrameType.HEADERS, 0, 1, b"") + 65 * frame(FrameType.CONTINUATION, 0, 1, b""),
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            frame(FrameType.HEADERS, 0, 1, b"")
            + 5 * frame(FrameType.CONTINUATION, 0, 1, bytes(16_384)),
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (frame(FrameType.RST_STREAM, 0, 1, bytes(4)), P),
        (HEADERS + frame(FrameType.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.SETTINGS, 0, 0, b"x"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.SETTINGS, 0, 0, b"\0\x04\xff\xff\xff\xff"), C),
        (frame(FrameType.SETTINGS, 0, 0, b"\0\x05\0\0\0\x01"), P),
        (frame(FrameType.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), P),
        (frame(FrameType.PING, 0, 0, b"short"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.PING, 0, 1, bytes(8)), P),
        (frame(FrameType.GOAWAY, 0, 0, b"x"), P),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(4)), P),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, NUMBER.pack(2**31 - 1)), C),
        (frame(FrameType.WINDOW_UPDATE, 0, 7, NUMBER.pack(1)), P),
        (FRAME_HEADER.pack(0, 16_385, FrameType.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_a_breach_of_the_connection_is_answered_with_its_code(
    engine: Http2Engine, sent: bytes, code: ErrorCode
) -> None:
    """RFC 9113 makes each of these breaches an error of the connection."""
    with pytest.raises(Http2Error):
        engine.receive(sent)
    kind, _, stream_id, payload = frames(sent_by(engine))[-1]
    assert (kind, stream_id) == (FrameType.GOAWAY, 0)
    assert TWO_NUMBERS.unpack(payload)[1] == code


def test_a_header_block_may_be_as_long_as_the_limits(
    engine: Http2Engine, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "picker.rpc.http2.engine"
    monkeypatch.setattr(f"{module}.MAX_CONTINUATIONS", 3)
    monkeypatch.setattr(f"{module}.MAX_HEADER_LIST_BYTES", len(BLOCK))
    first = frame(FrameType.HEADERS, 0, 1, b"") + frame(FrameType.CONTINUATION, 0, 1, b"")
    engine.receive(first + frame(FrameType.CONTINUATION, END_HEADERS, 1, BLOCK))
    assert 1 in record.streams
    monkeypatch.setattr(f"{module}.MAX_HEADER_LIST_BYTES", len(BLOCK) - 1)
    again = frame(FrameType.HEADERS, 0, 3, b"")
    with pytest.raises(Http2Error, match="too long"):
        engine.receive(again + frame(FrameType.CONTINUATION, END_HEADERS, 3, BLOCK))


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", HEADERS])
def test_a_peer_that_does_not_begin_with_the_preface_is_no_peer(
    record: Record, start: bytes
) -> None:
    engine = Http2Engine(record)
    with pytest.raises(Http2Error):
        engine.receive(start)


def test_settings_must_come_first(record: Record) -> None:
    engine = Http2Engine(record)
    with pytest.raises(Http2Error, match="settings"):
        engine.receive(PREFACE + HEADERS)


def test_unknown_frames_and_settings_are_ignored(engine: Http2Engine, record: Record) -> None:
    engine.receive(frame(0xEE, 255, 9, b"grease") + frame(FrameType.PRIORITY, 0, 3, bytes(5)))
    engine.receive(frame(FrameType.SETTINGS, 0, 0, b"\x7a\x7a\0\0\0\x01") + HEADERS)
    assert [event[:2] for event in record.events] == [("request", 1)]


def test_padding_counts_for_flow_control_but_is_no_content(
    engine: Http2Engine, record: Record
) -> None:
    engine.receive(HEADERS + frame(FrameType.DATA, PADDED | END_STREAM, 1, b"\x05data" + bytes(5)))
    assert record.events[1:] == [("data", 1, b"data", 10), ("end", 1)]


def test_the_windows_are_exact_and_restored(engine: Http2Engine, record: Record) -> None:
    engine.receive(HEADERS)
    full = STREAM_WINDOW_BYTES // 16_384
    engine.receive(full * frame(FrameType.DATA, 0, 1, bytes(16_384)))
    engine.acknowledge(record.streams[1], STREAM_WINDOW_BYTES)
    updates = [
        (stream_id, *NUMBER.unpack(payload))
        for kind, _, stream_id, payload in frames(sent_by(engine))
        if kind == FrameType.WINDOW_UPDATE
    ]
    assert updates == [(1, STREAM_WINDOW_BYTES)]
    engine.receive(full * frame(FrameType.DATA, 0, 1, bytes(16_384)))
    with pytest.raises(Http2Error):
        engine.receive(frame(FrameType.DATA, 0, 1, b"x"))
    assert frames(sent_by(engine))[-1][3][4:] == NUMBER.pack(ErrorCode.FLOW_CONTROL_ERROR)


def test_data_of_closed_streams_is_given_back_to_the_connection(
    engine: Http2Engine, record: Record
) -> None:
    """Data in transit at a reset must not shrink the window for ever."""
    engine.receive(HEADERS)
    engine.reset(record.streams[1])
    sent_by(engine)
    for _ in range(2 * CONNECTION_WINDOW_BYTES // 16_384):
        engine.receive(frame(FrameType.DATA, 0, 1, bytes(16_384)))
    assert {kind for kind, *_ in frames(sent_by(engine))} == {FrameType.WINDOW_UPDATE}


def test_one_stream_too_many_is_refused_alone(engine: Http2Engine, record: Record) -> None:
    for stream_id in range(1, 2 * MAX_CONCURRENT_STREAMS + 2, 2):
        engine.receive(frame(FrameType.HEADERS, END_HEADERS, stream_id, BLOCK))
    assert len(record.events) == MAX_CONCURRENT_STREAMS
    kind, _, stream_id, payload = frames(sent_by(engine))[-1]
    assert (kind, stream_id) == (FrameType.RST_STREAM, 2 * MAX_CONCURRENT_STREAMS + 1)
    assert payload == NUMBER.pack(ErrorCode.REFUSED_STREAM)


def test_data_may_fill_the_window_of_the_connection_to_its_last_byte(
    engine: Http2Engine, record: Record
) -> None:
    engine.receive(HEADERS + frame(FrameType.WINDOW_UPDATE, 0, 1, NUMBER.pack(10)))
    stream = record.streams[1]
    for length in (16_384, 16_384, 16_384, 16_383):
        assert engine.send_data(stream, bytes(length))
    assert not engine.send_data(stream, b"x")
    sent = [payload for kind, _, _, payload in frames(sent_by(engine)) if kind == FrameType.DATA]
    assert sum(map(len, sent)) == 65_535


def test_a_stream_whose_window_overflows_is_reset_alone(
    engine: Http2Engine, record: Record
) -> None:
    engine.receive(HEADERS + frame(FrameType.WINDOW_UPDATE, 0, 1, NUMBER.pack(2**31 - 1)))
    assert record.events[-1] == ("reset", 1)
    assert engine.window(record.streams[1]) == 0


def test_a_smaller_window_of_the_peer_may_leave_streams_in_debt(
    engine: Http2Engine, record: Record
) -> None:
    engine.receive(HEADERS)
    engine.send_data(record.streams[1], bytes(16_384))
    engine.receive(frame(FrameType.SETTINGS, 0, 0, b"\0\x04" + NUMBER.pack(1000)))
    assert engine.window(record.streams[1]) == 1000 - 16_384
    engine.receive(frame(FrameType.WINDOW_UPDATE, 0, 1, NUMBER.pack(16_384)))
    assert engine.window(record.streams[1]) == 1000


def test_long_header_blocks_go_out_in_frames_that_every_peer_takes(
    engine: Http2Engine, record: Record
) -> None:
    engine.receive(HEADERS)
    sent_by(engine)
    engine.send_headers(record.streams[1], bytes(40_000), end_stream=True)
    sent = frames(sent_by(engine))
    assert [(kind, flags, len(payload)) for kind, flags, _, payload in sent] == [
        (FrameType.HEADERS, END_STREAM, 16_384),
        (FrameType.CONTINUATION, 0, 16_384),
        (FrameType.CONTINUATION, END_HEADERS, 40_000 - 2 * 16_384),
    ]


@examples(120)
@given(st.data())
def test_the_library_understands_the_same(data: st.DataObject) -> None:
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    open_streams: list[int] = []
    for step in data.draw(st.lists(st.integers(0, 7), max_size=25)):
        if step <= 1 or not open_streams:
            stream_id = client.get_next_available_stream_id()
            extra = [(f"x-{data.draw(st.integers(0, 3))}", "v" * data.draw(st.integers(0, 40)))]
            client.send_headers(stream_id, [*REQUEST, *extra])
            open_streams.append(stream_id)
        elif step <= 3:
            size = data.draw(st.sampled_from([0, 1, 100, 5000]))
            pad = data.draw(st.none() | st.integers(0, 255))
            client.send_data(data.draw(st.sampled_from(open_streams)), bytes(size), pad_length=pad)
        elif step == 4:
            stream_id = data.draw(st.sampled_from(open_streams))
            client.end_stream(stream_id)
            open_streams.remove(stream_id)
        elif step == 5:
            stream_id = data.draw(st.sampled_from(open_streams))
            client.reset_stream(stream_id)
            open_streams.remove(stream_id)
        elif step == 6:
            client.ping(bytes(8))
        else:
            client.increment_flow_control_window(5, data.draw(st.sampled_from(open_streams)))
    sent = client.data_to_send()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    ours, twin = Record(), LibraryTwin()
    engine = Http2Engine(ours)
    engine.start()
    for piece in pieces:
        engine.receive(piece)
        twin.receive(piece)
    assert (ours.events, ours.chores) == (twin.events, twin.chores)


NAMES = st.sampled_from([b":path", b":method", b"te", b"content-type", b"x-a", b"x-b"])
VALUES = st.sampled_from([b"", b"POST", b"/a/b", b"trailers", b"v" * 200, bytes(range(256))])
FIELDS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=5)


@given(
    st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 64, 4096])), max_size=12)
)
def test_a_memory_of_blocks_never_changes_their_meaning(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    encoder, twin = Encoder(), Decoder()
    remembering = HeaderBlocks(Decoder())
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        kinds = [
            (NeverIndexedHeaderTuple if secret else HeaderTuple)(name, value)
            for name, value, secret in fields
        ]
        block = encoder.encode(kinds, huffman=huffman)
        expected: dict[bytes, list[bytes]] = {}
        for name, value in twin.decode(block, raw=True):
            expected.setdefault(bytes(name), []).append(bytes(value))
        meant = {name: b",".join(values) for name, values in expected.items()}
        assert remembering.decode(block) == meant
        # Each block is one message; sent once more it would insert again, so it is only looked at.
        if not changes_table(block):
            assert remembering.decode(block) == meant


@pytest.mark.parametrize(
    ("block", "changes"),
    [
        (b"", False),
        (b"\x88\xbe", False),
        (b"\xff\x80\x80\x01\x88", False),
        (b"\x40\x01a\x01b", True),
        (b"\x88\x3f\xe1\x1f", True),
        (b"\x04\x03/ab\x88", False),
        (b"\x10\x01a\x01b", False),
        (b"\x0f\x10\x02xy\x83", False),
        (b"\x00\x01a\x7f\x49" + b"v" * 200 + b"\x41\x01x", True),
        (b"\x00\x01a\x7f\x49" + b"v" * 200 + b"\x82", False),
    ],
)
def test_a_change_of_the_table_is_found_after_any_field(block: bytes, changes: bool) -> None:
    assert changes_table(block) is changes


def test_a_block_that_is_none_is_an_error_and_not_remembered() -> None:
    blocks = HeaderBlocks(Decoder())
    for _ in range(2):
        with pytest.raises(HPACKError):
            blocks.decode(b"\xff\xff\xff")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.binary(max_size=20_000))))
def test_a_block_without_a_table_is_read_by_every_decoder(
    fields: list[tuple[bytes, bytes]],
) -> None:
    fields = [(b":status", b"200"), *fields]
    block = encode_fields(fields)
    assert not changes_table(block)
    decoder = Decoder(max_header_list_size=2**30)
    assert decoder.decode(block, raw=True) == fields
