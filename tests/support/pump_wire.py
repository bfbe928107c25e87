"""A stream of the pump over two queues in place of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from picker.errors import RefusedError
from picker.extproc.pump import serve_stream
from picker.extproc.request_phase import Limits

HEADERS = pb.ProcessingRequest(request_headers=pb.HttpHeaders()).SerializeToString()
BODY = pb.ProcessingRequest(
    request_body=pb.HttpBody(body=b"{}", end_of_stream=True)
).SerializeToString()
TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
RESPONSE_HEADERS = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()
RESPONSE_END = pb.ProcessingRequest(
    response_body=pb.HttpBody(body=b"out", end_of_stream=True)
).SerializeToString()


class Wire:
    """Two queues in place of a connection; `None` is the proxy's orderly end, a refusal stands for
    a message that finds no room.
    """

    def __init__(self) -> None:
        self.inbound: asyncio.Queue[bytes | RefusedError | None] = asyncio.Queue()
        self.outbound: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()
        self._handed_out = False

    async def read(self) -> bytes | None:
        """The next message of the proxy; asking for it means the one before is dealt with."""
        if self._handed_out:
            self.inbound.task_done()
        message = await self.inbound.get()
        self._handed_out = True
        if isinstance(message, RefusedError):
            raise message
        if message is None:
            self.closed.set()
        return message

    async def write(self, message: bytes) -> None:
        """A message to the proxy."""
        await self.outbound.put(message)

    def send(self, *messages: bytes | RefusedError | None) -> None:
        """Play the proxy."""
        for message in messages:
            self.inbound.put_nowait(message)

    async def reply(self) -> str:
        """The kind of the next reply."""
        message = pb.ProcessingResponse.FromString(await self.outbound.get())
        return str(message.WhichOneof("response"))


@asynccontextmanager
async def stream(
    wire: Wire, director: Any, *, stopping: bool = False
) -> AsyncIterator[asyncio.Task[None]]:
    """A running stream; whatever the test leaves of it is cancelled."""
    serving = serve_stream(
        wire.read,
        wire.write,
        director,
        limits=Limits(max_body_bytes=1000),
        is_stopping=lambda: stopping,
    )
    task = asyncio.create_task(serving)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
