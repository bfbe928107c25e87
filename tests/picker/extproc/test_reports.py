"""Envoy's reports on responses: the ids, the machine's part, and the calls that bring them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import PickerError
from picker.extproc import wire
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Finish
from picker.extproc.machine.stream import END_ALONE, FIRST_AND_END, StreamMachine
from picker.extproc.reports import ResponseReports
from picker.extproc.server import build_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.requestcontrol.headers import REPORT, REPORT_ID, REPORT_NAMESPACE
from picker.rpc.options import ServerOptions
from picker.types import BodyReport, FinishCause, Metadata, ResponseHead, RouteDecision
from tests.depth import examples
from tests.support.picker.recording_director import RecordingDirector
from tests.support.waiting import until

ID = "0123456789abcdef"
END = BodyReport(True, b"data", 9, 2, 0.5)


class Tap:
    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []
        self.reports: list[BodyReport] = []

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        self.heads.append(head)
        return ()

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        return data, {}

    def end(self) -> bytes:
        return b""

    def report(self, report: BodyReport) -> None:
        self.reports.append(report)
        if report.data == b"bad":
            raise ValueError


def routed(
    tap: Tap | None, mode: BodyMode = BodyMode.ABSENT, **decided: Any
) -> tuple[StreamMachine, str]:
    """Return a machine whose request has left, and the id that the proxy got."""
    machine = StreamMachine(report_id=ID)
    machine.receive(m.RequestHeaders({}, request_body=BodyMode.BUFFERED, response_body=mode))
    machine.receive(m.RequestBody(b"{}", end_of_stream=True))
    reply = machine.routed(RouteDecision("a:1", response=tap, **decided))[-1]
    assert isinstance(reply, m.SendBufferedRequest)
    return machine, reply.report_id


@pytest.mark.parametrize(
    ("mode", "decided", "asked"),
    [
        (BodyMode.ABSENT, {}, END_ALONE + ID),
        (BodyMode.ABSENT, {"watches_first_piece": True}, FIRST_AND_END + ID),
        (BodyMode.ABSENT, {"skip_response": True}, ""),
        (BodyMode.DUPLEX, {}, ""),
        (BodyMode.BUFFERED, {}, ""),
    ],
)
def test_reports_are_requested_where_bodies_are_hidden(
    mode: BodyMode, decided: dict[str, Any], asked: str
) -> None:
    assert routed(Tap(), mode, **decided)[1] == asked


def test_a_request_without_a_body_or_a_tap_gets_no_id() -> None:
    machine = StreamMachine(report_id=ID)
    headers = m.RequestHeaders({}, end_of_stream=True, response_body=BodyMode.ABSENT)
    machine.receive(headers)
    (reply,) = machine.routed(RouteDecision("a:1", response=Tap()))
    assert reply.report_id == ""  # type: ignore[union-attr]
    assert routed(None)[1] == ""


def test_a_report_counts_within_the_response_alone() -> None:
    tap = Tap()
    machine, _ = routed(tap)
    machine.reported(END)
    assert not machine.awaits_report
    machine.receive(m.ResponseHeaders(200))
    assert machine.awaits_report
    assert [head.shows_body for head in tap.heads] == [True]
    machine.reported(BodyReport(num_bytes=3))
    assert machine.awaits_report
    machine.reported(END)
    assert not machine.awaits_report
    assert tap.reports == [BodyReport(num_bytes=3), END]
    closed = machine.receive(m.Closed(m.Ending.END_OF_STREAM))
    assert closed == [Finish(FinishCause.COMPLETED, 200)]
    machine.reported(END)
    assert len(tap.reports) == 2


def test_a_tap_that_fails_gets_no_further_report() -> None:
    tap = Tap()
    machine, _ = routed(tap)
    machine.receive(m.ResponseHeaders(200))
    machine.reported(BodyReport(data=b"bad"))
    machine.reported(END)
    assert len(tap.reports) == 1
    assert not machine.awaits_report


def test_a_client_that_left_is_no_completed_response() -> None:
    machine, _ = routed(Tap())
    machine.receive(m.ResponseHeaders(200))
    machine.reported(BodyReport(is_last=True, is_cut=True))
    (finish,) = machine.receive(m.Closed(m.Ending.CANCELLED))
    assert finish == Finish(FinishCause.CLIENT_GONE, 200)


def test_ids_are_different_and_as_long_as_their_place() -> None:
    reports = ResponseReports()
    ids = {reports.open(lambda _: None) for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) + 1 for one in ids} == {wire.REPORT_ID_CHARACTERS}


@pytest.mark.parametrize(
    "reply",
    [
        m.SendBufferedRequest("a:1", report_id=f"e{ID}"),
        m.SendBufferedRequest("a:1", (("x", "y"),), report_id=f"e{ID}"),
        m.SendRequestHeaders("a:1", report_id=f"e{ID}"),
    ],
)
def test_the_id_goes_to_the_proxy_beside_the_destination(reply: m.Reply) -> None:
    fields = wire.pb.ProcessingResponse.FromString(wire.encode(reply)).dynamic_metadata.fields
    values = {key: one.string_value for key, one in fields["envoy.lb"].struct_value.fields.items()}
    assert values == {"x-gateway-destination-endpoint": "a:1", REPORT_ID: f"e{ID}"}


def log_of(*said: tuple[str | None, str], **flags: bool) -> als_pb2.StreamAccessLogsMessage:
    message = als_pb2.StreamAccessLogsMessage()
    for report_id, text in said:
        entry: Any = accesslog_pb2.HTTPAccessLogEntry()
        entry.response.response_body_bytes = 9
        known = entry.common_properties.metadata.filter_metadata
        if report_id is not None:
            known["envoy.lb"].fields[REPORT_ID].string_value = report_id
        known[REPORT_NAMESPACE].fields[REPORT].string_value = text
        for name, value in flags.items():
            setattr(entry.common_properties.response_flags, name, value)
        message.http_logs.log_entry.append(entry)
    return message


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("2 500000\ndata", END),
        ("2 500000\na\nb", BodyReport(True, b"a\nb", 9, 2, 0.5)),
        ("", BodyReport(True, num_bytes=9)),
        ("-2 5\nx", BodyReport(True, num_bytes=9)),
        ("2\nx", BodyReport(True, num_bytes=9)),
        ("9" * 300 + " 1\nx", BodyReport(True, num_bytes=9)),
    ],
)
def test_a_report_is_read_from_an_access_log(text: str, report: BodyReport) -> None:
    data = log_of(("e1", text), (None, "not ours")).SerializeToString()
    assert wire.decode_log(data) == [("e1", report)]


def test_flags_of_an_access_log_say_that_the_client_left() -> None:
    log = log_of(("e1", ""), downstream_connection_termination=True)
    assert wire.decode_log(log.SerializeToString())[0][1].is_cut


@examples(200)
@given(st.binary(max_size=60))
def test_garbage_is_refused_or_empty(data: bytes) -> None:
    for decode in (wire.decode_log, wire.decode_first_piece):
        try:
            found = decode(data)
        except PickerError:
            continue
        if isinstance(found, tuple):
            assert data == f"{found[0]} ".encode() + data.partition(b" ")[2]
        else:
            assert found == []


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[ResponseReports, grpc.aio.Channel, Any]]:
    metrics = PickerMetrics()
    reports = ResponseReports(metrics.streams.reports_total)
    options = ServerOptions(host="127.0.0.1", port=0)
    server = build_server(RecordingDirector(), options=options, reports=reports)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield (
                reports,
                channel,
                lambda result: (
                    metrics.registry.get_sample_value(
                        "pointsman_extproc_response_reports_total", {"result": result}
                    )
                    or 0
                ),
            )
    finally:
        await server.stop(0)


async def test_calls_bring_reports_to_the_stream_of_their_id() -> None:
    async with serving() as (reports, channel, count):
        taken: list[BodyReport] = []
        own = reports.open(taken.append)
        first = channel.unary_unary(wire.FIRST_PIECE_METHOD)
        await first(f"e{own} 12".encode())
        log = channel.stream_unary(wire.LOG_METHOD)()
        message = log_of((f"e{own}", "2 500000\ndata"), ("eforged", "1 1\n"))
        await log.write(message.SerializeToString())
        await until(lambda: len(taken), lambda number: number == 2)
        assert taken == [BodyReport(num_bytes=12), END]
        reports.close(own)
        await log.write(message.SerializeToString())
        await until(lambda: count("unknown"), lambda number: number == 3)
        await log.done_writing()
        await log
        assert (len(taken), count("taken"), count("malformed")) == (2, 2, 0)


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"x y", b"a " + b"9" * 40])
async def test_a_malformed_call_is_refused_and_counted(data: bytes) -> None:
    async with serving() as (_, channel, count):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary(wire.FIRST_PIECE_METHOD)(data)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert count("malformed") == 1
        log = channel.stream_unary(wire.LOG_METHOD)()
        await log.write(b"\xff\xff")
        assert await log.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert count("malformed") == 2


async def test_access_logs_end_with_the_last_stream() -> None:
    async with serving() as (reports, channel, _):
        own = reports.open(lambda _: None)
        log = channel.stream_unary(wire.LOG_METHOD)()
        await log.write(log_of().SerializeToString())
        reports.end_when_idle()
        await asyncio.sleep(0)
        assert not log.done()
        reports.close(own)
        assert await log.code() is grpc.StatusCode.OK
