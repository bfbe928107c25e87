"""One end of a connection: sends whole frames, and bytes that are encrypted on the way."""

import asyncio
import errno
import socket
from collections.abc import Awaitable
from typing import TypeVar

from cryptography.exceptions import InvalidTag

from worker.config import KvTransferConfig
from worker.errors import ConfigError, KvTransferError
from worker.kv.wire import LENGTH_BYTES, Frame, Seal, Sent, Tag, body_size
from worker.types import KvSource

_BACKLOG = 128
_PIECE_BYTES = 1 << 22  # decrypted while the next is received
_CIPHER_ROOM = 15  # bytes that `update_into` wants behind what it writes
_T = TypeVar("_T")


class Channel:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, key: bytes
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._seal = Seal(key)

    async def send(self, frame: Sent) -> None:
        await self._loop.sock_sendall(self._connection, self._seal.encode(frame))

    async def receive(self, kind: type[Frame]) -> Frame:
        """Receive a frame of this kind. Raises `KvTransferError` for anything else."""
        prefix = memoryview(bytearray(LENGTH_BYTES))
        await self._fill(prefix)
        data = memoryview(bytearray(body_size(bytes(prefix))))
        await self._fill(data)
        return self._seal.decode(bytes(data), kind)

    async def send_data(self, data: memoryview) -> None:
        """Send bytes, each piece encrypted while the one before it is sent, and their tag."""
        cipher = self._seal.data_cipher().encryptor()
        sending: asyncio.Task[None] | None = None
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                sealed = await asyncio.to_thread(cipher.update, data[start : start + _PIECE_BYTES])
                if sending is not None:
                    await sending
                sending = asyncio.create_task(self._loop.sock_sendall(self._connection, sealed))
            if sending is not None:
                await sending
        finally:
            if sending is not None:
                sending.cancel()
        cipher.finalize()
        await self.send(Tag(cipher.tag))

    async def tag_of(self, data: memoryview) -> bytes:
        """Return the tag of bytes that are sent another way, unencrypted."""
        cipher = self._seal.data_cipher().encryptor()
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            await asyncio.to_thread(cipher.authenticate_additional_data, piece)
        cipher.finalize()
        return cipher.tag

    async def receive_data(self, size: int) -> memoryview:
        """Receive `size` bytes. Raises `KvTransferError` if they are damaged, or too few."""
        data = memoryview(bytearray(size + _CIPHER_ROOM))
        cipher = self._seal.data_cipher().decryptor()
        opening: asyncio.Task[int] | None = None
        for start in range(0, size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, size)
            await self._fill(data[start:end])
            if opening is not None:
                await opening
            into = data[start : end + _CIPHER_ROOM]
            work = asyncio.to_thread(cipher.update_into, data[start:end], into)
            opening = asyncio.create_task(work)
        if opening is not None:
            await opening
        try:
            cipher.finalize_with_tag((await self.receive(Tag)).tag)
        except (InvalidTag, ValueError) as error:  # ValueError: it is too short for a tag
            raise KvTransferError("the bytes were damaged on the way") from error
        return data[:size]

    async def while_open(self, work: Awaitable[_T]) -> _T:
        """Return the result of `work`. Raises `KvTransferError` if the other end hangs up first."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.create_task(self._fill(memoryview(bytearray(1))))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                leaving.result()
                raise KvTransferError("the other end speaks out of turn")
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _fill(self, data: memoryview) -> None:
        while data:
            size = await self._loop.sock_recv_into(self._connection, data)
            if not size:
                raise KvTransferError("the other end hung up: it stopped, or it has another key")
            data = data[size:]


async def connected(loop: asyncio.AbstractEventLoop, source: KvSource) -> socket.socket:
    connection = socket.socket(_family(source.host), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, (source.host, source.port))
    except BaseException:
        connection.close()
        raise
    return connection


def new_bell() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening(config: KvTransferConfig) -> socket.socket:
    listener = socket.socket(_family(config.kv_ip), socket.SOCK_STREAM)
    try:
        # A restarted engine takes its port back while old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.kv_ip, config.kv_port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        where = f"kv_ip {config.kv_ip} and kv_port {config.kv_port}"
        fix = "; kv_port 0 is any free one" if error.errno == errno.EADDRINUSE else ""
        text = f"--kv-transfer-config: cannot listen on {where}: {error.strerror}{fix}"
        raise ConfigError(text) from error
    return listener
