"""A stream of the pump on a call that is two queues in place of a connection."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.server import processing
from picker.rpc.calls import Abort, RpcError, Status

HEADERS = pb.ProcessingRequest(request_headers=pb.HttpHeaders()).SerializeToString()
BODY = pb.ProcessingRequest(
    request_body=pb.HttpBody(body=b"{}", end_of_stream=True)
).SerializeToString()
TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
RESPONSE_HEADERS = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()
RESPONSE_END = pb.ProcessingRequest(
    response_body=pb.HttpBody(body=b"out", end_of_stream=True)
).SerializeToString()
LARGE = object()  # a message that finds no room


class Wire:
    """The test plays the proxy; like a connection, it waits until the receiver's tasks are over."""

    def __init__(self) -> None:
        self.outbound: asyncio.Queue[bytes] = asyncio.Queue()
        self.receiver: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    def serve(self, director: Any, settings: StreamSettings, streams: Any = None) -> None:
        self.receiver = processing(director, settings, streams)(self, {})  # type: ignore[arg-type]

    # What the receiver does

    def send(self, message: bytes) -> None:
        if not self.ended.done():
            self.outbound.put_nowait(message)

    def end(self, status: Status = Status.OK, text: str = "") -> None:
        if not self.ended.done():
            if status is Status.OK:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(RpcError(status, text))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What the proxy does

    def play(self, *messages: Any) -> None:
        """None is the orderly end, `LARGE` a message that finds no room."""
        for message in messages:
            if self.ended.done():
                return
            if message is None:
                self.receiver.end_of_messages()
            elif message is LARGE:
                self.receiver.refuses_large_message()
            else:
                self.receiver.message(message)

    async def abort(self, why: Abort) -> None:
        if not self.ended.done():
            self.receiver.abort(why)
            self.ended.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def reply(self) -> str:
        message = pb.ProcessingResponse.FromString(await self.outbound.get())
        return str(message.WhichOneof("response"))


@asynccontextmanager
async def stream(director: Any) -> AsyncIterator[Wire]:
    wire = Wire()
    wire.serve(director, StreamSettings(max_body_bytes=1000))
    try:
        yield wire
    finally:
        await wire.abort(Abort.CANCELLED)
