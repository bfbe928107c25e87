"""Messages reach chat templates as texts, or are refused."""

import json
from typing import Any

import msgspec
import pytest

from worker.api.schema.conversation import template_messages
from worker.api.schema.requests import ChatMessage, ChatRequest, ContentPart
from worker.errors import RequestError

CALL: dict[str, Any] = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    assert template_messages([ChatMessage(role="user", content=parts)]) == [
        {"role": "user", "content": "a\nb"}
    ]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\].*image_url"):
        template_messages([ChatMessage(role="user", content=[ContentPart("image_url")])])


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
    messages = msgspec.convert([{"role": "assistant", **turn}], list[ChatMessage])
    [rendered] = template_messages(messages)
    assert expected.items() <= rendered.items()


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "of assistants"),
        ({"content": [{"type": "thinking", "thinking": "x"}], "reasoning": "y"}, "must not differ"),
        ({"content": ["a", {"type": "refusal", "text": "x"}]}, "a refusal part needs its"),
        ({"content": [{"type": "input_audio"}]}, "got 'input_audio'"),
    ],
)
def test_parts_that_say_nothing_are_refused(turn: dict[str, Any], reason: str) -> None:
    messages = msgspec.convert([{"role": "assistant", **turn}], list[ChatMessage])
    with pytest.raises(RequestError, match=reason):
        template_messages(messages)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [], "name": "a"}, "body.messages.0.content"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL] * 513}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "code"}]},
            "messages[0].tool_calls[1].type",
        ),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
    ],
)
def test_turns_that_cannot_be_rendered_are_refused(message: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        template_messages(msgspec.convert([message], list[ChatMessage]))
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
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "f"},
    ]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    for objects, expected in ((True, as_object), (False, text if arguments else "{}")):
        said, result = template_messages(
            msgspec.convert(turns, list[ChatMessage]), argument_objects=objects
        )
        function = {"name": "f", "arguments": expected}
        calls = [{"id": "1", "type": "function", "function": function}]
        assert said == {"role": "assistant", "content": "", "tool_calls": calls}
        assert result == {"role": "tool", "content": "sunny", "name": "f", "tool_call_id": "1"}


def test_an_answer_of_ours_can_be_sent_back() -> None:
    turn = {"role": "assistant", "content": "x", "refusal": None, "annotations": None}
    body = {"messages": [{**turn, "audio": None, "function_call": None, "reasoning": None}]}
    request = msgspec.convert(body, ChatRequest)
    assert template_messages(request.messages) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("messages", [[], [ChatMessage(role="user", content="x")] * 4097])
def test_the_number_of_messages_is_bounded(messages: list[ChatMessage]) -> None:
    with pytest.raises(RequestError, match="messages"):
        template_messages(messages)


def test_an_assistants_reasoning_reaches_the_template() -> None:
    for name in ("reasoning", "reasoning_content"):
        turn = ChatMessage(
            role="assistant",
            content="4",
            annotations=[{"url": "x"}],
            provider_specific_fields={"refusal": None, "reasoning": "3+1"},
            **{name: "2+2"},
        )
        (entry,) = template_messages([turn])
        assert (entry["reasoning"], entry["reasoning_content"]) == ("2+2", "2+2")
        (thought,) = template_messages([ChatMessage(role="assistant", **{name: "2+2"})])
        assert thought == {**entry, "content": ""}
    (silent,) = template_messages([ChatMessage(role="assistant", content=None, reasoning="")])
    assert silent == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "a", "reasoning_content": "b"},
    ],
)
def test_reasoning_of_other_roles_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        template_messages([ChatMessage(**fields)])
    assert caught.value.param == "messages[0].reasoning"
