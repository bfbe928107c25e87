"""What an HTTP/2 engine knows of one open stream."""

from __future__ import annotations

from picker.rpc.http2 import STREAM_WINDOW_BYTES


class OpenStream:
    """What either side may still send, in bytes. Owned by the engine."""

    __slots__ = ("credit", "input_closed", "output_closed", "receive_window", "send_window")

    def __init__(self, send_window: int) -> None:
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW_BYTES
        self.credit = 0  # acknowledged, and not yet given back to the peer
        self.input_closed = False
        self.output_closed = False
