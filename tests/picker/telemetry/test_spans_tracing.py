"""Requests become spans where tracing is asked for, and cost nothing where it is not."""

from collections.abc import Mapping

import pytest

from base.tracing import Tracer
from picker.errors import ConfigError
from picker.telemetry.spans import TRACED, build_tracing

otel = pytest.importorskip("base.otel")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "k=v", "baggage": "user=me"}


def recording(environment: Mapping[str, str] | None = None) -> tuple[Tracer, object]:
    exporter = memory.InMemorySpanExporter()
    tracing = otel.tracing_with(exporter, environment or {}, TRACED, in_background=False)
    return tracing.tracer, exporter


def test_tracing_is_off_unless_asked_for() -> None:
    tracing = build_tracing(False, {})
    assert tracing.tracer is None
    tracing.close()


def test_a_request_is_a_part_of_the_trace_that_its_headers_name() -> None:
    tracer, exporter = recording()
    request = tracer.begin_request(SAMPLED, 2.0)
    inner = tracer.begin("gateway.request_orchestration", request, 5)
    inner.set("target_model", "m")
    inner.end(7)
    headers = request.propagation()
    request.fail("no endpoint")
    request.end()
    orchestration, root = exporter.get_finished_spans()  # type: ignore[attr-defined]
    assert (root.name, root.kind.name) == ("gateway.request", "SERVER")
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == SPAN
    assert root.status.description == "no endpoint"
    assert (root.end_time - root.start_time) / 1e9 >= 2.0
    assert orchestration.parent.span_id == root.context.span_id
    assert dict(orchestration.attributes) == {"target_model": "m"}
    assert (orchestration.start_time, orchestration.end_time) == (5, 7)
    assert headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert (headers["tracestate"], headers["baggage"]) == ("k=v", "user=me")
    assert root.resource.attributes["service.name"] == "llm-d-epp"


@pytest.mark.parametrize(("ratio", "count"), [("0", 0), ("1", 5)])
def test_a_share_of_the_traces_that_begin_here_is_sent(ratio: str, count: int) -> None:
    tracer, exporter = recording({"OTEL_TRACES_SAMPLER_ARG": ratio})
    for _ in range(5):
        tracer.begin_request({}, 0.0).end()
    assert len(exporter.get_finished_spans()) == count  # type: ignore[attr-defined]


def test_headers_that_are_no_trace_begin_a_new_one() -> None:
    tracer, _ = recording()
    span = tracer.begin_request({"traceparent": "nonsense", "baggage": ";;=,"}, 0.0)
    assert TRACE not in span.propagation()["traceparent"]


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER_ARG": "much"},
    ],
)
def test_an_unsupported_variable_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environment))):
        build_tracing(True, environment)


@pytest.mark.parametrize("exporter", ["none", "console", "otlp"])
def test_a_tracer_is_built_and_closed(exporter: str) -> None:
    tracing = build_tracing(True, {"OTEL_TRACES_EXPORTER": exporter})
    assert isinstance(tracing.tracer, otel.OtelTracer)
    tracing.close()


def test_clients_cannot_fill_the_log_with_their_headers(caplog: pytest.LogCaptureFixture) -> None:
    tracer, _ = recording()
    headers = {"traceparent": "x" * 600, "tracestate": "=,=,a=b,a=b", "baggage": "%%%," * 300}
    readable = SAMPLED | {"tracestate": "=,=,a=b,a=b", "baggage": "=" * 9000}
    for wrong in (headers, readable):
        span = tracer.begin_request(wrong, 0.0)
        span.propagation()
        span.end()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1")]
)
def test_settings_that_the_library_refuses_are_a_reason_not_to_start(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^--tracing: .+"):
        build_tracing(True, {name: value})
