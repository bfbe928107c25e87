"""Anthropic's messages, as its client speaks them."""

from typing import Any

import anthropic
import pytest

from tests.support.worker import scripted_talk
from tests.support.worker.scripted_talk import ByteTokenizer, prompt_of, says
from worker.errors import EngineDeadError
from worker.types import FinishReason

TOOL: Any = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "é"}}</tool_call>'
USER: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": USER}


def client_of(bench: Any, **settings: Any) -> Any:
    return scripted_talk.client_of(bench, anthropic.AsyncAnthropic, **settings)


def plain(message: Any) -> Any:
    content = [block.model_dump(exclude={"id"}) for block in message.content]
    return content, message.stop_reason, message.stop_sequence, message.usage.model_dump()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "settings", "kinds", "reason"),
    [
        ("Hello 🙂.", {}, ["text"], "end_turn"),
        ("", {}, ["text"], "end_turn"),
        (f"I look.\n{CALL}\n{CALL}", {}, ["text", "tool_use", "tool_use"], "tool_use"),
        (CALL, {}, ["tool_use"], "tool_use"),
        (
            f"<think>First.</think>Then.{CALL}",
            {"reasoning_parser": "qwen3"},
            ["thinking", "text", "tool_use"],
            "tool_use",
        ),
        ("Hel STOP lo", {}, ["text"], "stop_sequence"),
        (
            f"One.{CALL}\n\nTwo.{CALL}{CALL} Three.",
            {},
            ["text", "tool_use", "text", "tool_use", "tool_use", "text"],
            "tool_use",
        ),
        (f"{CALL}\nLast.", {}, ["tool_use", "text"], "tool_use"),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(
    bench: Any, text: str, settings: dict[str, Any], kinds: list[str], reason: str, size: int
) -> None:
    says(bench, text, size=size)
    asked = {**ASKED, "tools": [TOOL], "stop_sequences": ["STOP"]}
    async with client_of(bench, **settings) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert [block.type for block in whole.content] == kinds
    assert whole.stop_reason == reason
    assert plain(final) == plain(whole)
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    for block in whole.content:
        if block.type == "tool_use":
            assert (block.name, block.input) == ("look_up", {"word": "é"})


async def test_a_tool_is_used_and_answered(bench: Any) -> None:
    says(bench, f"<think>Hm.</think>I look.{CALL}")
    async with client_of(bench, reasoning_parser="qwen3") as client:
        first = await client.messages.create(
            **ASKED,
            tools=[TOOL],
            system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "low"}],
        )
        assert "<|im_start|>system\nBelow<|im_end|>\n<|im_start|>user\nhi" in prompt_of(bench)
        [*_, call] = first.content
        results: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "a letter"},
            {"type": "text", "text": "So?"},
        ]
        says(bench, "It is a letter.")
        second = await client.messages.create(
            model="tiny",
            max_tokens=64,
            tools=[TOOL],
            messages=[
                *USER,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": results},
            ],
        )
    assert second.content[0].text == "It is a letter."
    counted = (
        '<|im_start|>assistant\nI look.<tool_call>{"name": "look_up", "arguments": {"word": "é"'
    )
    assert counted in prompt_of(bench)
    answered = "<|im_start|>user\n<tool_response>a letter</tool_response><|im_end|>\n"
    assert answered + "<|im_start|>user\nSo?" in prompt_of(bench)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, '[{"name": "look_up", "parameters": {"word": "a"}}]'),
        ({"type": "tool", "name": "look_up"}, '{"word": "a"}'),
    ],
)
async def test_a_tool_can_be_forced(bench: Any, choice: Any, text: str) -> None:
    says(bench, text)
    async with client_of(bench) as client:
        answer = await client.messages.create(**ASKED, tools=[TOOL], tool_choice=choice)
    assert [block.input for block in answer.content] == [{"word": "a"}]
    assert bench.engine.requests[0].params.grammar is not None


async def test_a_cut_call_is_no_object(bench: Any) -> None:
    says(bench, CALL[:50], FinishReason.LENGTH)
    async with client_of(bench) as client:
        answer = await client.messages.create(**ASKED, tools=[TOOL])
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].input == {"_incomplete": '{"word'}


async def test_cached_tokens_are_counted_separately(bench: Any) -> None:
    bench.engine.steps = [bench.say("x", FinishReason.LENGTH, cached=4)]
    async with client_of(bench) as client:
        usage = (await client.messages.create(**ASKED)).usage
        counted = await client.messages.count_tokens(model="tiny", messages=USER)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted.input_tokens - 4, 4)


@pytest.mark.parametrize(
    ("error", "fields", "settings"),
    [
        (anthropic.BadRequestError, {"max_tokens": 0}, {}),
        (anthropic.NotFoundError, {"model": "other"}, {}),
        (anthropic.AuthenticationError, {}, {"api_keys": ["y"]}),
    ],
)
async def test_errors_have_anthropics_envelope(
    bench: Any, error: type[Exception], fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with client_of(bench, **settings) as client:
        with pytest.raises(error) as failure:
            await client.messages.create(**{**ASKED, **fields})
    body: Any = failure.value.body  # type: ignore[attr-defined]
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}


async def test_anthropics_key_header_is_accepted(bench: Any) -> None:
    says(bench, "Hello.")
    async with client_of(bench, key="y", api_keys=["y"]) as client:
        assert (await client.messages.create(**ASKED)).content[0].text == "Hello."


