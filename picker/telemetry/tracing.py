"""The tracer of the running program: none, or one that speaks OpenTelemetry.

OpenTelemetry is an extra (`pip install pointsman[otel]`), imported only where tracing is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from picker.errors import ConfigError
from picker.framework.tracing import NoTracer, Tracer

_IMPLEMENTATION = "picker.telemetry.otel"


def _nothing() -> None:
    """There is nothing to be closed."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """A tracer, and how to send what it still holds when the program ends."""

    tracer: Tracer
    close: Callable[[], None] = _nothing


def build_tracing(enabled: bool, environment: Mapping[str, str]) -> Tracing:
    """No tracer, or one that is set up by the `OTEL_…` variables of `environment`.

    Raises `ConfigError` when tracing is asked for and the extra is not installed, or a variable has
    a value that is not supported.
    """
    if not enabled:
        return Tracing(NoTracer())
    try:
        implementation = import_module(_IMPLEMENTATION)
    except ImportError as error:
        raise ConfigError(f"--tracing needs `pip install pointsman[otel]`: {error}") from error
    tracing: Tracing = implementation.tracing_from(environment)
    return tracing
