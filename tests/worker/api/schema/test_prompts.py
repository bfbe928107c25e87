"""From conversations, texts and token ids to prompts within the limits."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from worker.api.schema import prompts
from worker.api.schema.params import ModelLimits
from worker.api.schema.requests import ChatMessage, ChatRequest, ContentPart
from worker.errors import RequestError

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)
CALL: dict[str, Any] = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def test_a_prompt_must_leave_room() -> None:
    """The message of a prompt that is too long begins as clients expect."""
    assert prompts.room_for_output(99, LIMITS) == 1
    for length in (100, 500):
        with pytest.raises(
            RequestError, match=r"^This model's maximum context length is 100 tokens\."
        ):
            prompts.room_for_output(length, LIMITS)
    with pytest.raises(RequestError, match="cannot be empty"):
        prompts.room_for_output(0, LIMITS)
    with pytest.raises(RequestError, match=r"^This model's maximum context length"):
        prompts.check_prompt_chars("x" * 1601, LIMITS)


def test_text_parts_are_joined_and_others_refused() -> None:
    """Content is a string or text parts; an image is refused by its type, in its place."""
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    assert prompts.template_messages([ChatMessage(role="user", content=parts)]) == [
        {"role": "user", "content": "a\nb"}
    ]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\].*image_url"):
        prompts.template_messages([ChatMessage(role="user", content=[ContentPart("image_url")])])


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, {"content": "a"}),
        ({"content": [{"type": "refusal", "refusal": "I won't."}]}, {"content": "I won't."}),
        ({"content": ["a", {"type": "text", "text": "b"}, "c"]}, {"content": "a\nb\nc"}),
        (
            {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "a"}]},
            {"content": "a", "reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
        (
            {"content": [{"type": "thinking", "thinking": "Hm."}], "reasoning": "Hm."},
            {"content": "", "reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
        ({"refusal": "I won't."}, {"content": "I won't."}),
        ({"content": None, "refusal": "I won't."}, {"content": "I won't."}),
        ({"content": "Sorry.", "refusal": "I won't."}, {"content": "Sorry.\nI won't."}),
        ({"content": ["a"], "reasoning": "Hm."}, {"content": "a", "reasoning": "Hm."}),
    ],
)
def test_parts_of_an_assistants_turn_are_its_text(
    turn: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Parts may be those of other APIs; thinking is the reasoning of the turn, beside which no text
    is lost.
    """
    messages = msgspec.convert([{"role": "assistant", **turn}], list[ChatMessage])
    [rendered] = prompts.template_messages(messages)
    assert expected.items() <= rendered.items()


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "of assistants"),
        ({"content": [{"type": "thinking", "thinking": "x"}], "reasoning": "y"}, "must not differ"),
        (
            {"content": ["a", {"type": "refusal", "text": "x"}]},
            "a refusal part needs its",
        ),
        ({"content": [{"type": "input_audio"}]}, "got 'input_audio'"),
    ],
)
def test_parts_that_say_nothing_are_refused(turn: dict[str, Any], reason: str) -> None:
    messages = msgspec.convert([{"role": "assistant", **turn}], list[ChatMessage])
    with pytest.raises(RequestError, match=reason):
        prompts.template_messages(messages)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": ""}, "body.messages.0.role"),
        ({"role": "user"}, "body.messages.0.content"),
        ({"role": "user", "content": None}, "body.messages.0.content"),
        ({"role": "system", "content": None}, "body.messages.0.content"),
        ({"role": "assistant"}, "body.messages.0.content"),
        ({"role": "assistant", "tool_calls": [], "name": "a"}, "body.messages.0.content"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL] * 513}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "code"}]},
            "messages[0].tool_calls[1].type",
        ),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "body.messages.0.content"),
    ],
)
def test_turns_that_cannot_be_rendered_are_refused(message: dict[str, object], param: str) -> None:
    """Unknown roles, turns that say nothing, and calls that are not an assistant's are 400s that
    name the turn.
    """
    with pytest.raises(RequestError) as caught:
        prompts.template_messages(msgspec.convert([message], list[ChatMessage]))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("arguments", "as_object"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ({"a": ["é"]}, {"a": ["é"]}),
        ({}, {}),
    ],
)
def test_calls_and_results_reach_the_template(arguments: Any, as_object: object) -> None:
    """Arguments are objects where the template wants them, else JSON; those a model got wrong stay
    text.
    """
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "f"},
    ]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    for objects, expected in ((True, as_object), (False, text if arguments else "{}")):
        said, result = prompts.template_messages(
            msgspec.convert(turns, list[ChatMessage]), argument_objects=objects
        )
        function = {"name": "f", "arguments": expected}
        calls = [{"id": "1", "type": "function", "function": function}]
        assert said == {"role": "assistant", "content": "", "tool_calls": calls}
        assert result == {"role": "tool", "content": "sunny", "name": "f", "tool_call_id": "1"}


