"""A real Envoy between echo workers and a scripted picker, all on free ports of this machine."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fleet.envoy.binary import ENVIRONMENT_VARIABLE, find_envoy
from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from tests.support.fleet.envoy_process import EnvoyProcess
from tests.support.local_ports import free_port
from tests.support.web_server import for_all_paths, runner_of

DESTINATION = "x-gateway-destination-endpoint"
LIMIT_SECONDS = 120.0


class EchoWorker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.requests: list[str] = []
        self.go_on = asyncio.Event()  # holds back the second half of /stream
        self.held: set[str] = set()  # paths that never get an answer
        self.status = 200  # of every answer but those to health checks
        self._runner: web.AppRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()

    @property
    def host_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._runner = runner_of(for_all_paths(self._answer))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for site in list(runner.sites):
            await site.stop()
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._transports.add(request.transport)
        size = len(await request.read())
        if request.path != "/health":
            self.requests.append(request.path_qs)
        if request.path in self.held:
            await asyncio.Event().wait()
        if request.path == "/stream":
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: first\n\n")
            await self.go_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = {"worker": self.name, "headers": headers, "size": size}
        return web.json_response(body, status=200 if request.path == "/health" else self.status)


@dataclass
class Answer:
    destination: str | None = None
    header: bool = True
    metadata: bool = True
    append: bool = False


@dataclass
class Seen:
    headers: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    ended: bool = False


class ScriptedPicker:
    def __init__(self) -> None:
        self.answer = Answer()
        self.port = free_port()
        self.streams: list[Seen] = []
        self.silent = False  # True: takes every message and answers none
        self._server: grpc.aio.Server | None = None

    @property
    def has_a_body(self) -> bool:
        return bool(self.streams) and "request_body" in self.streams[-1].messages

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ext_proc.ProcessingRequest.FromString,
            response_serializer=ext_proc.ProcessingResponse.SerializeToString,
        )
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        handlers = grpc.method_handlers_generic_handler(service, {"Process": process})
        self._server.add_generic_rpc_handlers((handlers,))
        servicer = health.aio.HealthServicer()
        await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def _process(self, requests, context):
        seen = Seen()
        self.streams.append(seen)
        body, buffered = b"", False
        try:
            async for message in requests:
                kind = message.WhichOneof("request")
                seen.messages.append(kind)
                if kind == "request_headers":
                    mode = message.protocol_config.request_body_mode
                    buffered = mode == processing_mode_pb2.ProcessingMode.BUFFERED
                    seen.headers = _named(message.request_headers.headers.headers)
                elif kind == "request_body":
                    body += message.request_body.body
                if not self.silent:
                    for reply in self._replies(message, body, buffered):
                        yield reply
        finally:
            seen.ended = True

    def _replies(
        self, message: ext_proc.ProcessingRequest, body: bytes, buffered: bool
    ) -> list[ext_proc.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            if message.request_headers.end_of_stream:
                return [self._routed()]
            return [ext_proc.ProcessingResponse(request_headers={})] if buffered else []
        if kind == "request_body":
            if not message.request_body.end_of_stream:
                return []
            routed = self._routed()
            if buffered:
                return [_at_body(routed)]
            return [routed, *_chunks(body)]
        return [ext_proc.ProcessingResponse(**{kind: {}})]

    def _routed(self) -> ext_proc.ProcessingResponse:
        answer = self.answer
        response = ext_proc.ProcessingResponse(request_headers={})
        if answer.destination is None:
            return response
        if answer.metadata:
            inner = struct_pb2.Struct()
            inner[DESTINATION] = answer.destination
            response.dynamic_metadata["envoy.lb"] = inner
        if answer.header:
            option = base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=DESTINATION, raw_value=answer.destination.encode()),
                append_action=base_pb2.HeaderValueOption.APPEND_IF_EXISTS_OR_ADD
                if answer.append
                else base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            common = response.request_headers.response
            common.header_mutation.set_headers.append(option)
            common.clear_route_cache = True
        return response


def _named(headers: Iterable[base_pb2.HeaderValue]) -> dict[str, str]:
    return {h.key: (h.raw_value or h.value.encode()).decode() for h in headers}


def _at_body(routed: ext_proc.ProcessingResponse) -> ext_proc.ProcessingResponse:
    moved = ext_proc.ProcessingResponse(request_body={})
    moved.dynamic_metadata.CopyFrom(routed.dynamic_metadata)
    moved.request_body.response.CopyFrom(routed.request_headers.response)
    return moved


def _chunks(body: bytes, size: int = 62_000) -> list[ext_proc.ProcessingResponse]:
    found = []
    for at in range(0, len(body), size) or [0]:
        part = ext_proc.ProcessingResponse(request_body={})
        streamed = part.request_body.response.body_mutation.streamed_response
        streamed.body = body[at : at + size]
        streamed.end_of_stream = at + size >= len(body)
        found.append(part)
    return found


@dataclass
class Bench:
    proxy: EnvoyProcess
    url: str
    picker: ScriptedPicker
    workers: list[EchoWorker]
    client: aiohttp.ClientSession

    async def post(self, path: str = "/v1/echo", size: int = 100, **headers: str) -> dict:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.client.post(
            f"{self.url}{path}", data=b"x" * size, headers=named
        ) as response:
            if response.status != 200:
                return {"status": response.status, "text": await response.text()}
            return await response.json()

    async def until_healthy(self, cluster: str, count: int) -> None:
        await self.proxy.until_healthy(cluster, count)


Starter = Callable[..., "contextlib.AbstractAsyncContextManager[Bench]"]


@contextlib.asynccontextmanager
async def _bench(**changes: object) -> AsyncIterator[Bench]:
    picker = ScriptedPicker()
    workers = [EchoWorker("a"), EchoWorker("b")]
    config = BootstrapConfig(
        listen=SocketAddress("127.0.0.1", free_port()),
        admin=SocketAddress("127.0.0.1", free_port()),
        picker=SocketAddress("127.0.0.1", picker.port),
        endpoints=tuple(SocketAddress("127.0.0.1", worker.port) for worker in workers),
    )
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        admin = config.admin.port  # type: ignore[union-attr]
        proxy = EnvoyProcess(folder, admin)
        for part in (picker, *workers):
            stack.push_async_callback(part.stop)
            await part.start()
        stack.push_async_callback(proxy.stop)
        await proxy.start(to_yaml(build(replace(config, **changes))))
        await proxy.until_ready()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://{config.listen.host}:{config.listen.port}"
        bench = Bench(proxy, url, picker, workers, client)
        await bench.until_healthy("picker", 1)
        yield bench


@pytest.fixture
def bench() -> Starter:
    return _bench


@pytest.fixture
def patient_envoy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets have an Envoy that waits a minute for a picker, and for answers to health checks. On a
    busy machine the usual seconds would be over now and then, and requests go past the picker.
    """
    program = tmp_path / "envoy"
    program.write_text(
        "#!/bin/sh\n"
        """test "$1" = -c && sed -i -E 's/^([ -]*(message_)?timeout:) [12]s$/\\1 60s/' "$2"\n"""
        f'exec {find_envoy()} "$@"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(program))
