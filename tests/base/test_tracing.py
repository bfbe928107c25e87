"""A request continues the trace of its headers, and a call continues that of its request."""

import time

import pytest

from base.tracing import RequestTrace, Traced, Tracing, TracingError, build_tracing, call_of

otel = pytest.importorskip("base.otel")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = Traced("proxy", "pointsman-proxy", "proxy.request")
HEADERS = [("Traceparent", f"00-{TRACE}-{SPAN}-01"), ("baggage", "user=me"), ("accept", "*/*")]


@pytest.fixture
def exporter() -> object:
    return memory.InMemorySpanExporter()


def begun(exporter: object) -> RequestTrace:
    tracing: Tracing = otel.tracing_with(exporter, {}, TRACED, in_background=False)
    trace = tracing.request(HEADERS)
    assert trace is not None
    return trace


def test_a_call_continues_the_trace_of_its_request(exporter: object) -> None:
    trace = begun(exporter)
    with call_of(trace, "leg", HEADERS, url="http://a") as headers:
        named = dict(headers)
    trace.end(200)
    leg, request = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert (request.name, leg.name) == ("proxy.request", "leg")
    assert f"{request.parent.span_id:016x}" == SPAN
    assert leg.parent.span_id == request.context.span_id
    assert (leg.kind.name, leg.attributes["url"]) == ("CLIENT", "http://a")
    assert named["traceparent"] == f"00-{TRACE}-{leg.context.span_id:016x}-01"
    assert sorted(name.lower() for name, _ in headers) == ["accept", "baggage", "traceparent"]
    assert request.attributes["http.response.status_code"] == 200
    assert request.status.is_unset


def test_a_stage_has_the_times_of_the_monotonic_clock(exporter: object) -> None:
    now, unix_ns = time.monotonic(), time.time_ns()
    trace = begun(exporter)
    trace.stage("prefill", now - 2, now - 1)
    trace.end(200)
    stage, _ = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert stage.end_time - stage.start_time == pytest.approx(1e9)
    assert stage.start_time == pytest.approx(unix_ns - 2e9, abs=1e9)


@pytest.mark.parametrize(("status", "says"), [(None, "the client left"), (503, "status 503")])
def test_a_failed_request_says_so(exporter: object, status: int | None, says: str) -> None:
    begun(exporter).end(status)
    (request,) = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert request.status.description == says


def test_a_call_that_raises_has_the_name_of_the_error(exporter: object) -> None:
    trace = begun(exporter)
    with pytest.raises(KeyError), call_of(trace, "leg", HEADERS):
        raise KeyError
    (leg,) = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert leg.status.description == "KeyError"


def test_without_tracing_headers_stay_as_they_are() -> None:
    assert build_tracing(False, {}, TRACED).request(HEADERS) is None
    with call_of(None, "leg", HEADERS, url="http://a") as headers:
        assert headers == HEADERS


def test_a_bad_variable_is_an_error_that_names_it() -> None:
    with pytest.raises(TracingError, match="OTEL_TRACES_EXPORTER=zipkin"):
        build_tracing(True, {"OTEL_TRACES_EXPORTER": "zipkin"}, TRACED)


def test_an_endpoint_turns_tracing_on() -> None:
    tracing = build_tracing(False, {}, TRACED, "http://127.0.0.1:9/v1/traces")
    assert tracing.tracer is not None
    tracing.close()
