"""Sockets that engines are heard through, and messages as they come out of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash
import zmq
import zmq.asyncio

NUMBER_BYTES = 8
_END_NUMBERS = 2**63  # from here on they are negative, which no message is
_MAX_UNREAD = 100_000  # messages that ZMQ keeps while a replay is under way
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_MAX_FRAME_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Message:
    """Topic, number and payload. A replayed one may come without a topic (None)."""

    topic: str | None
    number: int
    payload: bytes


def read_message(frames: Sequence[bytes]) -> Message | None:
    """The message in three frames, or two without the topic; None for any others."""
    if not 2 <= len(frames) <= 3 or len(frames[-2]) != NUMBER_BYTES:
        return None
    number = int.from_bytes(frames[-2], "big")
    if number >= _END_NUMBERS:
        return None
    topic = frames[0].decode(errors="replace") if len(frames) == 3 else None
    return Message(topic, number, frames[-1])


def digest_of(payload: bytes) -> bytes:
    """What to tell a payload by, without keeping it."""
    return xxhash.xxh3_128_digest(payload)


@contextmanager
def open_socket(
    context: zmq.asyncio.Context, kind: int, address: str
) -> Iterator[zmq.asyncio.Socket]:
    """A socket that keeps trying to connect and notices when the other side is gone."""
    socket = context.socket(kind)
    try:
        socket.set_hwm(_MAX_UNREAD)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        yield socket
    finally:
        socket.close(linger=0)
