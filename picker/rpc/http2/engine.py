"""The protocol state of one HTTP/2 connection, for speed: bytes in, method calls out.

The listener creates one object for each stream, which lives from its HEADERS until both halves are
closed or one end resets it. A stream number without an object, below the highest one seen, is a
closed stream. A breach of the connection's rules queues a GOAWAY and raises `Http2Error`; a breach
of one stream's rules resets that stream. Server push is not supported. Source: RFC 9113.
"""

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Protocol

import msgspec
from hpack import Decoder, HPACKError, OversizedHeaderListError

from picker.errors import PickerError
from picker.rpc.http2.frames import (
    ACK,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    NUMBER,
    PADDED,
    PREFACE,
    PRIORITY,
    TWO_NUMBERS,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    goaway,
)
from picker.rpc.http2.headers import HeaderBlocks

STREAM_WINDOW_BYTES = 1024 * 1024  # a body arrives while its last piece is read
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
MAX_CONCURRENT_STREAMS = 4096  # far more than one Envoy worker opens
MAX_HEADER_LIST_BYTES = 64 * 1024  # the proxy's own; those of clients are in messages
MAX_CONTINUATIONS = 64  # empty ones pass every limit of bytes
_SETTING = Struct(">HI")
_DATA, _HEADERS, _SETTINGS, _CONTINUATION = (
    int(FrameType.DATA),
    int(FrameType.HEADERS),
    int(FrameType.SETTINGS),
    int(FrameType.CONTINUATION),
)


class Http2Error(PickerError):
    """The peer broke HTTP/2; the GOAWAY with the reason is queued."""


class Http2Stream(msgspec.Struct, eq=False):
    """One open stream. The engine owns the fields; a subclass handles the events."""

    stream_id: int
    send_window: int
    receive_window: int = STREAM_WINDOW_BYTES
    credit: int = 0  # acknowledged bytes without a window update yet
    input_closed: bool = False  # the peer sends no more
    output_closed: bool = False  # nothing more can be sent

    def on_data(self, data: bytes, flow_controlled_bytes: int) -> None:
        """Process content; acknowledge `flow_controlled_bytes` later (padding counts)."""

    def on_end(self) -> None: ...

    def on_reset(self) -> None: ...

    def on_window(self) -> None: ...


class Http2Listener(Protocol):
    """A connection's events besides those of its streams, in the order of the peer's actions."""

    def on_request(
        self, stream_id: int, send_window: int, headers: Mapping[bytes, bytes]
    ) -> Http2Stream:
        """Return the object of a new stream. Names are lower case, repeated ones joined."""

    def on_window(self) -> None:
        """Called when the window of the connection, or of all streams, changes."""

    def on_ping_answered(self, data: bytes) -> None:
        """Called when the peer has read everything before the ping."""

    def on_chore(self) -> None:
        """Called for a frame that costs work but advances no call. May raise `Http2Error`."""

    def on_goaway(self, error_code: int) -> None:
        """Called when the peer opens no more streams; with code 0 the open ones continue."""


