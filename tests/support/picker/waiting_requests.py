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
    stream: GatewayStream
    said: asyncio.Task[list[Message]]

    @property
    def waits(self) -> bool:
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
    picker: WholePicker

    async def ask(self, headers: Mapping[str, str] | None = None, **more: Any) -> Waiter:
        stream = GatewayStream(self.picker.channel)
        said = asyncio.ensure_future(stream.ask(completion(), headers, **more))
        return Waiter(stream, said)

    async def serve(self, headers: Mapping[str, str] | None = None, **more: Any) -> Waiter:
        waiter = await self.ask(headers, **more)
        await waiter.destination()
        return waiter

    async def wait(
        self, number: int, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Waiter:
        waiter = await self.ask(headers, **more)
        await self.has_waiting(number)
        return waiter

    async def waiting(self) -> int:
        return int(await self.picker.series(WAITING) or 0)

    async def has_waiting(self, number: int) -> None:
        await until(self.waiting, lambda found: found == number)

    async def is_at_rest(self) -> None:
        await self.has_waiting(0)
        await until(self.picker.is_idle)
        assert not await self.picker.series(BYTES_WAITING)

    def use(self, text: str) -> None:
        self.picker.pool.config.apply(load_config(text.encode(), "changed.yaml"))


@asynccontextmanager
async def waiting_scene(
    folder: Path, text: str, endpoints: Sequence[Pod] | None = None, **changes: Any
) -> AsyncIterator[Scene]:
    found = pods(page()) if endpoints is None else endpoints
    async with whole_picker(folder, found, text, **changes) as picker:
        yield Scene(picker)


def headers_of(messages: Sequence[Message]) -> dict[str, str]:
    options = messages[0].immediate_response.headers.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in options}


def status_of(messages: Sequence[Message]) -> int:
    return int(messages[0].immediate_response.status.code)
