"""One sequence from outputs to text, ending and record."""

from __future__ import annotations

from typing import Any

import pytest

from worker.api.choice import Choice
from worker.api.params import TextParams
from worker.engine.messages import AddRequest
from worker.errors import RequestError
from worker.types import FinishReason, SamplingParams


def choice(text: TextParams | None = None, **params: Any) -> Choice:
    """A choice over one-byte tokens."""
    request = AddRequest("r", [1, 2], SamplingParams(max_tokens=9, **params), 0.5)
    return Choice(0, request, text or TextParams(), lambda t: bytes((t,)), frozenset({0}))


def test_counts_and_times_come_from_the_last_output(bench: Any) -> None:
    """The record is what the engine last said, and the ending of the choice."""
    subject = choice()
    assert subject.take(bench.say("a")) == "a"
    assert subject.take(bench.say("bc", FinishReason.LENGTH, cached=2)) == "bc"
    record = subject.record(9.0)
    assert (record.num_prompt_tokens, record.num_generation_tokens, record.max_tokens) == (2, 3, 9)
    assert (record.arrival_seconds, record.scheduled_seconds) == (0.5, 1.0)
    assert (record.first_token_seconds, record.last_token_seconds) == (2.0, 3.0)
    assert (record.reason, subject.num_cached) == (FinishReason.LENGTH, 2)


def test_a_choice_that_got_nothing_is_an_abort() -> None:
    """A client that leaves before the first token leaves no times behind."""
    record = choice().record(9.0)
    assert (record.reason, record.first_token_seconds) == (FinishReason.ABORT, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [(TextParams(), "a"), (TextParams(include_stop=True), "ab"), (TextParams(stop=("b",)), "a")],
)
def test_the_stop_tokens_text_is_dropped_unless_asked_for(
    bench: Any, text: TextParams, shown: str
) -> None:
    """A token that ends a sequence is counted but not shown."""
    subject = choice(text, stop_token_ids=(98,))
    assert subject.take(bench.say("ab", FinishReason.STOP, stop_token=98)) == shown
    assert subject.ending is not None
    assert (subject.ending.stop_reason, subject.num_generated) == (98, 2)


def test_the_models_own_end_is_no_stop_reason(bench: Any) -> None:
    """Only tokens the client asked for are reported."""
    subject = choice()
    subject.take(bench.say("ab", FinishReason.STOP, stop_token=98))
    assert subject.ending is not None
    assert (subject.ending.finish_reason, subject.ending.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "a\0b")])
def test_control_tokens_are_shown_when_asked_for(bench: Any, skip: bool, shown: str) -> None:
    """`skip_special_tokens: false` keeps them in the text."""
    subject = choice(TextParams(skip_special_tokens=skip))
    assert subject.take(bench.say("a\0b")) == shown


def test_a_request_the_engine_gives_up_is_an_error(bench: Any) -> None:
    """The engine's words reach the client, and the record says what happened."""
    subject = choice()
    with pytest.raises(RequestError, match="no blocks"):
        subject.take(bench.say([], FinishReason.ERROR, error="no blocks"))
    assert subject.record(1.0).reason is FinishReason.ERROR


def test_tokens_after_a_stop_string_do_not_count(bench: Any) -> None:
    """A merged output may hold more than was needed; usage ends with the match."""
    subject = choice(TextParams(stop=("b",)))
    assert subject.take(bench.say("xabcdef", FinishReason.LENGTH)) == "xa"
    assert subject.ending is not None
    assert (subject.ending.stop_reason, subject.num_generated) == ("b", 3)
