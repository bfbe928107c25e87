"""A small correct endpoint picker, and faults that break it one at a time.

It knows which echo servers are full because it shares them with the suite.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from conformance.case import Provision
from conformance.echo.pool import EchoPool
from tests.support.picker.ext_proc_stream import (
    CHUNK_BYTES,
    DESTINATION,
    body_pieces,
    set_headers,
    struct_of,
)


class Fault(Enum):
    NONE = auto()
    NO_HEADER = auto()
    NO_METADATA = auto()
    SAYS_IT_DIFFERENTLY = auto()
    PICKS_STRANGERS = auto()
    IS_STEERED = auto()
    NAMES_ONE_TWICE = auto()
    NO_BRACKETS = auto()
    NAMES_HOSTS_ONLY = auto()
    KEEPS_ROUTE = auto()
    IGNORES_SUBSET = auto()
    IGNORES_SUBSET_PORTS = auto()
    IGNORES_SUBSET_WITHOUT_BODY = auto()
    OBEYS_OTHER_NAMESPACES = auto()
    IGNORES_SELECTION = auto()
    IGNORES_SELECTION_WITHOUT_BODY = auto()
    TAKES_ALL_FOR_STRANGERS = auto()
    REFUSES_BODILESS = auto()
    REFUSES_WITH_500 = auto()
    FAILS_STREAMS = auto()
    ROUTES_AND_REFUSES = auto()
    SULKS = auto()
    SHEDS_WITH_503 = auto()
    CHOKES_ON_NONSENSE = auto()
    BIG_PIECES = auto()
    LOSES_PIECES = auto()
    EMPTY_PIECE_ENDS = auto()
    ENDS_TWICE = auto()
    BODY_FIRST = auto()
    IGNORES_TRAILERS = auto()
    TAKES_SECOND_END = auto()
    ENDS_AFTER_REQUEST = auto()
    CHANGES_RESPONSES = auto()
    MANGLES_EVENTS = auto()
    IGNORES_RESPONSE_TRAILERS = auto()
    NEEDS_A_REQUEST = auto()
    ONE_BUFFER_FOR_ALL = auto()
    FALLS_WITH_A_STREAM = auto()
    DIES_OF_NONSENSE = auto()
    ENDS_WITH_AN_ERROR = auto()
    OMITS_SERVED = auto()
    REPORTS_ITS_PICK = auto()
    REPORTS_ONLY_WITH_BODY = auto()
    NOT_HEALTHY = auto()
    LEAVES_WITH_SERVED = auto()


STRANGER = "10.99.99.99:99"
_SERVED = "x-conformance-test-served-endpoint"
PROVIDED = frozenset(
    {
        Provision.SELECTION,
        Provision.SERVED,
        Provision.FALLBACK,
        Provision.SHEDDING,
        Provision.POOL_CHANGES,
        Provision.HEALTH,
    }
)


class StreamFailureError(Exception): ...


@dataclass
class _Stream:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    subset: list[str] | None = None
    is_bodiless: bool = False
    is_routed: bool = False
    picked: str = ""
    is_over: bool = False


class MutantEpp:
    """`fault` may change between requests."""

    def __init__(self, pool: EchoPool, fault: Fault = Fault.NONE) -> None:
        self.fault = fault
        self.address = ""
        self.is_tls = False
        self.is_running = True
        self.provides = PROVIDED
        self._echoes = pool
        self._pool = list(pool.endpoints)
        self._next = 0
        self._shared = bytearray()
        self._is_broken = False
        self._starts = 0
        self.is_ready = True  # what its health says while no fault speaks against it

    @property
    def health_address(self) -> str | None:
        return self.address

    async def start(self) -> None: ...

    async def kill(self) -> None:
        raise AssertionError

    def ask_to_end(self) -> None:
        raise AssertionError

    async def end(self, limit_seconds: float) -> int | None:
        raise AssertionError

    async def use_pool(self, endpoints: Sequence[str]) -> None:
        self._pool = list(endpoints)

    def use(self, fault: Fault) -> None:
        self.fault, self._is_broken = fault, False
        self._starts += 1

    async def Process(  # noqa: N802 - gRPC's name
        self, requests: Any, context: Any
    ) -> AsyncIterator[Any]:
        stream, has_ended, start = _Stream(), False, self._starts
        if self._is_broken:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        try:
            async for message in requests:
                for reply in self._replies(stream, message):
                    yield reply
                if stream.is_over:
                    has_ended = True
                    return
            has_ended = not stream.body  # a reset may look like an end here
        except StreamFailureError:
            has_ended = True
            await context.abort(grpc.StatusCode.INTERNAL, "failed")
        finally:
            if not has_ended and self.fault is Fault.FALLS_WITH_A_STREAM:
                self._is_broken |= start == self._starts
        if self.fault is Fault.ENDS_WITH_AN_ERROR:
            await context.abort(grpc.StatusCode.UNKNOWN, "gone")

    def _replies(self, stream: _Stream, message: Any) -> Iterator[Any]:
        kind = message.WhichOneof("request")
        self._read_metadata(stream, message)
        if kind == "request_headers":
            yield from self._request_headers(stream, message.request_headers)
        elif kind == "request_body":
            yield from self._request_body(stream, message.request_body)
        elif kind == "request_trailers":
            yield from self._request_trailers(stream)
        elif kind == "response_headers":
            yield from self._response_headers(stream, message)
        elif kind == "response_body":
            yield from self._response_body(stream, message.response_body)
        elif kind == "response_trailers" and self.fault is not Fault.IGNORES_RESPONSE_TRAILERS:
            yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
        elif kind is None:
            self._is_broken = self.fault is Fault.DIES_OF_NONSENSE
            raise StreamFailureError

    def _read_metadata(self, stream: _Stream, message: Any) -> None:
        for namespace, values in message.metadata_context.filter_metadata.items():
            known = namespace == "envoy.lb.subset_hint"
            if not known and self.fault is not Fault.OBEYS_OTHER_NAMESPACES:
                continue
            if f"{DESTINATION}-subset" in values.fields:
                listed = values.fields[f"{DESTINATION}-subset"].list_value.values
                stream.subset = [value.string_value for value in listed]

    # The request

    def _request_headers(self, stream: _Stream, headers: Any) -> Iterator[Any]:
        stream.headers = {
            one.key: (one.raw_value or one.value.encode()).decode()
            for one in headers.headers.headers
        }
        stream.is_bodiless = headers.end_of_stream
        if headers.end_of_stream:
            yield from self._routed(stream, None, True)

    def _buffer(self, stream: _Stream) -> bytearray:
        return self._shared if self.fault is Fault.ONE_BUFFER_FOR_ALL else stream.body

    def _request_body(self, stream: _Stream, body: Any) -> Iterator[Any]:
        buffer = self._buffer(stream)
        if stream.is_routed:
            if self.fault is Fault.TAKES_SECOND_END and not body.body:
                yield from body_pieces("request_body", b"")
            return
        buffer += body.body
        ends = body.end_of_stream
        if self.fault is Fault.EMPTY_PIECE_ENDS and not body.body:
            ends = True
        if ends:
            whole = bytes(buffer)
            buffer.clear()
            yield from self._routed(stream, whole, True)

    def _request_trailers(self, stream: _Stream) -> Iterator[Any]:
        if self.fault is Fault.IGNORES_TRAILERS:
            return
        if not stream.is_routed:
            whole = bytes(self._buffer(stream))
            self._buffer(stream).clear()
            yield from self._routed(stream, whole, False)
        yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())

    def _routed(self, stream: _Stream, body: bytes | None, ends: bool) -> Iterator[Any]:
        stream.is_routed = True
        status = self._refusal(stream, body)
        picked = [] if status is not None else self._picked(stream)
        if status is None and not picked:
            status = 500 if self.fault is Fault.REFUSES_WITH_500 else 503
        if status is not None:
            yield from self._refused(stream, status)
            return
        stream.picked = picked[0]
        head = self._destination(stream, picked)
        pieces = [] if body is None else list(self._body_pieces(body, ends))
        if self.fault is Fault.BODY_FIRST and len(pieces) > 1:
            yield from (pieces[0], head, *pieces[1:])
        else:
            yield from (head, *pieces)
        stream.is_over = self.fault is Fault.ENDS_AFTER_REQUEST

    def _body_pieces(self, body: bytes, ends: bool) -> Iterator[Any]:
        size = 10 * len(body) if self.fault is Fault.BIG_PIECES else CHUNK_BYTES
        if self.fault is Fault.BODY_FIRST:
            size = 1_000
        if self.fault is Fault.LOSES_PIECES:
            body = body[:CHUNK_BYTES]
        yield from body_pieces("request_body", body, ends, max(size, 1))
        if self.fault is Fault.ENDS_TWICE and ends:
            yield from body_pieces("request_body", b"")

    def _refusal(self, stream: _Stream, body: bytes | None) -> int | None:
        sheddable = stream.headers.get("x-llm-d-inference-objective") == "sheddable"
        if sheddable and any(server.is_full for server in self._echoes.servers.values()):
            return 503 if self.fault is Fault.SHEDS_WITH_503 else 429
        if self.fault is Fault.REFUSES_BODILESS and body is None and stream.subset is None:
            return None if "test-epp-endpoint-selection" in stream.headers else 429
        try:
            json.loads(body or b"{}")
        except ValueError:
            if self.fault is Fault.CHOKES_ON_NONSENSE:
                raise StreamFailureError from None
            return 400
        return None

    def _refused(self, stream: _Stream, status: int) -> Iterator[Any]:
        if self.fault is Fault.FAILS_STREAMS:
            raise StreamFailureError
        if self.fault is Fault.SULKS:
            self._is_broken = True
        message = pb.ProcessingResponse()
        message.immediate_response.status.code = status
        if self.fault is Fault.ROUTES_AND_REFUSES and stream.subset is not None:
            yield self._destination(stream, self._pool[:1] or [STRANGER])
        yield message
        stream.is_over = True

    # Whom it picks

    def _picked(self, stream: _Stream) -> list[str]:
        fault, pool = self.fault, list(self._pool)
        bodiless = stream.is_bodiless
        hinted = stream.subset is not None and fault is not Fault.IGNORES_SUBSET
        if hinted and not (bodiless and fault is Fault.IGNORES_SUBSET_WITHOUT_BODY):
            pool = [one for one in pool if self._is_in(stream.subset or [], one)]
        listed = stream.headers.get("test-epp-endpoint-selection")
        ignored = fault is Fault.IGNORES_SELECTION
        ignored |= bodiless and fault is Fault.IGNORES_SELECTION_WITHOUT_BODY
        if listed is not None and not ignored:
            return self._selected(listed, pool)
        if fault is Fault.IS_STEERED and DESTINATION in stream.headers:
            return [stream.headers[DESTINATION]]
        if fault is Fault.PICKS_STRANGERS and stream.subset is None and pool:
            return [pool[0], STRANGER]
        self._next += 1
        turned = pool[self._next % len(pool) :] + pool[: self._next % len(pool)] if pool else []
        if fault is Fault.NAMES_ONE_TWICE:
            return turned[:1] * 2
        return turned[:3]

    def _is_in(self, subset: list[str], endpoint: str) -> bool:
        if self.fault is Fault.IGNORES_SUBSET_PORTS:
            return _host(endpoint) in [_host(one) for one in subset]
        return endpoint in subset

    def _selected(self, listed: str, pool: list[str]) -> list[str]:
        entries = [entry.strip() for entry in listed.split(",")]
        found = [e for entry in entries for e in pool if entry in (e, _host(e))]
        if self.fault is Fault.TAKES_ALL_FOR_STRANGERS and not found:
            return pool
        return list(dict.fromkeys(found))

    def _destination(self, stream: _Stream, picked: list[str]) -> Any:
        fault, value = self.fault, ",".join(picked)
        if fault is Fault.NO_BRACKETS:
            value = value.replace("[", "").replace("]", "")
        if fault is Fault.NAMES_HOSTS_ONLY and stream.is_bodiless and "," in value:
            value = f"{value},{_host(picked[0])}"
        message = pb.ProcessingResponse()
        response = message.request_headers.response
        response.clear_route_cache = fault is not Fault.KEEPS_ROUTE
        if fault is not Fault.NO_HEADER:
            set_headers(response.header_mutation, [(DESTINATION, value)])
        if fault is not Fault.NO_METADATA:
            reported = picked[0] + "," + value if fault is Fault.SAYS_IT_DIFFERENTLY else value
            message.dynamic_metadata.CopyFrom(struct_of({"envoy.lb": {DESTINATION: reported}}))
        return message

    # The response

    def _response_headers(self, stream: _Stream, message: Any) -> Iterator[Any]:
        if self.fault is Fault.NEEDS_A_REQUEST and not stream.is_routed:
            raise StreamFailureError
        reply = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        key = f"{DESTINATION}-served"
        reported = fields[key].string_value if key in fields else "fail: missing"
        if self.fault is Fault.LEAVES_WITH_SERVED and key in fields and reported not in self._pool:
            raise StreamFailureError
        if self.fault is Fault.REPORTS_ITS_PICK:
            reported = stream.picked
        silent = self.fault is Fault.OMITS_SERVED
        silent |= self.fault is Fault.REPORTS_ONLY_WITH_BODY and stream.is_bodiless
        if not silent:
            set_headers(reply.response_headers.response.header_mutation, [(_SERVED, reported)])
        yield reply

    def _response_body(self, stream: _Stream, body: Any) -> Iterator[Any]:
        data = body.body
        if self.fault is Fault.CHANGES_RESPONSES:
            data = data.replace(b"x", b"")
        if self.fault is Fault.MANGLES_EVENTS:
            data = data.decode(errors="ignore").encode()
        yield from body_pieces("response_body", data, body.end_of_stream)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


class _Health(health.aio.HealthServicer):
    def __init__(self, mutant: MutantEpp) -> None:
        super().__init__()
        self._mutant = mutant

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        ill = self._mutant.fault is Fault.NOT_HEALTHY
        ill |= not self._mutant.is_ready and request.service != "liveness"
        status = health_pb2.HealthCheckResponse
        return status(status=status.NOT_SERVING if ill else status.SERVING)


@asynccontextmanager
async def running_mutant(pool: EchoPool) -> AsyncIterator[MutantEpp]:
    mutant = MutantEpp(pool)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    pb_grpc.add_ExternalProcessorServicer_to_server(mutant, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(mutant), server)
    mutant.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield mutant
    finally:
        await asyncio.shield(server.stop(grace=None))