class Http2Engine:
    """Owns the protocol state of one connection, as its server. Call `start` first."""

    def __init__(self, listener: Http2Listener) -> None:
        self.out: list[bytes] = []  # to be sent, in order
        self.streams: dict[int, Http2Stream] = {}
        self.max_frame_bytes = MAX_FRAME_BYTES  # of one DATA frame to the peer
        self.has_met_peer = False  # the peer's preface and settings have come
        self._listener = listener
        self._rest = b""  # of a frame that is not complete
        self._last_stream_id = 0
        self._has_preface = False
        self._send_window = DEFAULT_WINDOW_BYTES
        self._initial_send_window = DEFAULT_WINDOW_BYTES
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._credit = 0
        self._headers = HeaderBlocks(Decoder(max_header_list_size=MAX_HEADER_LIST_BYTES))
        self._block: list[bytes] | None = None  # of HEADERS that continue in CONTINUATION
        self._block_stream_id = self._block_flags = self._block_bytes = 0
        self._receivers: tuple[Callable[[int, int, bytes], None], ...] = (  # by type
            self._data,
            self._header_frame,
            self._ignore,
            self._rst_stream,
            self._settings,
            self._push_promise,
            self._ping,
            self._goaway,
            self._window_update,
            self._continuation,
            *[self._ignore] * (256 - len(FrameType)),
        )

    # Out

    def start(self) -> None:
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, MAX_CONCURRENT_STREAMS),
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
            (Setting.MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST_BYTES),
        )
        payload = b"".join(_SETTING.pack(*setting) for setting in settings)
        self.out.append(frame(FrameType.SETTINGS, 0, 0, payload))
        self._grow_window(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)

    def window(self, stream: Http2Stream) -> int:
        """Return the bytes of content that `stream` may send now; 0 for a closed one."""
        return 0 if stream.output_closed else min(stream.send_window, self._send_window)

    def send_headers(self, stream: Http2Stream, block: bytes, end_stream: bool = False) -> None:
        """Queue a header block; ignored on a closed stream."""
        if stream.output_closed:
            return
        flags = END_STREAM if end_stream else 0
        if len(block) <= MAX_FRAME_BYTES:
            head = FRAME_HEADER.pack(0, len(block), _HEADERS, flags | END_HEADERS, stream.stream_id)
            self.out += (head, block)
        else:
            self.out += _split_headers(stream.stream_id, block, flags)
        if end_stream:
            stream.output_closed = True
            if stream.input_closed:
                self.streams.pop(stream.stream_id, None)

    def send_data(self, stream: Http2Stream, *pieces: bytes) -> bool:
        """Queue content as one frame; return False if a window or the frame size forbids that."""
        length = sum(map(len, pieces))
        if length > self.max_frame_bytes or length > self._send_window:
            return False
        if length > stream.send_window or stream.output_closed:
            return False
        stream.send_window -= length
        self._send_window -= length
        self.out.append(
            FRAME_HEADER.pack(length >> 16, length & 0xFFFF, _DATA, 0, stream.stream_id)
        )
        self.out += pieces
        return True

    def acknowledge(self, stream: Http2Stream, count: int) -> None:
        """Acknowledge processed flow-controlled bytes; the stream may be closed."""
        self._acknowledge_to_connection(count)
        if stream.input_closed:
            return
        stream.credit += count
        # A quarter: rare enough to cost little, and the peer never waits for it.
        if stream.credit >= STREAM_WINDOW_BYTES // 4:
            stream.receive_window += stream.credit
            self._grow_window(stream.stream_id, stream.credit)
            stream.credit = 0

    def reset(self, stream: Http2Stream, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Reset a stream; NO_ERROR asks the peer to stop sending an answered request."""
        self._close(stream)
        self._send_reset(stream.stream_id, code)

    def ping(self, data: bytes) -> None:
        """Queue a PING with these eight bytes; its answer causes `on_ping_answered`."""
        self.out.append(frame(FrameType.PING, 0, 0, data))

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        self.out.append(goaway(self._last_stream_id, code))

    # In

    def receive(self, data: bytes) -> None:
        """Process bytes from the peer, which may be cut anywhere. Raises `Http2Error`."""
        buffer = self._rest + data if self._rest else data
        at = 0
        if not self._has_preface:
            at = self._take_preface(buffer)
            if not at:
                return
        end = len(buffer)
        receivers, unpack = self._receivers, FRAME_HEADER.unpack_from
        while end - at >= 9:
            high, low, kind, flags, stream_id = unpack(buffer, at)
            start, length = at + 9, high << 16 | low
            stop = start + length
            if length > MAX_FRAME_BYTES:
                raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "a frame is too long")
            if stop > end:
                break
            at = stop
            if not self.has_met_peer and kind != _SETTINGS:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "settings must come first")
            if self._block is not None and kind != _CONTINUATION:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
            receivers[kind](stream_id & MAX_WINDOW_BYTES, flags, buffer[start:stop])
        self._rest = buffer[at:]

    def _take_preface(self, buffer: bytes) -> int:
        """Return the length of the preface; 0 while it is incomplete."""
        seen = buffer[: len(PREFACE)]
        if not PREFACE.startswith(seen):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self._has_preface = len(seen) == len(PREFACE)
        self._rest = b"" if self._has_preface else buffer
        return len(PREFACE) if self._has_preface else 0

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._receive_window -= length
        if self._receive_window < 0:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window")
        if flags & PADDED:
            payload = self._without_padding(payload)
        stream = self.streams.get(stream_id)
        if stream is None or stream.input_closed:
            if stream is not None:
                self._fail_stream(stream, ErrorCode.STREAM_CLOSED)
            elif not self._was_opened(stream_id):  # that of a stream closed here was in transit
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "data on a stream that is not open")
            # Dropped data counts in the connection's window as well (RFC 9113, section 6.9).
            self._acknowledge_to_connection(length)
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "more data than a stream's window")
        if length:
            stream.on_data(payload, length)
        # No window bounds empty frames, so their number has to be bounded.
        elif not flags & END_STREAM:
            self._listener.on_chore()
        if flags & END_STREAM:
            self._end_input(stream)

    def _header_frame(self, stream_id: int, flags: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = self._without_padding(payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "a priority is cut short")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._header_block(stream_id, flags, payload)
            return
        self._block, self._block_bytes = [payload], len(payload)
        self._block_stream_id, self._block_flags = stream_id, flags

    def _continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._block is None or stream_id != self._block_stream_id:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
        self._block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > MAX_HEADER_LIST_BYTES or len(self._block) > MAX_CONTINUATIONS:
            raise self._broken(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), None
            self._header_block(stream_id, self._block_flags, block)

    def _header_block(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            # Even for a stream that is refused below: the decoder must see every block.
            headers = self._headers.decode(block)
        except OversizedHeaderListError:
            raise self._broken(ErrorCode.ENHANCE_YOUR_CALM, "the headers are too long") from None
        except (HPACKError, ValueError) as error:
            text = f"a header block that cannot be read: {error}"
            raise self._broken(ErrorCode.COMPRESSION_ERROR, text) from error
        stream = self.streams.get(stream_id)
        if stream is not None:
            if stream.input_closed or not flags & END_STREAM:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "headers within a stream")
            self._end_input(stream)
            return
        if stream_id & 1 and stream_id <= self._last_stream_id:
            return  # trailers of a stream we have closed
        if not stream_id & 1:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a stream of the wrong parity")
        self._last_stream_id = stream_id
        if len(self.streams) >= MAX_CONCURRENT_STREAMS:
            # Refused alone: an end of the connection would cost the proxy all other streams.
            self._send_reset(stream_id, ErrorCode.REFUSED_STREAM)
            self._listener.on_chore()
            return
        stream = self._listener.on_request(stream_id, self._initial_send_window, headers)
        self.streams[stream_id] = stream
        if flags & END_STREAM:
            self._end_input(stream)

    def _rst_stream(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._expect_length(payload, 4)
        if not self._was_opened(stream_id):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a reset of a stream that is not open")
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._close(stream)
            stream.on_reset()

    def _settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        self.has_met_peer = True
        if stream_id or len(payload) % _SETTING.size or (flags & ACK and payload):
            raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "settings that cannot be read")
        if flags & ACK:
            return
        for name, value in _SETTING.iter_unpack(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                self._set_initial_window(value)
            elif name == Setting.MAX_FRAME_SIZE:
                if not MAX_FRAME_BYTES <= value < 2**24:
                    raise self._broken(ErrorCode.PROTOCOL_ERROR, "an impossible frame size")
                self.max_frame_bytes = value
        self.out.append(frame(FrameType.SETTINGS, ACK, 0, b""))
        self._listener.on_chore()
        self._listener.on_window()

    def _set_initial_window(self, value: int) -> None:
        if value > MAX_WINDOW_BYTES:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "an impossible window")
        change = value - self._initial_send_window
        self._initial_send_window = value
        for stream in self.streams.values():
            stream.send_window += change  # may be negative, until the peer sends window updates
            if stream.send_window > MAX_WINDOW_BYTES:
                raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "a window grew too large")

    def _push_promise(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise self._broken(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._expect_length(payload, 8)
        if stream_id:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a ping on a stream")
        if flags & ACK:
            self._listener.on_ping_answered(payload)
        else:
            self.out.append(frame(FrameType.PING, ACK, 0, payload))
            self._listener.on_chore()

    def _goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or len(payload) < TWO_NUMBERS.size:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a GOAWAY that cannot be read")
        self._listener.on_goaway(TWO_NUMBERS.unpack_from(payload)[1])

    def _window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._expect_length(payload, 4)
        growth = NUMBER.unpack(payload)[0] & MAX_WINDOW_BYTES
        if not growth:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
        if not stream_id:
            self._send_window += growth
            if self._send_window > MAX_WINDOW_BYTES:
                raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "the window grew too large")
            self._listener.on_window()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self._was_opened(stream_id):
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "a window of no stream")
            return
        stream.send_window += growth
        if stream.send_window <= MAX_WINDOW_BYTES:
            stream.on_window()
        else:
            self._fail_stream(stream, ErrorCode.FLOW_CONTROL_ERROR)

    def _ignore(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._listener.on_chore()

    # Both

    def _was_opened(self, stream_id: int) -> bool:
        return bool(stream_id & 1) and stream_id <= self._last_stream_id

    def _end_input(self, stream: Http2Stream) -> None:
        if stream.input_closed:
            return  # the last piece of content caused a reset of the stream
        stream.input_closed = True
        if stream.output_closed:
            self.streams.pop(stream.stream_id, None)
        stream.on_end()

    def _close(self, stream: Http2Stream) -> None:
        stream.input_closed = stream.output_closed = True
        self.streams.pop(stream.stream_id, None)

    def _fail_stream(self, stream: Http2Stream, code: ErrorCode) -> None:
        self.reset(stream, code)
        stream.on_reset()

    def _send_reset(self, stream_id: int, code: ErrorCode) -> None:
        self.out.append(frame(FrameType.RST_STREAM, 0, stream_id, NUMBER.pack(code)))

    def _acknowledge_to_connection(self, count: int) -> None:
        self._credit += count
        if self._credit >= CONNECTION_WINDOW_BYTES // 4:
            self._receive_window += self._credit
            self._grow_window(0, self._credit)
            self._credit = 0

    def _grow_window(self, stream_id: int, count: int) -> None:
        self.out.append(frame(FrameType.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(count)))

    def _without_padding(self, payload: bytes) -> bytes:
        if not payload or payload[0] >= len(payload):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        return payload[1 : len(payload) - payload[0]]

    def _expect_length(self, payload: bytes, length: int) -> None:
        if len(payload) != length:
            raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "a frame of the wrong length")

    def _broken(self, code: ErrorCode, text: str) -> Http2Error:
        self.close(code)
        return Http2Error(text)


def _split_headers(stream_id: int, block: bytes, flags: int) -> Iterator[bytes]:
    """Split a block into frames of at most the size that every peer must accept."""
    pieces = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    yield frame(FrameType.HEADERS, flags, stream_id, pieces[0])
    for piece in pieces[1:-1]:
        yield frame(FrameType.CONTINUATION, 0, stream_id, piece)
    yield frame(FrameType.CONTINUATION, END_HEADERS, stream_id, pieces[-1])
