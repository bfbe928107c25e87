"""The numbers of HTTP/2, and the encoding of frames. Source: RFC 9113."""

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW_BYTES = 65_535
MAX_FRAME_BYTES = 16_384  # of each side, until its settings say otherwise
MAX_WINDOW_BYTES = 2**31 - 1  # and the largest number of a stream

FRAME_HEADER = Struct(">BHBBI")  # 24 bits of length, type, flags, stream
NUMBER = Struct(">I")
TWO_NUMBERS = Struct(">II")

# Flags; the meaning of the first depends on the type of the frame.
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    length = len(payload)
    return FRAME_HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id) + payload


def goaway(last_stream_id: int, code: ErrorCode) -> bytes:
    """Encode the end of a connection: streams above `last_stream_id` were not served."""
    return frame(FrameType.GOAWAY, 0, 0, TWO_NUMBERS.pack(last_stream_id, code))


def graceful_goaway() -> bytes:
    """Encode a request to open no more streams; those under way continue."""
    return goaway(MAX_WINDOW_BYTES, ErrorCode.NO_ERROR)
