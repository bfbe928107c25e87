"""Expressions in the Common Expression Language (CEL) about what a response cost.

The library is behind the extra `cel` and is imported when the first expression is compiled, so that
configurations without one neither need it nor wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from picker.errors import PickerError
from picker.types import Usage

# An expression that reads something else about usage could never give a value.
_SAMPLE = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=1)
# What the library raises for an expression that fails on its values.
_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)


class ExpressionError(PickerError):
    """An expression that gave no value."""


class _Program(Protocol):
    def execute(self, context: Mapping[str, Any]) -> Any: ...


class _Library(Protocol):
    def compile(self, source: str) -> _Program: ...


class UsageExpression:
    """A compiled expression over `usage`. Immutable.

    `usage` has prompt_tokens, completion_tokens and total_tokens, and prompt_tokens_details with
    cached_tokens where the response tells it.
    """

    def __init__(self, source: str, kind: type, *, where: str) -> None:
        """Raises `ValueError` that begins with `where` when the library is not installed, for what
        is no expression, and for one that does not give a `kind` for a sample of usage.
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
        """The value. Raises `ExpressionError` when there is none, as for a division by zero."""
        try:
            return self._program.execute(_context(usage))
        except _FAILURES as error:
            raise ExpressionError(f"{self._where}: {_reason(error)}") from error


def _library() -> _Library:
    try:
        return cast("_Library", import_module("cel"))
    except ModuleNotFoundError as error:
        hint = "pip install 'pointsman[cel]'"
        raise ValueError(f"CEL expressions need an extra that is not installed: {hint}") from error


def _context(usage: Usage) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return {"usage": told}


def _reason(error: Exception) -> str:
    """The library's message in one line; of a missing field it says the name only."""
    text = " ".join(str(error).split())
    return f"usage has no {text}" if isinstance(error, KeyError) else text
