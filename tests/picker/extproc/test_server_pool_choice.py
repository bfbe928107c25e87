"""The choice of a pool for a call at the common port: on real sockets, on each transport."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.pool_choice import PoolChoice
from picker.extproc.pump import StreamMetrics
from picker.extproc.server import build_server
from picker.extproc.wire import METHOD
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.types import RawRequest, RouteDecision
from tests.support.waiting import until

MakeDirector = Callable[..., Any]
PATIENCE_SECONDS = 60.0
KEYS = ("llama", "x/qwen", "y/qwen")
NAMES = {"llama": "llama", "default/llama": "llama", "x/qwen": "x/qwen", "y/qwen": "y/qwen"}
Fields = Sequence[tuple[str, str | bytes]]


@dataclass
class Scene:
    port: int
    directors: dict[str, Any]
    metrics: PickerMetrics
    channel: grpc.aio.Channel

    def asked(self) -> dict[str, int]:
        return {
            key: len([raw for one in director.exchanges for raw in one.requests])
            for key, director in self.directors.items()
            if director.exchanges
        }

    @property
    def unknown(self) -> float:
        return dict(self.metrics.unknown_pool_total.numbers()).get((), 0.0)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"llm_d_epp_extproc_{name}", labels)

    async def ask(self, *fields: tuple[str, str | bytes]) -> Any:
        call = pb_grpc.ExternalProcessorStub(self.channel).Process(metadata=fields)
        headers = pb.HttpHeaders(end_of_stream=True)
        headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
        await call.write(pb.ProcessingRequest(request_headers=headers))
        answer = await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return answer


@asynccontextmanager
async def serving(director: MakeDirector, keys: Sequence[str] = KEYS) -> AsyncIterator[Scene]:
    def routing(key: str) -> Callable[[RawRequest], Any]:
        async def route(raw: RawRequest) -> RouteDecision:
            return RouteDecision(f"10.0.0.{KEYS.index(key)}:1")

        return route

    directors = {key: director(routing(key)) for key in keys}
    metrics = PickerMetrics()
    named = {name: directors[key] for name, key in NAMES.items() if key in directors}
    choice = PoolChoice(named, keys, metrics.unknown_pool_total)
    server = build_server(
        choice.choose,
        options=ServerOptions(host="127.0.0.1", port=0),
        health=HealthService(lambda: True),
        streams=StreamMetrics(metrics, asyncio.get_running_loop().time),
    )
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Scene(port, directors, metrics, channel)
    finally:
        await server.stop(0)


def went_to(answer: Any) -> str:
    mutation = answer.request_headers.response.header_mutation
    (place,) = {
        one.header.raw_value.decode()
        for one in mutation.set_headers
        if one.header.key == "x-gateway-destination-endpoint"
    }
    return KEYS[int(place.removeprefix("10.0.0.").removesuffix(":1"))]


@pytest.mark.parametrize(("name", "key"), [*NAMES.items(), (" llama ", "llama")])
async def test_the_name_says_which_pool(director: MakeDirector, name: str, key: str) -> None:
    async with serving(director) as scene:
        for count in (1, 2):
            answer = await scene.ask(("x-other", "y/qwen"), ("x-pointsman-pool", name))
            assert went_to(answer) == key
            assert scene.asked() == {key: count}
        assert scene.unknown == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "asks for no pool; its gRPC initial metadata x-pointsman-pool must name one of "),
        ((("x-pool", "llama"),), "asks for no pool"),
        ((("x-pointsman-pool-", "llama"),), "asks for no pool"),
        ((("x-pointsman-pool-bin", b"llama"),), "asks for no pool"),
        ((("x-pointsman-pool", ""),), "asks for another pool than "),
        ((("x-pointsman-pool", "mistral"),), "asks for another pool than "),
        ((("x-pointsman-pool", "qwen"),), "asks for another pool than "),  # there are two
        ((("x-pointsman-pool", "default/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "x/llama"),), "asks for another pool than "),
        ((("x-pointsman-pool", "LLAMA"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama/"),), "asks for another pool than "),
        ((("x-pointsman-pool", "/llama"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama:9012"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama y/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama,y/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "x" * 4000),), "asks for another pool than "),
    ],
)
async def test_nothing_is_guessed(director: MakeDirector, fields: Fields, message: str) -> None:
    async with serving(director) as scene:
        answer = await scene.ask(*fields)
        assert answer.immediate_response.status.code == 500
        text = json.loads(answer.immediate_response.body)["error"]["message"]
        assert message in text
        assert text.endswith("llama, x/qwen, y/qwen")
        assert scene.asked() == {}
        assert scene.unknown == 1


async def test_several_names_are_none(director: MakeDirector) -> None:
    async with serving(director) as scene:
        for names in (("llama", "y/qwen"), ("y/qwen", "llama"), ("llama", ""), ("z", "llama")):
            answer = await scene.ask(*(("x-pointsman-pool", name) for name in names))
            assert answer.immediate_response.status.code == 500, names
        assert scene.asked() == {}
        assert scene.unknown == 4
        answer = await scene.ask(("x-pointsman-pool", "llama"), ("x-pointsman-pool", "llama"))
        assert went_to(answer) == "llama"


async def test_a_picker_of_one_pool_needs_no_name_but_believes_one(director: MakeDirector) -> None:
    async with serving(director, ("llama",)) as scene:
        assert went_to(await scene.ask()) == "llama"
        assert went_to(await scene.ask(("x-pointsman-pool", "default/llama"))) == "llama"
        answer = await scene.ask(("x-pointsman-pool", "x/qwen"))
        assert answer.immediate_response.status.code == 500
        assert scene.asked() == {"llama": 2}
        assert scene.unknown == 1


async def test_calls_of_one_connection_are_for_different_pools(director: MakeDirector) -> None:
    async with serving(director) as scene:
        names = [*NAMES, "unknown"] * 20

        async def ask(name: str) -> None:
            answer = await scene.ask(("x-pointsman-pool", name))
            if name == "unknown":
                assert answer.immediate_response.status.code == 500
            else:
                assert went_to(answer) == NAMES[name]

        await asyncio.gather(*map(ask, names))
        assert scene.asked() == {"llama": 40, "x/qwen": 20, "y/qwen": 20}
        assert scene.unknown == 20


async def test_the_streams_of_all_pools_are_counted(director: MakeDirector) -> None:
    async with serving(director) as scene:
        for name in ("llama", "x/qwen", "unknown"):
            await scene.ask(("x-pointsman-pool", name))
        await until(lambda: scene.value("streams_total", code="OK") == 3)
        assert scene.value("streams_inflight") == 0
        assert scene.value("stream_duration_seconds_count") == 3


async def test_health_needs_no_name(director: MakeDirector) -> None:
    async with serving(director) as scene:
        stub = health_pb2_grpc.HealthStub(scene.channel)
        for fields in ((), (("x-pointsman-pool", "unknown"),)):
            reply = await stub.Check(health_pb2.HealthCheckRequest(), metadata=fields)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (scene.unknown, scene.asked()) == (0, {})
        assert scene.value("streams_total", code="OK") is None


async def test_the_log_names_what_was_asked_for_once(
    director: MakeDirector, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a proxy could fill the log."""
    with caplog.at_level(logging.WARNING, "picker.app.pool_choice"):
        async with serving(director) as scene:
            for _ in range(3):
                await scene.ask(("x-pointsman-pool", "mistral"))
            await scene.ask(("x-pointsman-pool", "m" * 300))
            for number in range(120):
                await scene.ask(("x-pointsman-pool", f"pool-{number}"))
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == (
        "the proxy asks for the pool 'mistral'; its gRPC initial metadata x-pointsman-pool must "
        "name one of llama, x/qwen, y/qwen"
    )
    assert "m" * 100 in lines[1]
    assert "m" * 300 not in lines[1]
    assert len(lines) == 100


