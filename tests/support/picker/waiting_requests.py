"""A whole picker whose pool takes few requests at a time, and requests that wait for it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picker.config.load import load_config
from tests.support.picker.ext_proc_stream import GatewayStream, Message, completion, destination_of
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker
from tests.support.waiting import until

FAIRNESS, OBJECTIVE = "x-llm-d-inference-fairness-id", "x-llm-d-inference-objective"
WAITING = "llm_d_epp_flow_control_queue_size"
BYTES_WAITING = "llm_d_epp_flow_control_queue_bytes"


def config(section: str = "", plugins: str = "", at_once: int = 1, gate: bool = True) -> str:
    """Flow control over endpoints that take `at_once` requests each; `section` is its own."""
    gates = "featureGates: [flowControl]\n" if gate else ""
    return f"""{HEAD}{gates}
plugins:
- {{type: queue-scorer}}
- {{type: concurrency-detector, parameters: {{maxConcurrency: {at_once}}}}}
{plugins}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
flowControl:
  saturationDetector: {{pluginRef: concurrency-detector}}
{section}
"""


@dataclass
class Waiter:
    """A request without an outcome so far."""

    stream: GatewayStream
    said: asyncio.Task[list[Message]]

    @property
    def waits(self) -> bool:
        """Return whether the request has no reply so far."""
        return not self.said.done()

    async def answer(self) -> list[Message]:
        return await self.said

    async def destination(self) -> str:
        return destination_of(await self.said)

    async def end(self) -> None:
        await self.stream.respond([b"{}"])
        assert await self.stream.rest() == []


@dataclass
class Scene:
    """The picker, and requests to it."""

    picker: WholePicker

    async def ask(self, headers: Mapping[str, str] | None = None, **more: Any) -> Waiter:
        """Send a request, which may be answered at once."""
        stream = GatewayStream(self.picker.channel)
        said = asyncio.ensure_future(stream.ask(completion(), headers, **more))
        return Waiter(stream, said)

    async def serve(self, headers: Mapping[str, str] | None = None, **more: Any) -> Waiter:
        """Send a request that is routed at once."""
        waiter = await self.ask(headers, **more)
        await waiter.destination()
        return waiter

    async def wait(
        self, number: int, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Waiter:
        """Send a request and return once it waits as the last of `number`."""
        waiter = await self.ask(headers, **more)
        await self.has_waiting(number)
        return waiter

    async def waiting(self) -> int:
        return int(await self.picker.series(WAITING) or 0)

    async def has_waiting(self, number: int) -> None:
        """Return once `number` requests wait."""
        await until(self.waiting, lambda found: found == number)

    async def is_at_rest(self) -> None:
        """Return once no request waits and no state remains."""
        await self.has_waiting(0)
        await until(self.picker.is_idle)
        assert not await self.picker.series(BYTES_WAITING)

    def use(self, text: str) -> None:
        """Apply another configuration."""
        self.picker.pool.config.apply(load_config(text.encode(), "changed.yaml"))


@asynccontextmanager
async def waiting_scene(
    folder: Path, text: str, endpoints: Sequence[Pod] | None = None, **changes: Any
) -> AsyncIterator[Scene]:
    """A picker with flow control, in front of one idle endpoint by default."""
    found = pods(page()) if endpoints is None else endpoints
    async with whole_picker(folder, found, text, **changes) as picker:
        yield Scene(picker)


def headers_of(messages: Sequence[Message]) -> dict[str, str]:
    """Return the headers of the picker's own answer."""
    options = messages[0].immediate_response.headers.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in options}


def status_of(messages: Sequence[Message]) -> int:
    """Return the status of the picker's own answer; 0 for other messages."""
    return int(messages[0].immediate_response.status.code)
