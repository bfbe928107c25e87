"""Random ext_proc streams against the pump: whatever arrives, it ends in order and holds nothing.

Messages are valid ones in any order, valid ones that were damaged, and plain noise; directors
decide, refuse, crash, wait or evict; taps hold back and fail; proxies leave or reset at any point.
"""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from picker.errors import Code, DropReason, RefusedError
from picker.extproc.machine.request_phase import StreamSettings
from picker.rpc.calls import Abort, RpcError, Status
from picker.types import FinishCause, RawRequest, RouteDecision
from tests.support.picker.pump_wire import Wire
from tests.support.picker.random_taps import taps

LIMITS = StreamSettings(max_body_bytes=100_000, max_headers=8, max_header_bytes=2_000)
SLACK_BYTES = 500_000  # what the interpreter and protobuf need beside the messages
LIMIT_SECONDS = 60.0
PATIENCE = "patience"  # a message that only asks the proxy to wait on

# What a proxy sends


def message(**kind: Any) -> bytes:
    return bytes(pb.ProcessingRequest(**kind).SerializeToString())


names = st.sampled_from(
    [":path", ":status", "status", "content-length", "x-llm-d-slo-ttft-ms", "a"]
)
values = st.sampled_from([b"", b"200", b"503", b"x", b"\xff"]) | st.binary(max_size=300)
headers = st.lists(
    st.builds(lambda name, value: {"key": name, "raw_value": value}, names, values), max_size=9
).map(lambda pairs: {"headers": {"headers": pairs}})
bodies = st.binary(max_size=30) | st.sampled_from([0, 62_000, 62_001, 99_000]).map(bytes)
modes = st.sampled_from(processing_mode_pb2.ProcessingMode.BodySendMode.values())
likely_modes = st.sampled_from([2, 4])  # BUFFERED, FULL_DUPLEX_STREAMED
shown_modes = st.sampled_from([0, 1, 2, 3, 4])  # all but GRPC
ends = st.booleans()
begin = st.builds(
    lambda shown, end, request, response, observes: message(
        request_headers={**shown, "end_of_stream": end},
        protocol_config={"request_body_mode": request, "response_body_mode": response},
        observability_mode=observes,
    ),
    headers,
    ends,
    likely_modes | modes,
    modes,
    st.sampled_from([False] * 9 + [True]),
)
whole = st.one_of(
    begin,
    st.builds(
        lambda body, end: message(request_body={"body": body, "end_of_stream": end}), bodies, ends
    ),
    st.just(message(request_trailers={})),
    st.builds(
        lambda shown, end: message(response_headers={**shown, "end_of_stream": end}), headers, ends
    ),
    st.builds(
        lambda body, end: message(response_body={"body": body, "end_of_stream": end}), bodies, ends
    ),
    st.just(message(response_trailers={})),
    st.just(b"\x9a\x06\x02hi"),  # a field that does not exist yet
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(whole)[:500])
    if not data:
        return b""
    at = draw(st.integers(0, len(data) - 1))
    how = draw(st.sampled_from(["flip", "cut", "end"]))
    if how == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "cut":
        del data[at : at + draw(st.integers(1, 8))]
    else:
        del data[at:]
    return bytes(data)


noise = whole | whole | whole | damaged() | st.binary(max_size=40)
pieces = st.lists(bodies, max_size=3)


@st.composite
def plausible(draw: st.DrawFn) -> list[bytes]:
    mode = draw(likely_modes)
    config = {"request_body_mode": mode, "response_body_mode": draw(shown_modes)}
    stream = [message(request_headers=draw(headers), protocol_config=config)]
    stream += [message(request_body={"body": body}) for body in draw(pieces)]
    trailers = message(request_trailers={})
    stream.append(draw(st.just(trailers) | st.just(message(request_body={"end_of_stream": True}))))
    stream.append(message(response_headers=draw(headers)))
    stream += [message(response_body={"body": body}) for body in draw(pieces)]
    last = message(response_body={"body": draw(bodies), "end_of_stream": True})
    stream.append(draw(st.just(last) | st.just(message(response_trailers={}))))
    for foreign in draw(st.just([]) | st.lists(noise, max_size=2)):
        stream.insert(draw(st.integers(0, len(stream))), foreign)
    return stream


wild = st.lists(noise, max_size=12)
messages = (
    plausible() | plausible() | wild | st.builds(lambda first, rest: [first, *rest], begin, wild)
)


@dataclass(frozen=True)
class Play:
    messages: list[bytes]
    reset: bool  # instead of an orderly end
    decision: RouteDecision | RefusedError | Exception
    waits: bool  # the decision comes only when the proxy has sent everything
    evict_after: int | None  # messages
    patience: int  # turns of the loop that the proxy leaves the picker between two messages


