"""One sequence from outputs to text, ending and record."""

from typing import Any

import pytest

from worker.api.generate.choice import Choice
from worker.api.generate.frames import Ending
from worker.api.schema.params import TextParams
from worker.engine.messages import AddRequest
from worker.errors import RequestError
from worker.types import FinishReason, SamplingParams

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class OneByteTokens:
    """The vocabulary has the 256 bytes; the first of them is a control token."""

    special_ids = frozenset({0})
    strips_leading_space = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))


def choice(text: TextParams | None = None, **params: Any) -> Choice:
    request = AddRequest("r", [1, 2], SamplingParams(max_tokens=9, **params), 0.5)
    return Choice(0, request, text or TextParams(), OneByteTokens())


def test_counts_and_times_come_from_the_last_output(bench: Any) -> None:
    subject = choice()
    assert subject.take(bench.say("a")).text == "a"
    assert subject.take(bench.say("bc", LENGTH, cached=2)).text == "bc"
    record = subject.record(9.0)
    assert (record.num_prompt_tokens, record.num_generation_tokens, record.max_tokens) == (2, 3, 9)
    assert (record.arrival_seconds, record.scheduled_seconds) == (0.5, 1.0)
    assert (record.first_token_seconds, record.last_token_seconds) == (2.0, 3.0)
    assert (record.reason, subject.num_cached) == (LENGTH, 2)


def test_a_choice_without_output_is_an_abort() -> None:
    record = choice().record(9.0)
    assert (record.reason, record.first_token_seconds) == (ABORT, None)


ASKED = {"stop_token_ids": (98,)}
ENDS: dict[str, tuple[TextParams, dict[str, Any], FinishReason, str, Ending]] = {
    "the client's stop token": (TextParams(), ASKED, STOP, "a", Ending("stop", 98)),
    "a stop token to show": (TextParams(include_stop=True), ASKED, STOP, "ab", Ending("stop", 98)),
    "a token and a string": (TextParams(stop=("b",)), ASKED, STOP, "a", Ending("stop", 98)),
    "the model's own end": (TextParams(), {}, STOP, "a", Ending("stop", None)),
    "the model's end as a stop": (TextParams(eos_id=98), ASKED, STOP, "a", Ending("stop", None)),
    "an ignored end as a stop": (TextParams(eos_id=None), ASKED, STOP, "a", Ending("stop", 98)),
    "another end": (TextParams(eos_id=97), ASKED, STOP, "a", Ending("stop", 98)),
    "an end of the generation config": (
        TextParams(extra_eos_ids=frozenset({98})), {}, STOP, "a", Ending("stop", 98),
    ),
    "an abort at a stop token": (TextParams(), ASKED, ABORT, "a", Ending("abort", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_stop_token_is_counted_and_reported_if_the_client_can_know_it(
    bench: Any, name: str
) -> None:
    text, params, reason, shown, ending = ENDS[name]
    subject = choice(text, **params)
    assert subject.take(bench.say("ab", reason, stop_token=98)).text == shown
    assert (subject.ending, subject.num_generated) == (ending, 2)


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "a\0b")])
def test_control_tokens_are_shown_when_asked_for(bench: Any, skip: bool, shown: str) -> None:
    subject = choice(TextParams(skip_special_tokens=skip))
    assert subject.take(bench.say("a\0b")).text == shown


def test_a_request_the_engine_gives_up_is_an_error(bench: Any) -> None:
    subject = choice()
    with pytest.raises(RequestError, match="no blocks"):
        subject.take(bench.say([], FinishReason.ERROR, error="no blocks"))
    assert subject.record(1.0).reason is FinishReason.ERROR


def test_tokens_after_a_stop_string_do_not_count(bench: Any) -> None:
    subject = choice(TextParams(stop=("b",)))
    piece = subject.take(bench.say("xabcdef", LENGTH))
    assert (piece.text, bytes(piece.token_ids)) == ("xa", b"xab")
    assert (subject.ending, subject.num_generated) == (Ending("stop", "b"), 3)


def test_logprobs_follow_the_tokens_that_count(bench: Any) -> None:
    entries = [bench.logprob(c) for c in "xabcd"]
    subject = choice(TextParams(stop=("bc", "cz")))
    first = subject.take(bench.say("xab", logprobs=entries[:3]))
    assert (first.text, first.logprobs) == ("xa", entries[:3])
    second = subject.take(bench.say("cd", logprobs=entries[3:]))
    assert (second.text, second.logprobs) == ("", entries[3:4])


def test_a_dropped_stop_token_keeps_its_id_and_its_logprob(bench: Any) -> None:
    entries = [bench.logprob(c) for c in "ab"]
    piece = choice().take(bench.say("ab", STOP, stop_token=98, logprobs=entries))
    assert (piece.text, bytes(piece.token_ids), piece.logprobs) == ("a", b"ab", entries)


def test_a_repetition_is_reported_as_one(bench: Any) -> None:
    subject = choice()
    subject.take(bench.say("abab", FinishReason.REPETITION))
    assert subject.ending == Ending("repetition", "repetition_detected")


def test_an_echo_alone_shows_no_token(bench: Any) -> None:
    """The engine draws one token for `max_tokens: 0`, which is neither shown nor counted."""
    subject = choice(TextParams(echo_only=True))
    piece = subject.take(bench.say("a", STOP, stop_token=97))
    assert (piece.text, list(piece.token_ids), subject.num_generated) == ("", [], 0)
    assert subject.ending == Ending("length", None)


@pytest.mark.parametrize(("prompt", "text"), [([0], "x"), ([65], " x")])
def test_only_text_that_begins_a_sequence_loses_its_space(
    bench: Any, prompt: list[int], text: str
) -> None:
    started = AddRequest("r", prompt, SamplingParams(max_tokens=9), 0.5)
    pieces_of = Choice(0, started, TextParams(), OneByteTokens())
    assert pieces_of.take(bench.say(" x")).text == text


def test_an_abort_that_was_asked_for_is_an_ending(bench: Any) -> None:
    subject = choice(TextParams(stop=("bc",)), **ASKED)
    assert subject.take(bench.say("ab")).text == "a"
    assert subject.take(bench.say([], ABORT)).text == "b"
    assert (subject.ending, subject.record(1.0).reason) == (Ending("abort", None), ABORT)
    echo = choice(TextParams(echo_only=True))
    echo.take(bench.say([], ABORT))
    assert echo.ending == Ending("abort", None)


def test_an_abort_for_the_servers_own_reasons_is_an_error(bench: Any) -> None:
    subject = choice()
    with pytest.raises(RequestError, match="going home") as caught:
        subject.take(bench.say("a", ABORT, error="going home"))
    assert caught.value.status == 503
    assert subject.record(1.0).reason is ABORT
