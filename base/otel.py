"""Spans of requests for OpenTelemetry. Imported only if tracing is enabled.

The usual variables configure the export: `OTEL_TRACES_EXPORTER` (`otlp`, the default, which is OTLP
over HTTP here; `console`; `none`), `OTEL_EXPORTER_OTLP_…`, `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` (a tenth of the traces that begin here).
"""

import logging
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from base.tracing import Span, Traced, Tracing, TracingError

DEFAULT_RATIO = "0.1"
# They log every malformed entry of a client's headers, in full.
_TALKATIVE = ("opentelemetry.baggage", "opentelemetry.trace", "opentelemetry.util.re")
_PROPAGATOR = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


class OtelSpan:
    """A span, and the context that its children and the endpoint continue."""

    __slots__ = ("_span", "context")

    def __init__(self, span: trace.Span, parent: Context | None) -> None:
        self._span = span
        self.context = trace.set_span_in_context(span, parent)

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def set(self, name: str, value: str | int | float | bool) -> None:
        self._span.set_attribute(name, value)

    def fail(self, description: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, description))

    def end(self, at_ns: int | None = None) -> None:
        self._span.end(at_ns)

    def propagation(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, context=self.context)
        return headers


class OtelTracer:
    def __init__(self, provider: TracerProvider, traced: Traced) -> None:
        self._tracer = provider.get_tracer(f"pointsman.{traced.program}")
        self._name = traced.request_span

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        # An empty context: no other span of this process may become the parent.
        parent = _PROPAGATOR.extract(headers, context=Context())
        began = time.time_ns() - int(age_seconds * 1e9)
        kind = SpanKind.SERVER
        span = self._tracer.start_span(self._name, context=parent, kind=kind, start_time=began)
        return OtelSpan(span, parent)

    def begin(
        self, name: str, parent: Span, at_ns: int | None = None, *, is_call: bool = False
    ) -> Span:
        if not isinstance(parent, OtelSpan):
            raise TypeError("the parent is a span of another tracer")
        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context=parent.context, kind=kind, start_time=at_ns)
        return OtelSpan(span, parent.context)


def tracing_from(environment: Mapping[str, str], traced: Traced) -> Tracing:
    """Create the tracer that `environment` configures. Raises `TracingError`."""
    try:
        return tracing_with(_exporter(environment), environment, traced, in_background=True)
    except TracingError:
        raise
    except ValueError as error:  # the library reads further variables
        raise TracingError(f"--tracing: {error}") from error


def tracing_with(
    exporter: SpanExporter | None,
    environment: Mapping[str, str],
    traced: Traced,
    *,
    in_background: bool,
) -> Tracing:
    """Create a tracer that sends spans with `exporter`; None: it only propagates traces."""
    for talkative in _TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.ERROR)
    name = environment.get("OTEL_SERVICE_NAME") or traced.service
    provider = TracerProvider(
        sampler=_sampler(environment),
        resource=Resource.create({SERVICE_NAME: name}),
        shutdown_on_exit=False,  # `Tracing.close` does it
    )
    if exporter is not None:
        processor = BatchSpanProcessor if in_background else SimpleSpanProcessor
        provider.add_span_processor(processor(exporter))
    return Tracing(OtelTracer(provider, traced), provider.shutdown)


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    name = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        return OTLPSpanExporter(endpoint=environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    if name == "console":
        return ConsoleSpanExporter()
    if name == "none":
        return None
    raise TracingError(f"OTEL_TRACES_EXPORTER={name}: only otlp, console and none are supported")


def _sampler(environment: Mapping[str, str]) -> Sampler:
    name = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_traceidratio"
    if name != "parentbased_traceidratio":
        only = "only parentbased_traceidratio is supported"
        raise TracingError(f"OTEL_TRACES_SAMPLER={name}: {only}")
    text = environment.get("OTEL_TRACES_SAMPLER_ARG") or DEFAULT_RATIO
    try:
        return ParentBased(TraceIdRatioBased(float(text)))
    except ValueError as error:
        raise TracingError(f"OTEL_TRACES_SAMPLER_ARG={text}: must be from 0 to 1") from error
