"""The memory of waiting requests in a whole picker, and the queue's count of it."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from picker.requestcontrol.bodies import REQUEST_BYTES
from tests.support.picker.http2_peer import prefix
from tests.support.picker.waiting_requests import Scene, config, waiting_scene
from tests.support.waiting import until

WINDOW = 2**31 - 1
FRAME_BYTES = 16_384
PIECE_BYTES = 60_000
CALL = (
    *((":method", "POST"), (":scheme", "http"), (":authority", "picker")),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    *(("te", "trailers"), ("content-type", "application/grpc")),
)
HEADERS = (
    *((":method", "POST"), (":scheme", "http")),
    *((":authority", "127.0.0.1:8080"), ("content-type", "application/json")),
    *(("user-agent", "OpenAI/Python 1.99.0"), ("authorization", "Bearer " + "s" * 40)),
)


def recorded(bodies: Sequence[bytes], buffered: bool) -> tuple[bytes, list[bytes]]:
    """Return the first bytes of a connection, and those of a stream for each request."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    client.increment_flow_control_window(WINDOW - 65_535)
    opening = client.data_to_send()
    client.remote_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    streams = []
    for index, body in enumerate(bodies):
        stream_id = 1 + 2 * index
        client.outbound_flow_control_window = WINDOW  # the picker's window updates are not read
        client.send_headers(stream_id, CALL)
        client.streams[stream_id].outbound_flow_control_window = WINDOW
        for message in _messages(index, body, buffered):
            framed = prefix(message) + message
            for at in range(0, len(framed), FRAME_BYTES):
                client.send_data(stream_id, framed[at : at + FRAME_BYTES])
        streams.append(client.data_to_send())
    return opening, streams


def _messages(index: int, body: bytes, buffered: bool) -> Iterator[bytes]:
    modes = processing_mode_pb2.ProcessingMode
    headers = pb.ProcessingRequest()
    path = "/v1/completions" if b'"prompt"' in body else "/v1/chat/completions"
    own = ((":path", path), ("x-request-id", f"7b2cb3b6-0000-4000-8000-{index:012}"))
    for name, value in (*HEADERS, *own, ("content-length", str(len(body)))):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    mode = modes.BUFFERED if buffered else modes.FULL_DUPLEX_STREAMED
    headers.protocol_config.request_body_mode = mode
    headers.protocol_config.response_body_mode = modes.NONE
    yield headers.SerializeToString()
    size = len(body) if buffered else PIECE_BYTES
    for at in range(0, len(body), size):
        piece = pb.ProcessingRequest()
        piece.request_body.body = body[at : at + size]
        piece.request_body.end_of_stream = at + size >= len(body)
        yield piece.SerializeToString()


class Gateway:
    """One connection to the picker at a port; it sends requests and reads no answers."""

    def __init__(self, bodies: Sequence[bytes], buffered: bool) -> None:
        self._opening, self._streams = recorded(bodies, buffered)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, port: int) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._writer.write(self._opening)
        self._reading = asyncio.create_task(_drop(reader))

    async def send(self, first: int, last: int) -> None:
        assert self._writer is not None
        for stream in self._streams[first:last]:
            self._writer.write(stream)
            await self._writer.drain()

    async def close(self) -> None:
        if self._writer is not None and self._reading is not None:
            self._writer.close()
            self._reading.cancel()
            await asyncio.wait([self._reading])


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


ONE_TEXT, CONVERSATION, COSTLY, TOKENS = "one text", "a conversation", "costly", "token ids"
WARM_UP = 30  # what is made once, and what grows in large steps
NO_CAPS = "  maxMemory: 0\n  defaultRequestTTL: 1h"
RARELY = 3600.0  # pages are read, and the reader of each is garbage
HEADERS_AND_NAMES = 4_000  # what is counted for those of these requests, at most