async def raw_call(port: int, *fields: tuple[bytes, bytes]) -> None:
    config = h2.config.H2Configuration(
        header_encoding=None, normalize_outbound_headers=False, validate_outbound_headers=False
    )
    peer = h2.connection.H2Connection(config)
    peer.initiate_connection()
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode())]
    head += [(b":authority", b"localhost"), (b"content-type", b"application/grpc")]
    peer.send_headers(1, [*head, (b"te", b"trailers"), *fields])
    headers = pb.HttpHeaders(end_of_stream=True)
    headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
    message = pb.ProcessingRequest(request_headers=headers).SerializeToString()
    peer.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    ended = (h2.events.StreamEnded, h2.events.StreamReset, h2.events.ConnectionTerminated)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(peer.data_to_send())
            while data := await reader.read(65536):
                if any(isinstance(event, ended) for event in peer.receive_data(data)):
                    return
                writer.write(peer.data_to_send())
    finally:
        writer.close()


@pytest.mark.parametrize(
    "fields",
    [
        ((b"X-Pointsman-Pool", b"llama"),),
        ((b"x-pointsman-pool", b"\xff\xfe"),),
        ((b"x-pointsman-pool", b"llama\x00"),),
        ((b"x-pointsman-pool", b"llama\r\nx: y"),),
        ((b"x-pointsman-pool", "llamä".encode()),),
    ],
    ids=["case", "no text", "nul", "lines", "umlaut"],
)
async def test_malformed_fields_are_harmless(
    director: MakeDirector,
    caplog: pytest.LogCaptureFixture,
    fields: tuple[tuple[bytes, bytes], ...],
) -> None:
    async with serving(director) as scene:
        with caplog.at_level(logging.WARNING, "picker.app.pool_choice"):
            await raw_call(scene.port, *fields)
        assert scene.asked() == {}
        said = [one.getMessage() for one in caplog.records if one.name.startswith("picker.")]
        assert all(text.isprintable() for text in said)
        assert went_to(await scene.ask(("x-pointsman-pool", "x/qwen"))) == "x/qwen"