def test_an_answer_of_ours_can_be_sent_back() -> None:
    """The nulls our own answers carry are accepted in the next turn."""
    turn = {"role": "assistant", "content": "x", "refusal": None, "annotations": None}
    body = {"messages": [{**turn, "audio": None, "function_call": None, "reasoning": None}]}
    request = msgspec.convert(body, ChatRequest)
    assert prompts.template_messages(request.messages) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("messages", [[], [ChatMessage(role="user", content="x")] * 4097])
def test_the_number_of_messages_is_bounded(messages: list[ChatMessage]) -> None:
    """No messages, or more than 4,096, are refused."""
    with pytest.raises(RequestError, match="messages"):
        prompts.template_messages(messages)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_come_in_four_forms(
    prompt: str | list[str | int | list[int]], expected: list[str | list[int]]
) -> None:
    """A string, strings, token ids, or lists of token ids."""
    assert prompts.prompts_of(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], None),
        (["a", 1], "body.prompt.0"),
        ([1, "a"], "body.prompt.1"),
        ([[1], "a"], "body.prompt.0"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_other_prompts_are_refused(
    prompt: str | list[str | int | list[int]], param: str | None
) -> None:
    """Nothing, mixtures, and too many prompts are 400s."""
    with pytest.raises(RequestError, match="prompt") as caught:
        prompts.prompts_of(prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("ids", "param"),
    [([50], None), ([1, 99], None), ([1, -1], "body.prompt.1"), ([1 << 63], "body.prompt.0")],
)
def test_token_ids_of_a_prompt_must_exist(ids: list[int], param: str | None) -> None:
    """Ids outside the vocabulary never reach the engine; what can be none is named by its place."""
    with pytest.raises(RequestError, match="Token id") as caught:
        prompts.check_token_ids(ids, LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("asked", "side", "max_tokens", "expected"),
    [
        (None, None, 1, list(range(120))),
        (3, None, 1, [117, 118, 119]),
        (3, "left", 1, [117, 118, 119]),
        (3, "right", 1, [0, 1, 2]),
        (100, None, 1, list(range(20, 120))),
        (-1, None, 10, list(range(30, 120))),
        (-1, None, 100, [119]),
    ],
)
def test_a_prompt_is_truncated_at_the_side_asked_for(
    asked: int | None, side: str | None, max_tokens: int, expected: list[int]
) -> None:
    """The end of a prompt is kept unless told otherwise; -1 leaves room for the answer."""
    assert prompts.truncated(list(range(120)), asked, side, max_tokens, LIMITS) == expected


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (0, None),
        (-2, "body.truncate_prompt_tokens"),
        (101, "truncate_prompt_tokens"),
    ],
)
def test_senseless_truncations_are_refused(asked: int, param: str | None) -> None:
    """Nothing, and more than the context, are 400s."""
    with pytest.raises(RequestError, match="truncate_prompt_tokens") as caught:
        prompts.truncated([1], asked, None, 1, LIMITS)
    assert caught.value.param == param


def test_the_number_of_documents_is_bounded() -> None:
    """A template is not asked to show more than 1,024 documents."""
    prompts.check_documents(None)
    prompts.check_documents([{"title": "t"}] * 1024)
    with pytest.raises(RequestError) as caught:
        prompts.check_documents([{"title": "t"}] * 1025)
    assert caught.value.param == "documents"


class Unseen(list[int]):
    """Token ids that nobody may look at but the first."""

    def __iter__(self) -> Any:
        raise AssertionError("each was looked at")


@pytest.mark.parametrize("prompt", [Unseen([1] * 100), [Unseen([1] * 100), [1]]])
def test_too_many_token_ids_are_refused_by_their_number(prompt: Any) -> None:
    """Millions of them are not looked at one by one."""
    with pytest.raises(RequestError, match="contains 100 input tokens"):
        prompts.prompts_of(prompt, LIMITS)


def test_an_assistants_reasoning_reaches_the_template() -> None:
    """By either name, as clients send back what servers told them; their notes say nothing."""
    for name in ("reasoning", "reasoning_content"):
        turn = ChatMessage(
            role="assistant",
            content="4",
            annotations=[{"url": "x"}],
            provider_specific_fields={"refusal": None, "reasoning": "3+1"},
            **{name: "2+2"},
        )
        (entry,) = prompts.template_messages([turn])
        assert (entry["reasoning"], entry["reasoning_content"]) == ("2+2", "2+2")
        (thought,) = prompts.template_messages([ChatMessage(role="assistant", **{name: "2+2"})])
        assert thought == {**entry, "content": ""}
    (silent,) = prompts.template_messages(
        [ChatMessage(role="assistant", content=None, reasoning="")]
    )
    assert silent == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "a", "reasoning_content": "b"},
    ],
)
def test_reasoning_that_is_nobodys_is_refused(fields: dict[str, str]) -> None:
    """Only assistants reason, and in one way at a time."""
    with pytest.raises(RequestError) as caught:
        prompts.template_messages([ChatMessage(**fields)])
    assert caught.value.param == "messages[0].reasoning"