def body(kind: str, size: int) -> bytes:
    """Return about `size` bytes of JSON; `COSTLY` JSON takes Python twenty times its size."""
    if kind == TOKENS:
        return json.dumps({"model": "m", "prompt": list(range(1000, 1000 + size // 6))}).encode()
    texts = [f"text {number:05}" for number in range(size // 45)]
    messages = {
        ONE_TEXT: [{"role": "user", "content": "ж" + "x" * (size - 80)}],
        CONVERSATION: [{"role": "user", "content": text} for text in texts],
        COSTLY: [{"role": "user", "content": [{} for _ in range(size // 4)]}],
    }
    asked = {"model": "m", "max_tokens": 8, "messages": messages[kind]}
    return json.dumps(asked, ensure_ascii=False).encode()


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def fill(scene: Scene, gateway: Gateway, first: int, last: int) -> None:
    for at in count(first, 8):
        if at >= last:
            return
        upto = min(at + 8, last)
        await gateway.send(at, upto)

        async def all_wait(number: int = upto) -> bool:
            return scene.picker.pool.waiting == number

        await until(all_wait)


@pytest.mark.parametrize(
    ("kind", "size", "number", "buffered"),
    [
        (ONE_TEXT, 500, 300, True),
        (ONE_TEXT, 16_000, 100, False),
        (ONE_TEXT, 256_000, 20, True),
        (CONVERSATION, 16_000, 50, True),
        (CONVERSATION, 64_000, 20, False),
        (COSTLY, 16_000, 20, True),
        (TOKENS, 16_000, 50, False),
    ],
)
async def test_the_queue_counts_no_less_than_is_held(
    tmp_path: Path, tracing: None, kind: str, size: int, number: int, buffered: bool
) -> None:
    async with waiting_scene(tmp_path, config(NO_CAPS)) as scene:
        served = await scene.serve()
        asked = body(kind, size)
        gateway = Gateway([asked] * (WARM_UP + number), buffered)
        await gateway.connect(scene.picker.ports.grpc)
        await fill(scene, gateway, 0, WARM_UP)
        before, counted_before = traced_bytes(), memory_bytes(scene)
        await fill(scene, gateway, WARM_UP, WARM_UP + number)
        held = (traced_bytes() - before) / number
        counted = (memory_bytes(scene) - counted_before) / number
        assert len(asked) < held <= counted
        packed = len(asked) if kind == TOKENS else 0
        at_most = 1.25 * len(asked) + packed + REQUEST_BYTES + HEADERS_AND_NAMES
        assert counted <= at_most
        await gateway.close()
        await scene.has_waiting(0)
        assert traced_bytes() - before < held * number / 2
        await served.end()
        await scene.is_at_rest()


def memory_bytes(scene: Scene) -> int:
    return scene.picker.pool.queues().queued_memory_bytes


async def test_a_refused_request_needs_no_garbage_collection(tmp_path: Path) -> None:
    text = config("  maxRequests: 1")
    async with waiting_scene(tmp_path, text, refresh_metrics_interval_seconds=RARELY) as scene:
        served = await scene.serve()
        waiter = await scene.wait(1)
        refused = Gateway([body(ONE_TEXT, 2_000)] * 2 * WARM_UP, buffered=True)
        await refused.connect(scene.picker.ports.grpc)
        tasks = len(asyncio.all_tasks())
        await refused.send(0, WARM_UP)
        await has_refused(scene, WARM_UP, tasks)
        gc.collect()
        gc.disable()
        try:
            await refused.send(WARM_UP, 2 * WARM_UP)
            await has_refused(scene, 2 * WARM_UP, tasks)
            assert gc.collect() < 100 + WARM_UP
        finally:
            gc.enable()
        await refused.close()
        await served.end()
        await waiter.destination()
        await waiter.end()
        await scene.is_at_rest()


async def test_a_cancelled_request_frees_its_body(tmp_path: Path) -> None:
    text = config(NO_CAPS)
    async with waiting_scene(tmp_path, text, refresh_metrics_interval_seconds=RARELY) as scene:
        served = await scene.serve()
        tasks = len(asyncio.all_tasks())
        gateway = Gateway([body(ONE_TEXT, 2_000)] * WARM_UP, buffered=True)
        await gateway.connect(scene.picker.ports.grpc)
        await fill(scene, gateway, 0, WARM_UP)
        gc.collect()
        gc.disable()
        try:
            await gateway.close()

            async def all_gone() -> bool:
                waiting = scene.picker.pool.waiting
                return not waiting and len(asyncio.all_tasks()) == tasks

            await until(all_gone)
            assert gc.collect() < 100 + 3 * WARM_UP
        finally:
            gc.enable()
        await served.end()
        await scene.is_at_rest()


async def has_refused(scene: Scene, number: int, tasks: int) -> None:
    """Return once `number` requests are refused and no more tasks run than before."""

    async def is_so() -> bool:
        refused = scene.picker.pool.queues().outcomes.get("RejectedCapacity")
        return refused == number and len(asyncio.all_tasks()) == tasks

    await until(is_so)
