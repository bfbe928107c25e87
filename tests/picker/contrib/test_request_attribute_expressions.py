"""Expressions over usage: what they see, what they give, and when they are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from picker.contrib.request_attributes import ExpressionError, UsageExpression
from picker.types import Usage

USAGE = Usage(prompt_tokens=7, completion_tokens=10, total_tokens=17, cached_tokens=4)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("usage.completion_tokens", 10),
        ("usage.prompt_tokens + 2 * usage.completion_tokens", 27),
        ("usage.total_tokens - usage.prompt_tokens_details.cached_tokens", 13),
        ("int(double(usage.completion_tokens) * 1.5)", 15),
        ("has(usage.queue_time) ? 1 : 0", 0),
        ("\n  usage.prompt_tokens +\n  usage.completion_tokens\n", 17),
        ("usage.completion_tokens > 1000 ? 5 : 0", 0),
    ],
)
def test_a_whole_number_is_computed_from_usage(source: str, expected: int) -> None:
    """With the operators and functions of the language."""
    assert UsageExpression(source, int, where="here").evaluate(USAGE) == expected


def test_a_condition_is_true_or_false() -> None:
    condition = UsageExpression("usage.completion_tokens > 9", bool, where="here")
    assert condition.evaluate(USAGE) is True
    assert condition.evaluate(Usage()) is False


@pytest.mark.parametrize(
    ("source", "kind", "why"),
    [
        ("", int, "^here: "),
        ("1 +", int, "^here: Failed to parse"),
        ("usage.nope", int, "^here: usage has no 'nope'"),
        ("request.model", int, "^here: .*request"),
        ("unknown(1)", int, "^here: .*unknown"),
        ("usage.completion_tokens * 1.5", int, "^here: "),
        ("double(usage.completion_tokens)", int, "^here must give a whole number, gives 2.0"),
        ("usage.completion_tokens > 1", int, "^here must give a whole number"),
        ("'text'", int, "^here must give a whole number"),
        ("usage.completion_tokens", bool, "^here must give true or false"),
        ("1 / 0", int, "^here: "),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_compiled(source: str, kind: type, why: str) -> None:
    """With the place and the library's reason, in one line."""
    with pytest.raises(ValueError, match=why) as error:
        UsageExpression(source, kind, where="here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "usage"),
    [
        ("100 / usage.completion_tokens", Usage()),
        ("usage.prompt_tokens_details.cached_tokens", Usage(1, 1, 2)),
        ("9223372036854775000 + usage.completion_tokens", Usage(0, 2000, 0)),
    ],
)
def test_what_fails_on_a_response_says_so(source: str, usage: Usage) -> None:
    """A field that was not told, a division by zero, a number that is too large."""
    expression = UsageExpression(source, int, where="here")
    with pytest.raises(ExpressionError, match=r"^here: "):
        expression.evaluate(usage)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported by the first expression, not before."""
    blocked: Any = None
    monkeypatch.setitem(sys.modules, "cel", blocked)
    with pytest.raises(ValueError, match=r"pip install '\.\[cel\]'"):
        UsageExpression("1", int, where="here")
