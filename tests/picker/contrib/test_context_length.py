"""context-length-aware: endpoints by the expected length of prompts."""

from random import Random

import pytest

from picker.contrib.context_length import (
    MAX_DIGITS,
    ContextLengthAware,
    ContextLengthAwareParameters,
    parse_range,
)
from picker.framework.attributes import Attributes
from picker.types import Candidate, Endpoint, EndpointMetrics, InferenceRequest
from tests.support.picker.plugin_scenes import request_for

LABEL = "llm-d.ai/context-length-range"


def _candidates(ranges: list[str | None], label: str = LABEL) -> list[Candidate]:
    return [
        Candidate(
            Endpoint(str(index), "10.0.0.1", 8000, labels={} if text is None else {label: text}),
            EndpointMetrics(),
        )
        for index, text in enumerate(ranges)
    ]


def request_of(tokens: int) -> InferenceRequest:
    return request_for(prompts=(bytes(4 * tokens),))


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        (None, 10, 0.5),
        ("0-20", 10, 0.3 + 0.7 * (0.7 / 1.002 + 0.3 * 0.5)),
        ("0-10000", 10, 0.3 + 0.7 * (0.7 / 2 + 0.3 * 0.999)),
        ("10-10", 10, 1.0),
        ("0-20", 0, 0.3 + 0.7 * (0.7 / 1.002 + 0.3)),
        ("0-20", 20, 0.3 + 0.7 * (0.7 / 1.002)),
        ("1010-2000", 10, 0.15),
        ("0-9", 1009, 0.15),
        ("", 10, 0.0),
        ("0-100-200", 10, 0.0),
        ("100-50", 75, 0.0),
        ("abc-100", 10, 0.0),
        ("-5-100", 10, 0.0),
        ("100", 100, 0.0),
    ],
)
def test_the_score_follows_the_formula(text: str | None, length: int, expected: float) -> None:
    plugin = ContextLengthAware(ContextLengthAwareParameters())
    scores = plugin.score(request_of(length), _candidates([text]), Attributes())
    assert list(scores) == pytest.approx([expected])


def test_narrow_ranges_score_above_wide_ones_and_misses() -> None:
    plugin = ContextLengthAware(ContextLengthAwareParameters())
    candidates = _candidates(["0-20", "0-10000", "11-20"])
    special, general, stranger = plugin.score(request_of(10), candidates, Attributes())
    assert special > general > 0.3 > stranger


def test_filtering_is_off_by_default() -> None:
    candidates = _candidates(["0-20", None, "11-20", "bad", "10-10"])
    request = request_of(10)
    idle = ContextLengthAware(ContextLengthAwareParameters())
    assert idle.filter(request, candidates, Attributes(), Random(0)) == candidates
    active = ContextLengthAware(ContextLengthAwareParameters(enable_filtering=True))
    remaining = active.filter(request, candidates, Attributes(), Random(0))
    assert [candidate.endpoint.name for candidate in remaining] == ["0", "1", "4"]
    assert active.filter(request, candidates[2:4], Attributes(), Random(0)) == []


def test_the_label_is_configurable() -> None:
    plugin = ContextLengthAware(ContextLengthAwareParameters(label="range"))
    assert list(plugin.score(request_of(1), _candidates(["1-1"], "range"), Attributes())) == [1.0]


def test_absurd_numbers_are_no_range() -> None:
    assert parse_range("0-" + "9" * 5000) is None
    assert parse_range("0-" + "9" * (MAX_DIGITS + 1)) is None
    assert parse_range("0-" + "9" * MAX_DIGITS) == (0, 10**MAX_DIGITS - 1)
    assert parse_range("0-\u0661") is None
    assert parse_range("007-008") == (7, 8)
