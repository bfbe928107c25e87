"""A picker of several real processes, clients with connections of their own, and what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from ext_proc_stream import PATIENCE_SECONDS, GatewayStream, completion, destination_of
from metrics_pages import Pod, serving
from whole_picker import PolicyObject, WholePicker, until, write_endpoints

from picker.cli.options import Options, Ports
from picker.processes.supervisor import Supervisor

# A connection of its own for each channel.
ALONE = [("grpc.use_local_subchannel_pool", 1)]


@dataclass
class Connection:
    """A proxy's connection to one of the processes, and its streams."""

    channel: grpc.aio.Channel
    streams: list[GatewayStream] = field(default_factory=list)

    async def route(self, prompt: str = "test", headers: Mapping[str, str] | None = None) -> str:
        """Open a stream with a request and leave it open; where the request goes."""
        stream = GatewayStream(self.channel)
        self.streams.append(stream)
        return destination_of(await stream.ask(completion(prompt=prompt), headers))

    async def ask(self, prompt: str = "test", headers: Mapping[str, str] | None = None) -> str:
        """One request, of which nobody awaits the response; where it goes."""
        destination = await self.route(prompt, headers)
        assert await self.end() is grpc.StatusCode.OK
        return destination

    async def end(self) -> grpc.StatusCode:
        """End the stream that was opened last; its status."""
        stream = self.streams.pop()
        with suppress(grpc.aio.AioRpcError):
            await stream.rest()
        return await stream.call.code()


@dataclass
class Processes(WholePicker):
    """A picker of several processes."""

    address: str = ""

    @property
    def supervisor(self) -> Supervisor:
        """The process that watches the pool: this one."""
        supervisor: Any = self.picker
        assert isinstance(supervisor, Supervisor)
        return supervisor

    @property
    def pids(self) -> list[int]:
        """The processes that serve."""
        return [one.pid for one in self.supervisor._fleet.members]

    async def all_serve(self, size: int) -> None:
        """Return once so many serve."""

        async def do_they() -> bool:
            return len(self.pids) == size

        await until(do_they)

    async def counted(self) -> list[float]:
        """How many requests each process has routed."""
        name = "llm_d_epp_request_total"
        told = [await one.tell() for one in self.supervisor._fleet.members]
        return [sum(n for _, n in one.counted[name]) for one in told if one is not None]  # type: ignore[misc]

    @asynccontextmanager
    async def connected(self, count: int) -> AsyncIterator[list[Connection]]:
        """So many connections; the system decides which process takes each."""
        async with AsyncExitStack() as stack:
            connections = []
            for _ in range(count):
                channel = grpc.aio.insecure_channel(self.address, options=ALONE)
                connections.append(Connection(await stack.enter_async_context(channel)))
            yield connections
            for one in connections:
                for stream in one.streams:
                    stream.call.cancel()

    async def connected_to_each(self, connections: Sequence[Connection]) -> list[Connection]:
        """One of the connections to each process, in the order of the processes."""
        found: dict[int, Connection] = {}
        for connection in connections:
            before = await self.counted()
            await connection.ask()
            after = await self.counted()
            (index,) = [i for i, count in enumerate(after) if count > before[i]]
            found.setdefault(index, connection)
        assert len(found) == len(self.pids), "no connection came to one of them"
        return [found[index] for index in sorted(found)]


@asynccontextmanager
async def processes(
    folder: Path,
    backends: Sequence[Pod],
    *,
    policies: Sequence[PolicyObject] = (),
    **changes: Any,
) -> AsyncIterator[Processes]:
    """Two processes in front of `backends`, from ready to end."""
    async with AsyncExitStack() as stack:
        for pod in backends:
            await stack.enter_async_context(serving(pod))
        path = folder / "endpoints.yaml"
        write_endpoints(path, backends, policies)
        chosen: dict[str, Any] = {
            "endpoints_file": path,
            "bind_address": "127.0.0.1",
            "grpc_port": 0,
            "grpc_health_port": 0,
            "metrics_port": 0,
            "processes": 2,
        }
        supervisor = Supervisor(Options(**chosen | changes))
        started: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(supervisor.run(started.set_result))
        waited: list[asyncio.Future[Any]] = [started, task]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        ports = started.result()
        host = changes.get("bind_address")
        address = f"127.0.0.1:{ports.grpc}" if host is None else host
        http = await stack.enter_async_context(aiohttp.ClientSession())
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        anything: Any = supervisor
        running = Processes(
            anything, ports, backends, path, channel, http, address, policies=policies
        )
        try:
            await until(running.has_read_pages)
            yield running
        finally:
            supervisor.stop()
            supervisor.stop()
            await asyncio.wait_for(task, PATIENCE_SECONDS)
