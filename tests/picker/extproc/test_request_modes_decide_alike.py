"""The same requests through a proxy that holds bodies, and through one that streams them."""

import itertools
import json
import random
from collections.abc import Coroutine, Iterator
from typing import Any

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.decisions.decision import Watchers
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.server import processing
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.calls import Abort, Status
from picker.types import Endpoint, EndpointMetrics
from tests.depth import by_depth

NUM_REQUESTS = by_depth(500, 5_000)
MODE = processing_mode_pb2.ProcessingMode
DESTINATION = "x-gateway-destination-endpoint"
NUM_ENDPOINTS = 6
AT_ONCE = 24  # requests under way


class Call:
    """Collects what the picker sends on one stream."""

    def __init__(self) -> None:
        self.sent: list[pb.ProcessingResponse] = []
        self.is_over = False

    def send(self, message: bytes) -> None:
        self.sent.append(pb.ProcessingResponse.FromString(message))

    def end(self, status: Status = Status.OK, text: str = "") -> None:
        self.is_over = True

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        raise AssertionError("the default configuration decides without waiting")


class Side:
    """One picker with the built-in configuration, behind a proxy of one mode."""

    def __init__(self, mode: int) -> None:
        self.now = 100.0
        self._mode = mode
        metrics = PickerMetrics()
        assembly = build(default_config(), builtin_plugins(), metrics, lambda: self.now)
        self._datastore = Datastore(assembly.observers)
        self.set_endpoints(NUM_ENDPOINTS)
        context = RequestContext(self._datastore, InflightLoad(), random.Random(7), Watchers())
        director = Director(assembly.pipeline, context)
        self._serve = processing(director, StreamSettings())
        self._streams: dict[int, tuple[Call, Any]] = {}

    def set_endpoints(self, count: int) -> None:
        self._datastore.set_endpoints(
            Endpoint(f"w{n}", f"10.0.0.{n + 1}", 8000) for n in range(count)
        )

    def report(self, loads: list[EndpointMetrics]) -> None:
        for candidate, load in zip(self._datastore.snapshot().candidates, loads, strict=False):
            self._datastore.update_metrics(candidate.key, load)

    def ask(self, number: int, body: bytes, cuts: list[int]) -> str:
        """Play one request, with the body cut where this mode may; return where it goes."""
        call = Call()
        receiver = self._serve(call, {})  # type: ignore[arg-type]
        self._streams[number] = call, receiver
        for message in self._request(body, cuts):
            receiver.message(message.SerializeToString())
        chosen = [
            option.header.raw_value.decode() or option.header.value
            for reply in call.sent
            for part in (reply.request_headers, reply.request_body)
            for option in part.response.header_mutation.set_headers
            if option.header.key == DESTINATION
        ]
        return ",".join(chosen) or str(call.sent[-1].immediate_response.status.code)

    def answer(self, number: int) -> None:
        message = pb.ProcessingRequest()
        for name, value in ((":status", b"200"), ("content-type", b"application/json")):
            message.response_headers.headers.headers.add(key=name, raw_value=value)
        self._streams[number][1].message(message.SerializeToString())

    def end(self, number: int, is_aborted: bool) -> None:
        _, receiver = self._streams.pop(number)
        if is_aborted:
            receiver.abort(Abort.CANCELLED)
        else:
            receiver.end_of_messages()

    def _request(self, body: bytes, cuts: list[int]) -> Iterator[pb.ProcessingRequest]:
        head = pb.ProcessingRequest()
        head.protocol_config.request_body_mode = self._mode
        head.protocol_config.response_body_mode = MODE.NONE
        for name, value in (
            *((":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http")),
            *(("content-type", "application/json"), ("content-length", str(len(body)))),
        ):
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        yield head
        bounds = [0, *(cuts if self._mode == MODE.FULL_DUPLEX_STREAMED else []), len(body)]
        for start, stop in itertools.pairwise(bounds):
            piece = pb.ProcessingRequest()
            piece.request_body.body = body[start:stop]
            piece.request_body.end_of_stream = stop == len(body)
            yield piece


def random_body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.03:
        return rng.randbytes(rng.randrange(1, 200))  # not JSON
    shared = f"you are assistant number {rng.randrange(12)} " * rng.choice((1, 20, 200))
    content = shared + rng.randbytes(rng.randrange(1, 60)).hex()
    if kind < 0.3:
        return json.dumps({"model": "m", "prompt": content}).encode()
    message = {"role": "user", "content": content}
    return json.dumps({"model": "m", "messages": [message], "max_tokens": 64}).encode()


def random_load(rng: random.Random) -> EndpointMetrics:
    return EndpointMetrics(rng.randrange(4), rng.randrange(20), rng.random(), 16, 20_000)


def test_both_request_modes_decide_alike() -> None:
    sides = [Side(MODE.BUFFERED), Side(MODE.FULL_DUPLEX_STREAMED)]
    rng = random.Random(41)
    under_way: list[int] = []
    destinations = set()
    for number in range(NUM_REQUESTS):
        body = random_body(rng)
        cuts = sorted(rng.sample(range(1, len(body)), min(rng.randrange(4), len(body) - 1)))
        decided = {side.ask(number, body, cuts) for side in sides}
        assert len(decided) == 1, f"request {number} goes to {decided}"
        destinations |= decided
        under_way.append(number)
        if rng.random() < 0.5:
            loads = [random_load(rng) for _ in range(NUM_ENDPOINTS)]
            for side in sides:
                side.report(loads)
        count = NUM_ENDPOINTS - (rng.random() < 0.02) if number % 10 == 0 else None
        step = rng.expovariate(50.0)
        ending = under_way.pop(rng.randrange(len(under_way))) if len(under_way) > AT_ONCE else None
        is_answered, is_aborted = rng.random() < 0.9, rng.random() < 0.2
        for side in sides:
            if count is not None:
                side.set_endpoints(count)
            side.now += step
            if ending is not None:
                if is_answered:
                    side.answer(ending)
                side.end(ending, is_aborted)
    assert len(destinations) == NUM_ENDPOINTS
