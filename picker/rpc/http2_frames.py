"""HTTP/2 as far as a gRPC server behind a proxy needs it, made to cost little.

Theory of operation
-------------------
`receive` cuts bytes into frames and hands each to one method by its type. A stream is a small
object with its two windows; it exists from its HEADERS until both sides are closed or one resets
it, and a number below the highest one seen that has no object is a closed stream.

Header blocks: a proxy opens thousands of streams with the same fields, which compression turns into
the same bytes each time. A block that inserts nothing into the dynamic table means the same as long
as nothing else changes the table, so such blocks are remembered by their bytes, and all are
forgotten as soon as a block does insert. What we send uses no table at all.

Errors: what breaks the rules of the connection raises `Http2Error`, with the GOAWAY queued; what
concerns one stream resets that stream. PRIORITY, unknown frames and unknown settings are ignored.
Server push does not exist here.

`http2_library` is the slow twin: the tests of the connection run on both.
Source: RFC 9113, RFC 7541.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from hpack import Decoder, HPACKError, OversizedHeaderListError

from picker.rpc.http2 import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_BYTES,
    STREAM_WINDOW_BYTES,
    Fields,
    Http2Error,
    Http2Listener,
)
from picker.rpc.http2_headers import HeaderBlocks, encode_fields
from picker.rpc.http2_streams import OpenStream
from picker.rpc.http2_wire import (
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
    Kind,
    Setting,
    frame,
    header_frames,
)

MAX_CONTINUATIONS = 64
_SETTING = Struct(">HI")


class FrameEngine:
    """Implements `Http2Engine`. Owns the protocol state of one connection."""

    def __init__(self, listener: Http2Listener) -> None:
        self._listener = listener
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._rest = b""
        self._out: list[bytes] = []
        self._streams: dict[int, OpenStream] = {}
        self._last_stream_id = 0
        self._prefaced = self._settled = False
        self._send_window = DEFAULT_WINDOW_BYTES
        self._initial_send_window = DEFAULT_WINDOW_BYTES
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._credit = 0
        self._headers = HeaderBlocks(Decoder(max_header_list_size=MAX_HEADER_LIST_BYTES))
        self._block: list[bytes] | None = None  # of HEADERS that go on in CONTINUATION
        self._block_stream_id = self._block_flags = self._block_bytes = 0
        self._receivers: tuple[Callable[[int, int, bytes], None], ...] = (
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
        )

    @property
    def has_met_peer(self) -> bool:
        """Whether the peer's preface and settings have come."""
        return self._settled

    # Out

    def start(self) -> None:
        """Queue the settings and open the connection's window."""
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, MAX_CONCURRENT_STREAMS),
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
            (Setting.MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST_BYTES),
        )
        payload = b"".join(_SETTING.pack(*setting) for setting in settings)
        self._out.append(frame(Kind.SETTINGS, 0, 0, payload))
        self._grow_window(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)

    def data_to_send(self) -> bytes:
        """What is to be sent since the last call."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def window(self, stream_id: int) -> int:
        """How many bytes of content may be sent on a stream now; 0 for one that is closed."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return 0
        return min(stream.send_window, self._send_window)

    def send_headers(self, stream_id: int, fields: Fields, end_stream: bool = False) -> None:
        """Queue a header block; ignored on a closed stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._out.append(header_frames(stream_id, encode_fields(fields), end_stream))
        if end_stream:
            stream.output_closed = True
            self._close_if_done(stream_id, stream)

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Queue content, at most `max_frame_bytes` and what `window` allows."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        length = len(data)
        stream.send_window -= length
        self._send_window -= length
        self._out.append(FRAME_HEADER.pack(length >> 16, length & 0xFFFF, 0, 0, stream_id))
        self._out.append(data)

    def acknowledge(self, stream_id: int, count: int) -> None:
        """`count` flow-controlled bytes were dealt with; the stream may be closed."""
        self._credit += count
        if self._credit >= CONNECTION_WINDOW_BYTES // 4:
            self._receive_window += self._credit
            self._grow_window(0, self._credit)
            self._credit = 0
        stream = self._streams.get(stream_id)
        if stream is None or stream.input_closed:
            return
        stream.credit += count
        if stream.credit >= STREAM_WINDOW_BYTES // 4:
            stream.receive_window += stream.credit
            self._grow_window(stream_id, stream.credit)
            stream.credit = 0

    def reset(self, stream_id: int) -> None:
        """Tell the peer to send no more on a stream (NO_ERROR)."""
        self._reset(stream_id, ErrorCode.NO_ERROR)

    def ping(self, data: bytes) -> None:
        """Ask for `on_ping_answered` with these eight bytes."""
        self._out.append(frame(Kind.PING, 0, 0, data))

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Queue the last GOAWAY."""
        self._say_goodbye(code)

    # In

    def receive(self, data: bytes) -> None:
        """Take bytes of the peer, cut anywhere. Raises `Http2Error`."""
        buffer = self._rest + data if self._rest else data
        at = 0
        if not self._prefaced:
            at = self._take_preface(buffer)
            if not at:
                return
        end = len(buffer)
        receivers, unpack = self._receivers, FRAME_HEADER.unpack_from
        while end - at >= 9:
            high, low, kind, flags, stream_id = unpack(buffer, at)
            start = at + 9
            stop = start + (high << 16 | low)
            if stop - start > MAX_FRAME_BYTES:
                raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "a frame is too long")
            if stop > end:
                break
            at = stop
            if not self._settled and kind != Kind.SETTINGS:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "settings must come first")
            if self._block is not None and kind != Kind.CONTINUATION:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
            receive = receivers[kind] if kind < len(receivers) else self._ignore
            receive(stream_id & MAX_WINDOW_BYTES, flags, buffer[start:stop])
        self._rest = buffer[at:]

    def _take_preface(self, buffer: bytes) -> int:
        """The length of the preface, 0 while it is not whole."""
        seen = buffer[: len(PREFACE)]
        if not PREFACE.startswith(seen):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self._prefaced = len(seen) == len(PREFACE)
        self._rest = b"" if self._prefaced else buffer
        return len(PREFACE) if self._prefaced else 0

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._receive_window -= length
        if self._receive_window < 0:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window")
        if flags & PADDED:
            payload = self._without_padding(payload)
        stream = self._streams.get(stream_id)
        if stream is None or stream.input_closed:
            self._stray(stream_id, stream)
            self.acknowledge(stream_id, length)
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "more data than a stream's window")
        if length:
            self._listener.on_data(stream_id, payload, length)
        elif not flags & END_STREAM:
            self._listener.on_chore()
        if flags & END_STREAM:
            self._end_input(stream_id, stream)

    def _stray(self, stream_id: int, stream: OpenStream | None) -> None:
        """Content where there should be none: of a stream we closed it was on its way."""
        if stream is not None:
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
            self._listener.on_reset(stream_id)
        elif not self._was_opened(stream_id):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "data on a stream that is not open")

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
            headers = self._headers.decode(block)
        except OversizedHeaderListError:
            raise self._broken(ErrorCode.ENHANCE_YOUR_CALM, "the headers are too long") from None
        except (HPACKError, ValueError) as error:
            text = f"a header block that cannot be read: {error}"
            raise self._broken(ErrorCode.COMPRESSION_ERROR, text) from error
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.input_closed or not flags & END_STREAM:
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "headers within a stream")
            self._end_input(stream_id, stream)
            return
        if self._was_opened(stream_id):
            return  # trailers of a stream we have closed
        if not stream_id & 1:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a stream of the wrong parity")
        self._last_stream_id = stream_id
        if len(self._streams) >= MAX_CONCURRENT_STREAMS:
            self._reset(stream_id, ErrorCode.REFUSED_STREAM)
            self._listener.on_chore()
            return
        stream = self._streams[stream_id] = OpenStream(self._initial_send_window)
        self._listener.on_request(stream_id, headers)
        if flags & END_STREAM:
            self._end_input(stream_id, stream)

    def _rst_stream(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._expect_length(payload, 4)
        if not self._was_opened(stream_id):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a reset of a stream that is not open")
        if self._streams.pop(stream_id, None) is not None:
            self._listener.on_reset(stream_id)

    def _settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._settled = True
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
        self._out.append(frame(Kind.SETTINGS, ACK, 0, b""))
        self._listener.on_chore()
        self._listener.on_window(0)

    def _set_initial_window(self, value: int) -> None:
        if value > MAX_WINDOW_BYTES:
            raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "an impossible window")
        change = value - self._initial_send_window
        self._initial_send_window = value
        for stream in self._streams.values():
            stream.send_window += change
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
            self._out.append(frame(Kind.PING, ACK, 0, payload))
            self._listener.on_chore()

    def _goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or len(payload) < TWO_NUMBERS.size:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a goodbye that cannot be read")
        self._listener.on_goodbye(TWO_NUMBERS.unpack_from(payload)[1])

    def _window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._expect_length(payload, 4)
        growth = NUMBER.unpack(payload)[0] & MAX_WINDOW_BYTES
        if not growth:
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
        if not stream_id:
            self._send_window += growth
            if self._send_window > MAX_WINDOW_BYTES:
                raise self._broken(ErrorCode.FLOW_CONTROL_ERROR, "the window grew too large")
            self._listener.on_window(0)
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self._was_opened(stream_id):
                raise self._broken(ErrorCode.PROTOCOL_ERROR, "a window of no stream")
            return
        stream.send_window += growth
        if stream.send_window <= MAX_WINDOW_BYTES:
            self._listener.on_window(stream_id)
        else:
            self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            self._listener.on_reset(stream_id)

    def _ignore(self, stream_id: int, flags: int, payload: bytes) -> None:
        """A frame that asks for nothing."""
        self._listener.on_chore()

    # Both

    def _was_opened(self, stream_id: int) -> bool:
        return bool(stream_id & 1) and stream_id <= self._last_stream_id

    def _end_input(self, stream_id: int, stream: OpenStream) -> None:
        stream.input_closed = True
        self._close_if_done(stream_id, stream)
        self._listener.on_end(stream_id)

    def _close_if_done(self, stream_id: int, stream: OpenStream) -> None:
        if stream.input_closed and stream.output_closed:
            self._streams.pop(stream_id, None)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._streams.pop(stream_id, None)
        self._out.append(frame(Kind.RST_STREAM, 0, stream_id, NUMBER.pack(code)))

    def _grow_window(self, stream_id: int, count: int) -> None:
        self._out.append(frame(Kind.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(count)))

    def _without_padding(self, payload: bytes) -> bytes:
        if not payload or payload[0] >= len(payload):
            raise self._broken(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        return payload[1 : len(payload) - payload[0]]

    def _expect_length(self, payload: bytes, length: int) -> None:
        if len(payload) != length:
            raise self._broken(ErrorCode.FRAME_SIZE_ERROR, "a frame of the wrong length")

    def _broken(self, code: ErrorCode, text: str) -> Http2Error:
        self._say_goodbye(code)
        return Http2Error(text)

    def _say_goodbye(self, code: ErrorCode) -> None:
        self._out.append(frame(Kind.GOAWAY, 0, 0, TWO_NUMBERS.pack(self._last_stream_id, code)))
