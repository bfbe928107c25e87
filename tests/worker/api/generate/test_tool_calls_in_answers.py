"""Tools and reasoning through the API: requests, answers, streams, and the next turn."""

import json
from typing import Any

import pytest

from tests.support.worker.scripted_talk import TEMPLATE, says
from worker.sim import tokenizer as sim
from worker.types import FinishReason

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "é 🙂 }</tool_call>"}}</tool_call>'
ARGUMENTS = '{"word": "é 🙂 }</tool_call>"}'
TWO = f"I look.\n{CALL}\n{CALL}"


MARKS = {2000: "<tool_call>", 2001: "</tool_call>", 2002: "<other>"}


class MarkingTokenizer(sim.SimTokenizer):
    """It has control tokens for marks, as Qwen's and Mistral's tokenizers have."""

    @property
    def special_ids(self) -> frozenset[int]:
        return super().special_ids | MARKS.keys()

    def token_text(self, token_id: int) -> str:
        return MARKS.get(token_id) or super().token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        mark = MARKS.get(token_id)
        return super().token_bytes(token_id) if mark is None else mark.encode()


@pytest.fixture
def bench(bench: Any) -> Any:
    bench.template_source = TEMPLATE
    return bench


async def answer(bench: Any, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    return await bench.answer(CHAT, {**ASKED, **fields}, max_model_len=4096, **settings or {})


async def message_of(bench: Any, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    return (await answer(bench, settings, **fields))["choices"][0]["message"]


async def streamed(bench: Any, settings: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
    body = {**ASKED, **fields}
    events = await bench.events(CHAT, body, max_model_len=4096, **settings or {})
    return [choice for event in events for choice in event["choices"]]


def gathered(choices: list[Any]) -> tuple[dict[str, Any], str]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for entry in delta.get("tool_calls", []):
            if "id" in entry:
                assert entry["index"] == len(message["tool_calls"])
                assert entry["type"] == "function"
                function = {"name": entry["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"type": "function", "function": function})
            known = message["tool_calls"][entry["index"]]["function"]
            known["arguments"] += entry["function"]["arguments"]
    return message, choices[-1]["finish_reason"]


@pytest.mark.parametrize("size", [1, 3, 40, 1000])
async def test_a_stream_adds_up_to_the_whole_answer(bench: Any, size: int) -> None:
    says(bench, TWO, size=size)
    body = await answer(bench)
    (choice,) = body["choices"]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["stop_reason"] is None
    assert choice["message"]["content"] == "I look."
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("chatcmpl-tool-") for call in calls)
    assert body["usage"]["completion_tokens"] == len(TWO.encode()) + 1

    message, reason = gathered(await streamed(bench))
    assert reason == "tool_calls"
    assert message["content"] == "I look."
    assert message["tool_calls"] == [
        {"type": "function", "function": call["function"]} for call in calls
    ]


@pytest.mark.parametrize("size", [1, 7])
async def test_a_call_that_is_not_closed_is_whole_in_a_stream_too(bench: Any, size: int) -> None:
    says(bench, "[look_up(word='tree'", size=size)
    settings = {"tool_call_parser": "pythonic"}
    choice = (await answer(bench, settings))["choices"][0]
    message, reason = gathered(await streamed(bench, settings))
    for said in (choice["message"], message):
        assert not said["content"]
        (call,) = said["tool_calls"]
        assert call["function"] == {"name": "look_up", "arguments": '{"word": "tree"}'}
    assert (choice["finish_reason"], reason) == ("tool_calls", "tool_calls")


async def test_arguments_are_streamed_as_they_come(bench: Any) -> None:
    says(bench, CALL)
    deltas = [choice["delta"] for choice in await streamed(bench)]
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    assert entries[0]["function"] == {"name": "look_up", "arguments": "{"}
    assert len(entries) == len(ARGUMENTS)  # one for each character
    assert all(set(entry) == {"index", "function"} for entry in entries[1:])
    assert len(deltas) == len(entries) + 2  # the role, the end


async def test_an_answer_of_calls_alone_has_no_content(bench: Any) -> None:
    says(bench, f" {CALL}\n")
    message = await message_of(bench)
    assert (message["content"], len(message["tool_calls"])) == (None, 1)
    says(bench, " hi \n")
    choice = (await answer(bench))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" hi \n", "stop")
    assert "tool_calls" not in choice["message"]
    assert "reasoning_content" not in choice["message"]


async def test_an_answer_that_is_cut_off_keeps_its_reason(bench: Any) -> None:
    says(bench, TWO[: TWO.rindex("🙂")], FinishReason.LENGTH)
    choice = (await answer(bench))["choices"][0]
    calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert calls == [ARGUMENTS, '{"word": "é ']
    assert choice["finish_reason"] == "length"
    message, reason = gathered(await streamed(bench))
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == calls
    assert reason == "length"


async def test_a_stop_string_cuts_before_calls_are_looked_for(bench: Any) -> None:
    says(bench, CALL)
    choice = (await answer(bench, stop=["🙂"]))["choices"][0]
    assert choice["message"]["content"] == CALL[: CALL.index("🙂")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "🙂")
    message, reason = gathered(await streamed(bench, stop=["🙂"]))
    # The arguments that were sent cannot be taken back.
    assert message["content"] == choice["message"]["content"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"word": "é '
    assert reason == "stop"
    says(bench, f"{CALL} END more")
    choice = (await answer(bench, stop=["END"]))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "END")
    assert len(choice["message"]["tool_calls"]) == 1


async def test_answers_are_parsed_each_for_itself(bench: Any) -> None:
    says(bench, TWO)
    calling = bench.engine.steps
    says(bench, "no call")
    talking = bench.engine.steps
    bench.engine.script = lambda request, branch: talking if branch else calling
    choices = (await answer(bench, n=2))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    assert [choice["message"]["content"] for choice in choices] == ["I look.", "no call"]
    frames = await streamed(bench, n=2)
    for index, reason in enumerate(["tool_calls", "stop"]):
        mine = [frame for frame in frames if frame["index"] == index]
        message, ended = gathered(mine)
        assert (message["content"], ended) == (choices[index]["message"]["content"], reason)


async def test_every_token_has_its_log_probability(bench: Any) -> None:
    says(bench, CALL)
    for step in bench.engine.steps:
        step.logprobs.append(bench.logprob(step.token_ids[0]))
    frames = await streamed(bench, logprobs=True)
    entries = [e for f in frames if f["logprobs"] for e in f["logprobs"]["content"]]
    assert len(entries) == len(CALL.encode()) + 1
    assert frames[1]["delta"] == {"content": ""}
    assert [e["bytes"] for e in frames[1]["logprobs"]["content"]] == [[ord("<")]]
    body = await answer(bench, logprobs=True)
    assert len(body["choices"][0]["logprobs"]["content"]) == len(entries)


@pytest.mark.parametrize("skip", [True, False])
async def test_marks_that_are_control_tokens_are_seen(bench: Any, skip: bool) -> None:
    bench.tokenizer = MarkingTokenizer()
    inner = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    tokens = [*b"Hi", 2002, 2000, *inner.encode(), 2001, 2000, *b"oops", 2001]
    says(bench, tokens)
    for stream in (False, True):
        if stream:
            message, _ = gathered(await streamed(bench, skip_special_tokens=skip))
        else:
            message = await message_of(bench, skip_special_tokens=skip)
        shown = "Hioops" if skip else "Hi<other><tool_call>oops</tool_call>"
        assert message["content"] == shown
        assert [c["function"]["arguments"] for c in message["tool_calls"]] == [ARGUMENTS]
    # Without tools, they are control tokens like others.
    assert (await message_of(bench, tools=None))["content"] == f"Hi{inner}oops"


async def test_a_conversation_with_tools_continues(bench: Any) -> None:
    says(bench, CALL)
    body = await answer(bench, return_prompt_text=True)
    tools = json.dumps(TOOLS[0])
    system = (
        f"<|im_start|>system\n<tools>\n{tools}\n</tools> Answer within <tool_call></tool_call>."
    )
    first = f"{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body["prompt_text"] == first

    said = body["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a smile"}
    messages = [*ASKED["messages"], said, result]
    says(bench, "Done.")
    body = await answer(bench, messages=messages, return_prompt_text=True)
    assert body["prompt_text"] == (
        f"{first}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>a smile</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    counted = await bench.answer("/tokenize", {"messages": messages, "tools": TOOLS})
    assert counted["count"] == body["usage"]["prompt_tokens"]


async def test_a_template_may_take_arguments_as_text(bench: Any) -> None:
    bench.template_source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}|{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = await answer(bench, messages=messages, tools=None, return_prompt_text=True)
    assert body["prompt_text"] == 'hi|f{"a":1}|'


async def test_tool_choice_none_needs_no_parser(bench: Any) -> None:
    says(bench, CALL)
    body = await answer(bench, tool_choice="none", return_prompt_text=True)
    assert body["choices"][0]["message"]["content"] == CALL
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "look_up" in body["prompt_text"]
    bench.template_source = sim.CHAT_TEMPLATE
    says(bench, CALL)
    assert (await message_of(bench, tool_choice="none"))["content"] == CALL


async def test_a_parser_can_be_chosen(bench: Any) -> None:
    says(bench, 'Yes[TOOL_CALLS]look_up{"word": "x"}')
    message = await message_of(bench, {"tool_call_parser": "mistral"})
    assert message["content"] == "Yes"
    assert message["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"word": "x"}'}
    assert len(message["tool_calls"][0]["id"]) == 9


@pytest.mark.parametrize(
    ("settings", "fields", "param", "words"),
    [
        (
            {},
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "constrain the same answer",
        ),
        (
            {},
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "'other'",
        ),
        ({}, {"tool_choice": "always"}, "tool_choice", "none, auto, required"),
        ({}, {"tools": TOOLS * 2}, "tools[1].function.name", "two tools named 'look_up'"),
        ({}, {"tools": TOOLS * 513}, "tools", "at most 512"),
        ({"enable_auto_tool_choice": False}, {}, None, "--enable-auto-tool-choice"),
    ],
)
async def test_a_choice_that_cannot_be_met_is_refused(
    bench: Any, settings: dict[str, Any], fields: dict[str, Any], param: str | None, words: str
) -> None:
    response = await bench.post(CHAT, {**ASKED, **fields}, **settings)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert bench.engine.requests == []


async def test_reasoning_is_not_content(bench: Any) -> None:
    says(bench, f"<think>\nhm é\n</think>\n\nI look.\n{CALL}")
    qwen = {"reasoning_parser": "qwen3"}
    message = await message_of(bench, qwen)
    assert message["reasoning"] == message["reasoning_content"] == "hm é"
    assert (message["content"], len(message["tool_calls"])) == ("I look.", 1)
    parts, reason = gathered(await streamed(bench, qwen))
    assert (parts["reasoning"], parts["content"], reason) == ("hm é", "I look.", "tool_calls")
    message = await message_of(bench, qwen, include_reasoning=False)
    assert (message["reasoning"], message["content"]) == (None, "I look.")


async def test_reasoning_may_take_all_tokens(bench: Any) -> None:
    says(bench, "hm", FinishReason.LENGTH)
    choice = (await answer(bench, {"reasoning_parser": "deepseek_r1"}, tools=None))["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", None)
    assert choice["finish_reason"] == "length"


async def test_a_template_may_begin_or_end_reasoning(bench: Any) -> None:
    bench.template_source = (
        "{{ messages[0].content }}"
        "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n' }}"
    )
    says(bench, "hm</think>yes")
    for thinks, expected in ((True, ("hm", "yes")), (False, (None, "hm</think>yes"))):
        fields = {"tools": None, "chat_template_kwargs": {"enable_thinking": thinks}}
        message = await message_of(bench, {"reasoning_parser": "deepseek_r1"}, **fields)
        assert (message["reasoning"], message["content"]) == expected