async def test_a_lost_engine_ends_a_stream_with_an_error(bench: Any) -> None:
    bench.engine.steps = [bench.say("h"), EngineDeadError("it is gone")]
    async with client_of(bench) as client:
        with pytest.raises(anthropic.APIStatusError, match="it is gone"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()


BILLING = "x-anthropic-billing-header: cc_version=2.1.9; cch=%s;"
SYSTEM: dict[str, list[Any]] = {
    "block": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}],
    "line": [{"type": "text", "text": BILLING + "\n\nBe "}, {"type": "text", "text": "kind."}],
}


def asked_with(place: str, mark: str) -> dict[str, Any]:
    if place == "turn":
        return {"messages": [{"role": "system", "content": BILLING % mark + "\nBe kind."}, *USER]}
    if place == "text":
        return {"system": BILLING % mark + "\nBe kind."}
    blocks = [{**block, "text": block["text"].replace("%s", mark)} for block in SYSTEM[place]]
    return {"system": blocks}


@pytest.mark.parametrize("place", ["block", "line", "text", "turn"])
async def test_the_billing_line_is_left_out_of_the_prompt(bench: Any, place: str) -> None:
    prompts = []
    async with client_of(bench) as client:
        for mark in ("a1", "b22"):
            await client.messages.create(**{**ASKED, **asked_with(place, mark)})
            prompts.append(prompt_of(bench))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi")


NOTE: Any = {"role": "system", "content": [{"type": "text", "text": "Note."}]}
USED: list[Any] = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "look_up", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a letter"}],
    },
]
SAID: Any = {"role": "assistant", "content": ["Yes."]}
# Qwen3.5's, Gemma's and Mistral's templates refuse such turns.
REFUSES = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
TURNS = "{% for m in messages %}…<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("turns", "in_place", "folded"),
    [
        ([NOTE, *USER], "<system>Note.<user>hi", "<system>Note.<user>hi"),
        ([*USER, NOTE], "<user>hi<system>Note.", "<user>hi\n\nNote."),
        (
            [*USER, NOTE, SAID, *USER],
            "<user>hi<system>Note.<assistant>Yes.<user>hi",
            "<user>hi\n\nNote.<assistant>Yes.<user>hi",
        ),
        (
            [*USER, SAID, NOTE, *USER],
            "<user>hi<assistant>Yes.<system>Note.<user>hi",
            "<user>hi<assistant>Yes.<user>Note.\n\nhi",
        ),
        (
            [*USER, SAID, NOTE],
            "<user>hi<assistant>Yes.<system>Note.",
            "<user>hi<assistant>Yes.<user>Note.",
        ),
        (
            [*USER, SAID, NOTE, SAID],
            "<user>hi<assistant>Yes.<system>Note.<assistant>Yes.",
            "<user>hi<assistant>Yes.<user>Note.<assistant>Yes.",
        ),
        (
            [*USER, *USED, NOTE],
            "<user>hi<assistant><tool>a letter<system>Note.",
            "<user>hi<assistant><tool>a letter\n\nNote.",
        ),
    ],
)
async def test_system_messages_within_a_conversation_are_read(
    bench: Any, turns: list[Any], in_place: str, folded: str
) -> None:
    bench.tokenizer = ByteTokenizer()
    for refusal, expected in (("", in_place), (REFUSES, folded)):
        bench.template_source = TURNS.replace("…", refusal)
        async with bench.client(max_model_len=4096) as client:
            asked = {"messages": turns, "max_tokens": 8}
            assert (await client.post("/v1/messages", json=asked)).status_code == 200
            assert prompt_of(bench) == expected + "<assistant>"
            counted = await client.post("/v1/messages/count_tokens", json={"messages": turns})
        assert counted.json() == {"input_tokens": len(f"{expected}<assistant>".encode())}


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_an_answer_has_the_form_that_was_asked_for(bench: Any, name: str) -> None:
    says(bench, '{"word": "hello"}')
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    broken = {"type": "json_schema", "schema": {"type": "letter"}}
    async with client_of(bench) as client:
        for given in (form, broken):
            asked = {name: {"format": given} if name == "output_config" else given}
            if given is broken:
                with pytest.raises(anthropic.BadRequestError, match=r"format\.schema"):
                    await client.messages.create(**ASKED, extra_body=asked)
            else:
                await client.messages.create(**ASKED, extra_body=asked)
    assert len(bench.engine.requests) == 1
    assert bench.engine.requests[0].params.grammar is not None


async def test_the_effort_reaches_the_template(bench: Any) -> None:
    bench.template_source, bench.tokenizer = "{{ reasoning_effort }}…", ByteTokenizer()
    async with bench.client(max_model_len=64) as client:
        body = {**ASKED, "max_tokens": 8, "output_config": {"effort": "xhigh"}}
        await client.post("/v1/messages", json=body)
        assert prompt_of(bench) == "xhigh…"
        counted = await client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len("xhigh…".encode())}


async def test_a_tool_that_a_search_has_found_is_named(bench: Any) -> None:
    found = [{"type": "tool_reference", "tool_name": "look_up"}, "beside"]
    turns = [
        *USER,
        USED[0],
        {"role": "user", "content": [{**USED[1]["content"][0], "content": found}]},
    ]
    async with client_of(bench) as client:
        tools = [{**TOOL, "defer_loading": True}]
        await client.messages.create(**{**ASKED, "messages": turns, "tools": tools})
    assert "<tool_response>look_up\nbeside</tool_response>" in prompt_of(bench)
