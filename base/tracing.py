"""Spans of requests: begun here, or continued from the headers of W3C Trace Context.

`base.otel` sends them by OpenTelemetry. It is imported only where tracing is enabled, since the
libraries are an extra; without them, or without tracing, nothing of a request is measured.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

Attribute = str | int | float | bool
Headers = Sequence[tuple[str, str]]

_IMPLEMENTATION = "base.otel"
_PROPAGATED = ("traceparent", "tracestate", "baggage")
_FIRST_FAILURE = 500  # of HTTP's statuses


class TracingError(ValueError):
    """Tracing cannot be set up: a variable has a bad value, or a library is missing."""


class Span(Protocol):
    """A span of one request. Times are nanoseconds since 1970; None: now."""

    @property
    def is_recorded(self) -> bool: ...

    def set(self, name: str, value: Attribute) -> None: ...

    def fail(self, description: str) -> None: ...

    def end(self, at_ns: int | None = None) -> None: ...

    def propagation(self) -> Mapping[str, str]:
        """Return the headers that make the callee's spans children of this one."""


class Tracer(Protocol):
    """Begins spans; must be quick and must not raise."""

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        """Begin the span of a request, within the span that `headers` (lower case) name."""

    def begin(
        self, name: str, parent: Span, at_ns: int | None = None, *, is_call: bool = False
    ) -> Span:
        """Begin a span within `parent`; `is_call`: of a call to another program."""


class RequestTrace:
    """The span of one request, and those within it. Times are of the monotonic clock."""

    def __init__(self, tracer: Tracer, headers: Headers) -> None:
        self._tracer = tracer
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._span = tracer.begin_request({name.lower(): value for name, value in headers}, 0.0)

    def set(self, name: str, value: Attribute) -> None:
        self._span.set(name, value)

    def stage(self, name: str, began_seconds: float | None, *ended_seconds: float | None) -> None:
        """Add a span of something that is over, to the first end that is known, if both its ends
        are. Its length may be zero: two events that a busy process sees at once have one time.
        """
        ended = next((end for end in ended_seconds if end is not None), None)
        if began_seconds is None or ended is None:
            return
        span = self._tracer.begin(name, self._span, self._epoch_ns + int(began_seconds * 1e9))
        span.end(self._epoch_ns + int(ended * 1e9))

    def latency(self, name: str, began_seconds: float | None, ended_seconds: float | None) -> None:
        """Set vLLM's attribute of a duration, if both its ends are known."""
        if began_seconds is not None and ended_seconds is not None:
            self._span.set(f"gen_ai.latency.{name}", ended_seconds - began_seconds)

    @contextmanager
    def call(
        self, name: str, headers: Headers, attributes: Mapping[str, Attribute]
    ) -> Iterator[list[tuple[str, str]]]:
        """Span a call of another program; yields `headers` that make its spans children of this."""
        span = self._tracer.begin(name, self._span, is_call=True)
        for key, value in attributes.items():
            span.set(key, value)
        others = [pair for pair in headers if pair[0].lower() not in _PROPAGATED]
        try:
            yield [*others, *span.propagation().items()]
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def end(self, status: int | None) -> None:
        """End the span, with the status of the answer; None: the client left."""
        if status is not None:
            self._span.set("http.response.status_code", status)
        if status is None or status >= _FIRST_FAILURE:
            self._span.fail("the client left" if status is None else f"status {status}")
        self._span.end()


@contextmanager
def call_of(
    trace: RequestTrace | None, name: str, headers: list[tuple[str, str]], **attributes: Attribute
) -> Iterator[list[tuple[str, str]]]:
    """`RequestTrace.call`, or `headers` as they are for a request without a trace."""
    if trace is None:
        yield headers
        return
    with trace.call(name, headers, attributes) as within:
        yield within


@dataclass(frozen=True, slots=True)
class Tracing:
    """A tracer (None: tracing is off), and the function that sends its last spans."""

    tracer: Tracer | None = None
    close: Callable[[], None] = lambda: None

    def request(self, headers: Headers) -> RequestTrace | None:
        return None if self.tracer is None else RequestTrace(self.tracer, headers)


@dataclass(frozen=True, slots=True)
class Traced:
    """The names in a program's spans; `service` is that of `OTEL_SERVICE_NAME` if it is not set."""

    program: str
    service: str
    request_span: str


def build_tracing(
    enabled: bool, environment: Mapping[str, str], traced: Traced, endpoint: str | None = None
) -> Tracing:
    """Create the tracer, if enabled or given an endpoint, which goes before the environment's.
    Raises `TracingError`, also if the library is missing.
    """
    if endpoint is not None:
        environment = {**environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}
    elif not enabled:
        return Tracing()
    try:
        implementation = import_module(_IMPLEMENTATION)
    except ImportError as error:
        raise TracingError(f"--tracing needs `pip install '.[otel]'`: {error}") from error
    tracing: Tracing = implementation.tracing_from(environment, traced)
    return tracing
