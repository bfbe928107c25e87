"""request-attribute-reporter: report numbers computed from the usage to the proxy.

    metadata[key.namespace][key.name] = expression(usage)   if condition(usage), with the last piece

`expression` (a whole number) and `condition` (true or false; empty: always) are CEL over `usage`,
e.g. `usage.prompt_tokens + usage.completion_tokens`; see `UsageExpression` for its fields.
`attributes` has exactly one entry. Nothing is reported for the value 0, for a response without
usage, and when an expression fails on it, which is logged. Expressions are tried on a sample when
the configuration is read. The library is in the extra `cel` and is imported when the first
expression is compiled.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from picker.errors import PickerError
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType
from picker.types import Metadata, ResponseProgress, Usage

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "envoy.lb"
# An expression that reads another field of usage could never give a value.
_SAMPLE = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=1)
# The library raises these for an expression that fails on its values.
_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)


class AttributeKey(Parameters, frozen=True):
    """`key`: the place of the number in the proxy's dynamic metadata."""

    name: str
    namespace: str = DEFAULT_NAMESPACE


class ReportedAttribute(Parameters, frozen=True):
    key: AttributeKey
    expression: str
    condition: str = ""


class RequestAttributeReporterParameters(Parameters, frozen=True):
    attributes: tuple[ReportedAttribute, ...]


class RequestAttributeReporter:
    def __init__(self, parameters: RequestAttributeReporterParameters) -> None:
        if len(parameters.attributes) != 1:
            raise ValueError(
                f"attributes needs exactly one entry, got {len(parameters.attributes)}"
            )
        attribute = parameters.attributes[0]
        if not attribute.key.name:
            raise ValueError("attributes[0].key.name must not be empty")
        self._name = attribute.key.name
        self._namespace = attribute.key.namespace or DEFAULT_NAMESPACE
        where = "attributes[0].expression"
        self._expression = UsageExpression(attribute.expression, int, where=where)
        self._condition = None
        if attribute.condition.strip():
            where = "attributes[0].condition"
            self._condition = UsageExpression(attribute.condition, bool, where=where)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        usage = progress.usage
        if not progress.is_last or usage is None:
            return None
        try:
            if self._condition is not None and self._condition.evaluate(usage) is not True:
                return None
            value = self._expression.evaluate(usage)
        except ExpressionError as error:
            log.warning("no attribute is reported for %s: %s", flight.request.request_id, error)
            return None
        if type(value) is not int or not value:
            return None
        return {self._namespace: {self._name: value}}


class ExpressionError(PickerError): ...


class _Program(Protocol):
    def execute(self, context: Mapping[str, Any]) -> Any: ...


class _Library(Protocol):
    def compile(self, source: str) -> _Program: ...


class UsageExpression:
    """A compiled expression over `usage`, with the fields of OpenAI's usage."""

    def __init__(self, source: str, kind: type, *, where: str) -> None:
        """Compile `source`. Raises `ValueError`, with a text that begins with `where`, if the
        library is missing, `source` is invalid, or it does not give a `kind` for a sample of usage.
        """
        self._where = where
        try:
            self._program = _library().compile(source)
            value = self._program.execute(_context(_SAMPLE))
        except _FAILURES as error:
            raise ValueError(f"{where}: {_reason(error)}") from error
        if type(value) is not kind:
            wanted = {int: "a whole number", bool: "true or false"}.get(kind, kind.__name__)
            raise ValueError(f"{where} must give {wanted}, gives {value!r} for a sample")

    def evaluate(self, usage: Usage) -> Any:
        """Return the value. Raises `ExpressionError` if there is none, as in a division by zero."""
        try:
            return self._program.execute(_context(usage))
        except _FAILURES as error:
            raise ExpressionError(f"{self._where}: {_reason(error)}") from error


def _library() -> _Library:
    try:
        return cast("_Library", import_module("cel"))
    except ModuleNotFoundError as error:
        hint = "pip install '.[cel]'"
        raise ValueError(f"CEL expressions need an extra that is not installed: {hint}") from error


def _context(usage: Usage) -> dict[str, Any]:
    context: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        context["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return {"usage": context}


def _reason(error: Exception) -> str:
    """Return the error's text; for a missing field, the library's message is only its name."""
    text = " ".join(str(error).split())
    return f"usage has no {text}" if isinstance(error, KeyError) else text


PLUGINS = (PluginType("request-attribute-reporter", RequestAttributeReporter),)
