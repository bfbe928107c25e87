"""Numbers computed from the usage of a response."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picker.contrib.request_attributes import ExpressionError, UsageExpression
from picker.framework.interfaces import ResponseProgressHook
from picker.types import ResponseProgress, Usage
from tests.support.picker.ext_proc_stream import completion, response_pieces
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.plugin_scenes import configured, flight
from tests.support.picker.whole_picker import HEAD, whole_picker

make = partial(configured, "request-attribute-reporter")

COST = "x-gateway-inference-request-cost"


def reporting(expression: str, condition: str | None = None, **key: str) -> dict[str, Any]:
    attribute: dict[str, Any] = {"key": {"name": COST, **key}, "expression": expression}
    if condition is not None:
        attribute["condition"] = condition
    return {"attributes": [attribute]}


def last(usage: Usage | None) -> ResponseProgress:
    return ResponseProgress(1.0, 100, usage, is_last=True)


def test_the_last_piece_carries_the_number() -> None:
    reporter = make(reporting("usage.completion_tokens"))
    assert isinstance(reporter, ResponseProgressHook)
    usage = Usage(7, 10, 17)
    assert reporter.response_progress(flight(), ResponseProgress(1.0, 50, usage)) is None
    assert reporter.response_progress(flight(), last(usage)) == {"envoy.lb": {COST: 10}}


def test_the_namespace_is_configurable() -> None:
    reporter = make(reporting("usage.total_tokens", namespace="billing"))
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
    reporter = make(reporting("usage.completion_tokens", condition))
    answer = reporter.response_progress(flight(), last(Usage(7, 10, 17)))
    assert (answer is not None) is reported


@pytest.mark.parametrize("usage", [None, Usage(7, 0, 7)])
def test_zero_and_missing_usage_are_not_reported(usage: Usage | None) -> None:
    reporter = make(reporting("usage.completion_tokens"))
    assert reporter.response_progress(flight(), last(usage)) is None


def test_a_failed_expression_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reporter = make(reporting("100 / usage.completion_tokens"))
    with caplog.at_level(logging.WARNING):
        assert reporter.response_progress(flight(), last(Usage(7, 0, 7))) is None
    assert "attributes[0].expression" in caplog.text


def test_a_value_of_another_kind_is_not_reported() -> None:
    odd = "usage.completion_tokens < 100 ? dyn(1) : dyn(usage.completion_tokens > 5)"
    reporter = make(reporting(odd))
    assert reporter.response_progress(flight(), last(Usage(0, 500, 0))) is None


def test_without_the_library_the_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: Any = None
    monkeypatch.setitem(sys.modules, "cel", blocked)
    with pytest.raises(ValueError, match=r"pip install '\.\[cel\]'"):
        make(reporting("usage.completion_tokens"))


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
def test_an_invalid_expression_is_refused(source: str, kind: type, why: str) -> None:
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
def test_an_expression_may_fail_on_a_response(source: str, usage: Usage) -> None:
    expression = UsageExpression(source, int, where="here")
    with pytest.raises(ExpressionError, match=r"^here: "):
        expression.evaluate(usage)


ANSWER = b'{"usage":{"prompt_tokens":7,"completion_tokens":10}}'


async def test_a_cost_is_reported_with_the_last_piece(tmp_path: Path) -> None:
    """H41: no other piece has it, whether the response has one piece or several."""
    config = (
        HEAD
        + """
plugins:
- {type: queue-scorer}
- type: request-attribute-reporter
  parameters:
    attributes:
    - {key: {name: x-gateway-inference-request-cost}, expression: usage.completion_tokens}
"""
    )
    headers = {"envoy.lb": {"x-gateway-inference-request-cost": 10}}
    async with whole_picker(tmp_path, pods(page()), config) as picker:
        for pieces in ([ANSWER], [ANSWER, b""]):
            async with picker.stream() as stream:
                await stream.ask(completion())
                await stream.response_headers()
                expected = []
                for piece in pieces:
                    is_last = piece is pieces[-1]
                    await stream.response_body(piece, ends=is_last)
                    metadata = headers if is_last else None
                    expected += response_pieces(piece, ends=is_last, metadata=metadata)
                assert await stream.read_response() == expected
