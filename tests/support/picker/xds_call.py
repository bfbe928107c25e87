"""A client of endpoint discovery without a socket: its writes are read at once."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from picker.rpc.call import Served
from picker.rpc.calls import RpcError, Status

PATIENCE_SECONDS = 120.0


class _Line:
    gone = is_congested = reads_on = False
    ending = None

    def __init__(self) -> None:
        self.responses: asyncio.Queue[bytes] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.send = self.responses.put_nowait

    def end(self, status: Status = Status.OK, text: str = "") -> None:
        if status is Status.OK:
            self.ended.set_result(None)
        elif not self.ended.done():
            self.ended.set_exception(RpcError(status, text))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.task = asyncio.create_task(coroutine)
        return self.task

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading


class XdsCall:
    def __init__(self, served: Served, response: Any) -> None:
        self._response, self._line = response, _Line()
        self._receiver = served(self._line, {})  # type: ignore[arg-type]
        self.task = self._line.task
        self.ended = self._line.ended

    def send(self, message: Any) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._receiver.message(data)

    def end(self) -> None:
        self._receiver.end_of_messages()

    async def receive(self) -> Any:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return self._response.FromString(await self._line.responses.get())

    async def failure(self) -> RpcError:
        self.end()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(RpcError) as raised:
                await self.ended
        return raised.value

    async def silence(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        assert self._line.responses.empty()


@asynccontextmanager
async def calling(served: Served, response: Any) -> AsyncIterator[XdsCall]:
    """Check the regular end of the call, unless the test awaits its failure."""
    call = XdsCall(served, response)
    try:
        yield call
        if not call.task.done():
            call.end()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.ended
    finally:
        call.task.cancel()


def assignments(response: Any) -> dict[str, list[str]]:
    found = {}
    for one in response.resources:
        packed = one.resource if isinstance(one, discovery_pb2.Resource) else one
        message = endpoint_pb2.ClusterLoadAssignment.FromString(packed.value)
        members = [member.endpoint for group in message.endpoints for member in group.lb_endpoints]
        found[message.cluster_name] = [
            f"{one.address.socket_address.address}:{one.address.socket_address.port_value}"
            for one in members
        ]
    return found
