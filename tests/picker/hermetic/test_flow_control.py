"""Flow control in a whole picker: order, refusals, changes, and the memory of waiting requests."""

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
from tests.support.picker.ext_proc_stream import completion, refused, response_head
from tests.support.picker.http2_peer import prefix
from tests.support.picker.metrics_pages import page, pods, serving
from tests.support.picker.waiting_requests import (
    FAIRNESS,
    OBJECTIVE,
    Scene,
    config,
    headers_of,
    status_of,
    waiting_scene,
)
from tests.support.picker.whole_picker import whole_picker
from tests.support.waiting import until

PRIORITIES = {"critical": 10, "standard": 0, "sheddable": -5}


async def test_a_full_pool_holds_requests_until_a_slot_is_free(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config()) as scene:
        first = await scene.serve()
        second = await scene.wait(1)
        third = await scene.wait(2)
        assert second.waits
        await first.end()
        assert await second.destination() == scene.picker.pods[0].host_port
        await scene.has_waiting(1)
        assert third.waits
        await second.end()
        await third.destination()
        await third.end()
        await scene.is_at_rest()
        assert await scene.picker.outcomes() == {"completed": 3}


async def test_requests_wait_for_an_empty_pool(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config(), []) as scene:
        assert (await scene.picker.get("/readyz"))[0] == 200
        waiter = await scene.wait(1)
        (pod,) = pods(page())
        async with serving(pod):
            scene.picker.list_endpoints([pod])
            assert await waiter.destination() == pod.host_port
            await waiter.end()
            await scene.is_at_rest()


@pytest.mark.parametrize("is_known", [True, False])
async def test_unreadable_metrics_do_not_stop_a_pool(tmp_path: Path, is_known: bool) -> None:
    text = config().replace("pluginRef: concurrency-detector", "pluginRef: utilization-detector")
    (pod,) = pods(page() if is_known else None)
    async with waiting_scene(
        tmp_path, text, [pod], metrics_staleness_threshold_seconds=0.2
    ) as scene:
        pod.page = None
        await scene.picker.knows(pod.name)
        for _ in range(3):
            waiter = await scene.serve()
            await waiter.end()
        await scene.is_at_rest()


TWO_PRIORITIES = {"critical": 10, "sheddable": -5}
REASON = "x-llm-d-request-dropped-reason"


async def test_flow_control_follows_the_configuration(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config(gate=False)) as scene:
        requests = [await scene.serve(), await scene.serve()]
        scene.use(config())  # counts the requests in flight
        requests += [await scene.wait(1), await scene.wait(2)]
        await requests[0].end()
        assert requests[2].waits
        await requests[1].end()
        await requests[2].destination()
        assert requests[3].waits
        scene.use(config(gate=False))
        await requests[3].destination()
        requests.append(await scene.serve())
        for waiter in requests[2:]:
            await waiter.end()
        await scene.is_at_rest()


async def test_a_drain_serves_waiting_requests(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config()) as scene:
        requests = [await scene.serve(), await scene.wait(1)]
        scene.picker.picker.stop()
        await until(lambda: scene.picker.get("/readyz"), lambda found: found[0] == 503)
        assert requests[1].waits
        for waiter in requests:
            await waiter.destination()
            await waiter.end()


@pytest.mark.parametrize("is_hurried", [True, False])
async def test_an_expired_drain_refuses_waiting_requests(tmp_path: Path, is_hurried: bool) -> None:
    seconds = 30.0 if is_hurried else 0.05
    async with waiting_scene(tmp_path, config(), drain_timeout_seconds=seconds) as scene:
        await scene.serve()
        waiter = await scene.wait(1)
        scene.picker.picker.stop()
        if is_hurried:
            scene.picker.picker.stop()
        reply = await waiter.answer()
        assert status_of(reply) == 503
        assert headers_of(reply)[REASON] == "rejected-shutting-down"
        assert int(headers_of(reply)["retry-after"]) >= 1


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_in_flight_is_evicted_for_a_better_one(
    tmp_path: Path, is_streaming: bool
) -> None:
    """A proxy turns the 429 into a reset once the response has begun."""
    text = config("  enableEviction: true")
    async with waiting_scene(tmp_path, text, objectives=TWO_PRIORITIES) as scene:
        victim = await scene.serve({OBJECTIVE: "sheddable", FAIRNESS: "batch"})
        if is_streaming:
            await victim.stream.response_headers({"content-type": "text/event-stream"})
            await victim.stream.response_body(b'data: {"x":1}\n\n')
            assert len(await victim.stream.read(1)) == 1
        better = await scene.ask({OBJECTIVE: "critical"})
        reply = await victim.stream.read(1)
        assert status_of(reply) == 429
        assert headers_of(reply)[REASON].startswith("evicted")
        assert headers_of(reply)["retry-after"] == "1"
        assert await victim.stream.read(1) == []
        await better.destination()
        await better.end()
        await scene.is_at_rest()
        assert await scene.picker.outcomes() == {"evicted": 1, "completed": 1}
        errors = {"error_code": "ResourceExhausted", "priority": "-5"}
        assert await scene.picker.series("llm_d_epp_request_error_total", **errors) == 1


REFUSED = refused(
    429,
    "RateLimitError",
    "The pool is full, and requests of negative priority are rejected",
    retry_after=1,
)
BOTH_PRIORITIES = {"standard": 0, "sheddable": -1}


async def test_the_conformance_flag_selects_the_replies_of_the_reference(tmp_path: Path) -> None:
    full, priorities = pods(page(10, 0.95)), {"objectives": BOTH_PRIORITIES, "conformance": True}
    async with whole_picker(tmp_path, full, **priorities) as picker:
        sheddable = {"x-llm-d-inference-objective": "sheddable"}
        (said,) = await picker.ask(completion(), sheddable)
        text = b"inference error: ResourceExhausted - system saturated, sheddable request dropped"
        assert said.immediate_response.body == text
        async with picker.stream() as stream:
            await stream.ask(completion())
            mark = {"x-went-into-resp-headers": "true"}
            assert await stream.response_headers() == response_head(mark)
            await stream.response_body(b"", True)
            await stream.read(1)


@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
async def test_a_full_pool_refuses_sheddable_requests_and_no_others(
    tmp_path: Path, header: str
) -> None:
    """The answer is a 429 without a reason, like that of the reference's legacy admission."""
    async with whole_picker(tmp_path, pods(page(10, 0.95)), objectives=BOTH_PRIORITIES) as picker:
        assert await picker.ask(completion(), {header: "sheddable"}) == REFUSED
        labels = {"error_code": "ResourceExhausted", "priority": "-1", "model_name": "my-model"}
        assert await picker.series("llm_d_epp_request_error_total", **labels) == 1
        assert await picker.requests() is None
        assert await picker.outcomes() == {"refused": 1}
        assert await picker.is_idle()
        said = await picker.ask(completion(), {header: "standard"})
        assert said[0].WhichOneof("response") == "request_headers"


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
