"""The Responses API, as OpenAI's client speaks it."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from tests.support.worker import scripted_talk
from tests.support.worker.scripted_talk import prompt_of, says
from worker.types import FinishReason

TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "é"}}</tool_call>'


def client_of(bench: Any, **settings: Any) -> Any:
    return scripted_talk.client_of(bench, openai.AsyncOpenAI, "/v1", **settings)


def plain(response: Any) -> Any:
    dumped = (item.model_dump(exclude_none=True) for item in response.output)
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in dumped]
    return output, response.usage.model_dump(), response.status, response.incomplete_details


async def both(client: openai.AsyncOpenAI, **asked: Any) -> tuple[Any, list[Any]]:
    whole = await client.responses.create(input="hi", **asked)
    stream = await client.responses.create(input="hi", **asked, stream=True)
    return whole, [event async for event in stream]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "settings", "kinds"),
    [
        ("Hello 🙂.", {}, ["message"]),
        ("", {}, ["message"]),
        (f"I look.\n{CALL}\n{CALL}", {}, ["message", "function_call", "function_call"]),
        (CALL, {}, ["function_call"]),
        (
            f"<think>First.</think>Then.{CALL}",
            {"reasoning_parser": "qwen3"},
            ["reasoning", "message", "function_call"],
        ),
        ("<tool_call>no call</tool_call>", {}, ["message"]),
        (
            f"One.{CALL}\n\nTwo.{CALL}{CALL} Three.",
            {},
            ["message", "function_call", "message", "function_call", "function_call", "message"],
        ),
        (f"{CALL}\nLast.", {}, ["function_call", "message"]),
        (
            f"<think>First.</think>{CALL}Then.",
            {"reasoning_parser": "qwen3"},
            ["reasoning", "function_call", "message"],
        ),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(
    bench: Any, text: str, settings: dict[str, Any], kinds: list[str], size: int
) -> None:
    says(bench, text, size=size)
    async with client_of(bench, **settings) as client:
        whole, events = await both(client, tools=[TOOL])
        async with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as gathered:
            final = await gathered.get_final_response()
    assert [item.type for item in whole.output] == kinds
    assert plain(final) == plain(events[-1].response) == plain(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    calls = [item for item in whole.output if item.type == "function_call"]
    assert arguments == "".join(call.arguments for call in calls)
    assert all(json.loads(call.arguments) == {"word": "é"} for call in calls)
    assert ended_in_order(events) == events[-1].response.output


def ended_in_order(events: list[Any]) -> list[Any]:
    """Check that each item ends before the next one begins, and return the items as they ended."""
    ended: list[Any] = []
    now: Any = None
    grown = ""
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert now is None
            now, grown = event.item, ""
        assert event.output_index == len(ended)
        assert getattr(event, "item_id", now.id) == now.id
        if event.type.endswith(".delta"):
            grown += event.delta
        elif event.type.endswith("arguments.done"):
            assert event.arguments == grown
        elif event.type.endswith("text.done"):
            assert event.text == grown
        elif event.type == "response.output_item.done":
            assert (event.item.id, event.item.status) == (now.id, "completed")
            ended.append(event.item)
            now = None
    assert now is None
    return ended


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_a_broken_call_becomes_text_behind_it(bench: Any, size: int) -> None:
    """The stream ends the incomplete item before the text; the response has the text alone."""
    bad = CALL.replace('"é"', '"é", nope')
    says(bench, f"One.{bad}Two.", size=size)
    async with client_of(bench) as client:
        whole, events = await both(client, tools=[TOOL])
    done = [e.item.status for e in events if e.type == "response.output_item.done"]
    assert done == ["completed", "incomplete", "completed"]
    assert [item.content[0].text for item in whole.output] == ["One.", f"{bad}Two."]
    assert plain(events[-1].response) == plain(whole)


async def test_a_cut_answer_is_incomplete(bench: Any) -> None:
    says(bench, "Hel", FinishReason.LENGTH)
    async with client_of(bench) as client:
        whole, events = await both(client, max_output_tokens=3)
    assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert plain(events[-1].response) == plain(whole)
    assert bench.engine.requests[0].params.max_tokens == 3


async def test_an_answer_is_parsed_into_a_model(bench: Any) -> None:
    class Word(pydantic.BaseModel):
        word: str

    says(bench, '{"word": "hello"}')
    async with client_of(bench) as client:
        parsed = await client.responses.parse(model="tiny", input="hi", text_format=Word)
    assert parsed.output_parsed == Word(word="hello")
    assert bench.engine.requests[0].params.grammar is not None


async def test_a_tool_is_called_and_answered(bench: Any) -> None:
    says(bench, f"<think>Hm.</think>I look.{CALL}")
    async with client_of(bench, reasoning_parser="qwen3") as client:
        first = await client.responses.create(input="hi", tools=[TOOL], instructions="Be short.")
        assert "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi" in prompt_of(bench)
        [*_, call] = first.output
        results = {"type": "function_call_output", "call_id": call.call_id, "output": "a letter"}
        says(bench, "It is a letter.")
        second = await client.responses.create(
            input=[{"role": "user", "content": "hi"}, *first.output, results], tools=[TOOL]
        )
    assert second.output_text == "It is a letter."
    counted = (
        '<|im_start|>assistant\nI look.<tool_call>{"name": "look_up", "arguments": {"word": "é"'
    )
    assert counted in prompt_of(bench)
    assert "<|im_start|>user\n<tool_response>a letter</tool_response>" in prompt_of(bench)


EARLIER: list[Any] = [
    "Plain.",
    {"type": "output_text", "text": "Put out.", "annotations": []},
    {"type": "refusal", "refusal": "I won't."},
    {"type": "thinking", "thinking": "Hm."},
]


async def test_parts_of_earlier_turns_are_read(bench: Any) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": {"word": "é"}}
    given = {"type": "function_call_output", "call_id": "1", "output": ["a", *EARLIER[1:2]]}
    turns = [{"role": "assistant", "content": EARLIER}, call, given]
    async with client_of(bench) as client:
        says(bench, "So.")
        await client.responses.create(input=turns, tools=[TOOL])
        said = prompt_of(bench)
        with pytest.raises(openai.BadRequestError, match="got 'thinking'"):
            await client.responses.create(input=[{"role": "user", "content": EARLIER}])
    turn = "<|im_start|>assistant\nPlain.\nPut out.\nI won't.<tool_call>"
    assert f'{turn}{{"name": "look_up", "arguments": {{"word": "é"}}}}</tool_call>' in said
    assert "<tool_response>a\nPut out.</tool_response>" in said


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "look_up", "parameters": {"word": "a"}}]'),
        ({"type": "function", "name": "look_up"}, '{"word": "a"}'),
    ],
)
async def test_a_call_can_be_forced(bench: Any, choice: Any, text: str) -> None:
    says(bench, text)
    async with client_of(bench) as client:
        answer = await client.responses.create(input="hi", tools=[TOOL], tool_choice=choice)
    assert [json.loads(item.arguments) for item in answer.output] == [{"word": "a"}]
    assert bench.engine.requests[0].params.grammar is not None


async def test_log_probabilities_are_included(bench: Any) -> None:
    bench.engine.steps = [
        bench.say("h", logprobs=[bench.logprob("h", ("h", -0.5), ("x", -2.0))]),
        bench.say("i", FinishReason.STOP, logprobs=[bench.logprob("i", ("i", -0.5), ("y", -2.0))]),
    ]
    asked: Any = {
        "model": "tiny",
        "input": "a",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    async with client_of(bench) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
    [part] = whole.output[0].content
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == [("h", -0.5), ("i", -0.5)]
    assert [top.token for top in part.logprobs[1].top_logprobs] == ["i", "y"]
    assert plain(final) == plain(whole)


async def test_a_response_is_aborted_by_its_id(bench: Any) -> None:
    bench.engine.steps = [asyncio.Event()]
    async with bench.client() as client:
        asked = client.post("/v1/responses", json={"input": "a"}, headers={"x-request-id": "mine"})
        waiting = asyncio.create_task(asked)
        await bench.engine.saw_request.wait()
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["resp_mine"]})
        assert bench.engine.aborted == [bench.engine.requests[0].request_id]
        waiting.cancel()
        await asyncio.wait({waiting})
