"""A sidecar between workers like vLLM's, on real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

from base.tracing import Tracing
from fleet.command_lines import parser_of
from fleet.proxy.forward import runner_of, with_traces
from fleet.proxy.sidecar import Sidecar, SidecarOptions
from tests.support.web_server import Server, listening

SOURCE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "Zwölf"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.25,
}
CHAT = "/v1/chat/completions"
CHUNKS = (b'data: {"a":1}\n\n', b"data: [DONE]\n\n")


async def keeps(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": SOURCE})


async def streams(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Worker": "w"})
    await response.prepare(request)
    for chunk in CHUNKS:
        await response.write(chunk)
    return response


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"message": "no"}, status=500)


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def dies(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


class House:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.prefiller, self.decoder = Server(keeps), Server(streams)
        self.sidecar_stack = AsyncExitStack()

    async def start(self, tracing: Tracing | None = None, **options: Any) -> House:
        await self._stack.enter_async_context(self.prefiller.serving())
        await self._stack.enter_async_context(self.decoder.serving())
        flags = ["--decoder", f"http://{self.decoder.address}", "--drain-timeout", "1"]
        given = vars(parser_of("sidecar").parse_args(flags))
        await self._stack.enter_async_context(self.sidecar_stack)
        running = Sidecar.running(SidecarOptions(**{**given, **options}))
        sidecar = await self.sidecar_stack.enter_async_context(running)
        handle = with_traces(sidecar.handle, tracing or Tracing())
        runner = runner_of(handle, 1.0, reads=True)
        self.url = f"http://127.0.0.1:{await listening(runner)}"
        self._stack.push_async_callback(runner.cleanup)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def ask(
        self, body: Any = ASKED, path: str = CHAT, prefiller: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        named = {"x-prefiller-host-port": prefiller or self.prefiller.address, **headers}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=named) as answer:
            return answer.status, await answer.read()
