"""A client of endpoint discovery without a line: what it writes is read at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from picker.rpc.calls import Method, RpcError

PATIENCE_SECONDS = 60.0


class XdsCall:
    """One call of a method."""

    def __init__(self, method: Method, response: Any) -> None:
        self._response = response
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._responses: asyncio.Queue[bytes] = asyncio.Queue()
        self.task = asyncio.create_task(method(self._requests.get, self._responses.put))

    def send(self, message: Any) -> None:
        """Write a request, or bytes that are none."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._requests.put_nowait(data)

    def end(self) -> None:
        """Close the client's side."""
        self._requests.put_nowait(None)

    async def receive(self) -> Any:
        """The next response."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return self._response.FromString(await self._responses.get())

    async def failure(self) -> RpcError:
        """What the server ends the call with, at the latest when the client has said all."""
        self.end()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(RpcError) as raised:
                await self.task
        return raised.value

    async def silence(self) -> None:
        """Return once nothing is left to do; fail if something was said."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert self._responses.empty()


@asynccontextmanager
async def calling(method: Method, response: Any) -> AsyncIterator[XdsCall]:
    """A call that ends in order, unless its failure was looked at."""
    call = XdsCall(method, response)
    try:
        yield call
        if not call.task.done():
            call.end()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.task
    finally:
        call.task.cancel()


def assignments(response: Any) -> dict[str, list[str]]:
    """Cluster → `ip:port` of its endpoints, of a response of either variant."""
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