decisions = st.builds(
    RouteDecision,
    st.just("10.0.0.1:8000"),
    body=st.none() | bodies,
    response=st.none() | taps() | taps(),
    skip_response=st.sampled_from([False] * 5 + [True]),
    needs_response_body=st.booleans(),
    metadata=st.sampled_from([{}, {"envoy.lb": {"x": 1.0}}]),
)
failures = st.sampled_from(
    [
        RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.SATURATED),
        ZeroDivisionError("a bug"),
    ]
)
plays = st.builds(
    Play,
    messages,
    st.booleans(),
    decisions | decisions | decisions | failures,
    st.sampled_from([False, False, False, True]),
    st.none() | st.none() | st.none() | st.integers(0, 6),
    st.sampled_from([0, 5, 5]),
)

# The rest of the world


@dataclass(repr=False)  # asyncio writes out what a task returns, which would count as memory
class Exchange:
    play: Play
    routed: list[RawRequest] = field(default_factory=list)
    causes: list[FinishCause] = field(default_factory=list)
    sent_all: asyncio.Event = field(default_factory=asyncio.Event)
    evict: Callable[[DropReason], None] | None = None

    def decides_at_once(self, raw: RawRequest) -> bool:
        return not self.play.waits and self.play.patience > 0

    def begin(self, evict: Callable[[DropReason], None]) -> Exchange:
        self.evict = evict
        return self

    async def route(self, raw: RawRequest) -> RouteDecision:
        self.routed.append(raw)
        if self.play.waits:
            await self.sent_all.wait()
        if isinstance(self.play.decision, Exception):
            raise self.play.decision
        return self.play.decision

    def finish(self, cause: FinishCause, *_: object) -> None:
        self.causes.append(cause)


@dataclass(frozen=True)
class Reply:
    kind: str | None
    ends_body: bool

    @classmethod
    def of(cls, message: pb.ProcessingResponse) -> Reply:
        kind = message.WhichOneof("response")
        if kind is None and message.HasField("override_message_timeout"):
            return cls(PATIENCE, ends_body=False)
        mutation = getattr(
            getattr(getattr(message, kind or "", None), "response", None), "body_mutation", None
        )
        return cls(kind, mutation is not None and mutation.streamed_response.end_of_stream)


async def perform(play: Play) -> tuple[Exchange, list[Reply]]:
    exchange, wire = Exchange(play), Wire()
    wire.serve(exchange, LIMITS)
    async with asyncio.timeout(LIMIT_SECONDS):
        for given, data in enumerate((*play.messages, None)):
            if given == play.evict_after and exchange.evict is not None:
                exchange.evict(DropReason.EVICTED)
            for _ in range(play.patience):
                await asyncio.sleep(0)
            if data is None:
                exchange.sent_all.set()
                if play.reset:
                    await asyncio.sleep(0)
                    await wire.abort(Abort.CANCELLED)
                    break
            wire.play(data)
        await asyncio.wait([wire.ended])
    if not wire.ended.cancelled():
        error = wire.ended.exception()
        if error is not None:
            assert isinstance(error, RpcError)
            assert error.status is Status.INVALID_ARGUMENT, "an error of our own"
    written = []
    while not wire.outbound.empty():
        message = pb.ProcessingResponse.FromString(wire.outbound.get_nowait())
        written.append(Reply.of(message))
    return exchange, written


def check(play: Play) -> None:
    sent = sum(map(len, play.messages))
    held = LIMITS.max_body_bytes + len(getattr(play.decision, "body", None) or b"")
    most = SLACK_BYTES + 4 * (sent + held)
    # A table of the interpreter's that grew meanwhile, by megabytes at a time, does so once.
    assert played(play) <= most or played(play) <= most


def played(play: Play) -> int:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    exchange, written = asyncio.run(perform(play))
    assert len(exchange.causes) == 1
    assert len(exchange.routed) <= 1
    for raw in exchange.routed:
        assert len(raw.body or b"") <= LIMITS.max_body_bytes
    kinds = [reply.kind for reply in written]
    assert None not in kinds
    assert kinds.count(PATIENCE) <= 1
    assert kinds.count("immediate_response") <= 1
    assert "immediate_response" not in kinds[:-1]  # nothing follows it
    for kind in ("request_body", "response_body"):
        assert sum(reply.ends_body for reply in written if reply.kind == kind) <= 1
    return tracemalloc.get_traced_memory()[1] - before


@pytest.fixture
def measured(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL + 1)
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("measured")
def test_any_stream_ends_once_and_in_order(for_seconds: Any) -> None:
    for_seconds(plays, check)


def test_damaged_messages_are_mostly_not_valid_any_more() -> None:
    good = message(request_headers={"headers": {"headers": [{"key": "a", "raw_value": b"b"}]}})
    with pytest.raises(DecodeError):
        pb.ProcessingRequest.FromString(good[:-1])
