"""An HTTP/2 client without a socket, joined to a connection of gRPC calls."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from picker.rpc.call import Served, streaming
from picker.rpc.calls import Method, Read, Write
from picker.rpc.connection import GrpcConnection
from picker.rpc.framing import PREFIX
from picker.rpc.options import ServerOptions

PATH = "/a.Service/Method"
REQUEST = [
    *((":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", PATH)),
    *(("te", "trailers"), ("content-type", "application/grpc")),
]


async def turns(count: int) -> None:
    """Let the event loop run what is ready, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def prefix(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message))


class GracefulHttp2(H2Connection):
    """The library itself would stop after a GOAWAY that covers all streams."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> Any:
        if frame.last_stream_id == 2**31 - 1:
            return [], []
        return super()._receive_goaway_frame(frame)


class BufferTransport(asyncio.Transport):
    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written: list[bytes] = []
        self.unread_bytes = 0
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close


class Peer:
    def __init__(
        self,
        methods: Mapping[str, Method],
        max_message_bytes: int = 2**20,
        served: Mapping[str, Served] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.gone: list[GrpcConnection] = []
        table = {path: streaming(method) for path, method in methods.items()} | dict(served)
        self.connection = GrpcConnection(
            {path.encode(): one for path, one in table.items()},
            ServerOptions(max_message_bytes=max_message_bytes, **options),
            lambda connection: None,
            self.gone.append,
        )
        self.transport = BufferTransport(self.connection)
        self.http2 = GracefulHttp2(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.seen: list[events.Event] = []

    def connect(self, window_bytes: int = 65_535) -> None:
        window = {SettingCodes.INITIAL_WINDOW_SIZE: window_bytes}
        self.http2.local_settings = Settings(client=True, initial_values=window)
        self.http2.initiate_connection()
        self.connection.connection_made(self.transport)
        self.push()

    def push(self) -> None:
        data = self.http2.data_to_send()
        if data:
            self.connection.data_received(data)

    def call(self, *messages: bytes, end: bool = False, **changes: str) -> int:
        stream_id = self.http2.get_next_available_stream_id()
        headers = [(name, changes.get(name.strip(":"), value)) for name, value in REQUEST]
        self.http2.send_headers(stream_id, headers, end_stream=end and not messages)
        for message in messages:
            self.http2.send_data(stream_id, prefix(message) + message)
        if end and messages:
            self.http2.end_stream(stream_id)
        self.push()
        return stream_id

    async def settle(self) -> None:
        self.push()
        for _ in range(10):
            await asyncio.sleep(0)
            data = b"".join(self.transport.written)
            self.transport.written.clear()
            if data:
                self.seen += self.http2.receive_data(data)
                self.push()

    def data(self, stream_id: int) -> bytes:
        return b"".join(
            event.data
            for event in self.seen
            if isinstance(event, events.DataReceived) and event.stream_id == stream_id
        )

    def fields(self, stream_id: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for event in self.seen:
            headers = (events.ResponseReceived, events.TrailersReceived)
            if isinstance(event, headers) and event.stream_id == stream_id:
                found |= dict(event.headers)
        return found

    def saw(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


def connected(*args: Any, **options: Any) -> Peer:
    peer = Peer(*args, **options)
    peer.connect()
    return peer


async def settled(*args: Any, **options: Any) -> Peer:
    peer = connected(*args, **options)
    await peer.settle()
    return peer


async def echo(read: Read, write: Write) -> None:
    while (message := await read()) is not None:
        await write(message)


class Held:
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, read: Read, write: Write) -> None:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("returned")


async def holding(*messages: bytes, **how: Any) -> tuple[Peer, Held, int]:
    held = Held()
    peer = connected({PATH: held})
    stream_id = peer.call(*messages, **how)
    await held.started.wait()
    return peer, held, stream_id
