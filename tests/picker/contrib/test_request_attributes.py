"""request-attribute-reporter: one number for the proxy, at the end of a response."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from picker.framework.interfaces import ResponseProgressHook
from picker.types import ResponseProgress, Usage
from tests.support.picker.plugin_scenes import configured, flight

COST = "x-gateway-inference-request-cost"


def reporting(expression: str, condition: str | None = None, **key: str) -> dict[str, Any]:
    attribute: dict[str, Any] = {"key": {"name": COST, **key}, "expression": expression}
    if condition is not None:
        attribute["condition"] = condition
    return {"attributes": [attribute]}


def last(usage: Usage | None) -> ResponseProgress:
    """The end of a response."""
    return ResponseProgress(1.0, 100, usage, is_last=True)


def test_the_last_piece_carries_the_number() -> None:
    """And only the last, in the namespace envoy.lb."""
    reporter = configured("request-attribute-reporter", reporting("usage.completion_tokens"))
    assert isinstance(reporter, ResponseProgressHook)
    usage = Usage(7, 10, 17)
    assert reporter.response_progress(flight(), ResponseProgress(1.0, 50, usage)) is None
    assert reporter.response_progress(flight(), last(usage)) == {"envoy.lb": {COST: 10}}


def test_the_namespace_can_be_another() -> None:
    reporter = configured(
        "request-attribute-reporter", reporting("usage.total_tokens", namespace="billing")
    )
    answer = reporter.response_progress(flight(), last(Usage(7, 10, 17)))
    assert answer == {"billing": {COST: 17}}


@pytest.mark.parametrize(
    ("condition", "reported"),
    [
        ("usage.completion_tokens > 5", True),
        ("usage.completion_tokens > 50", False),
        ("has(usage.prompt_tokens) && has(usage.completion_tokens)", True),
        ("", True),
        ("  ", True),
    ],
)
def test_a_condition_has_to_hold(condition: str, reported: bool) -> None:
    """An empty one always does."""
    reporter = configured(
        "request-attribute-reporter", reporting("usage.completion_tokens", condition)
    )
    answer = reporter.response_progress(flight(), last(Usage(7, 10, 17)))
    assert (answer is not None) is reported


@pytest.mark.parametrize("usage", [None, Usage(7, 0, 7)])
def test_zero_and_silence_are_not_reported(usage: Usage | None) -> None:
    """A response that tells no usage costs nobody knows what."""
    reporter = configured("request-attribute-reporter", reporting("usage.completion_tokens"))
    assert reporter.response_progress(flight(), last(usage)) is None


def test_an_expression_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is reported; the response goes on."""
    reporter = configured("request-attribute-reporter", reporting("100 / usage.completion_tokens"))
    with caplog.at_level(logging.WARNING):
        assert reporter.response_progress(flight(), last(Usage(7, 0, 7))) is None
    assert "attributes[0].expression" in caplog.text


def test_a_value_of_another_kind_is_not_reported() -> None:
    """Whatever it was for the sample."""
    odd = "usage.completion_tokens < 100 ? dyn(1) : dyn(usage.completion_tokens > 5)"
    reporter = configured("request-attribute-reporter", reporting(odd))
    assert reporter.response_progress(flight(), last(Usage(0, 500, 0))) is None


def test_without_the_library_the_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to install it."""
    blocked: Any = None
    monkeypatch.setitem(sys.modules, "cel", blocked)
    with pytest.raises(ValueError, match=r"pip install '\.\[cel\]'"):
        configured("request-attribute-reporter", reporting("usage.completion_tokens"))
