"""Tool calls and reasoning with the official client against a real worker process.

The simulator echoes the prompt, and the chat template's prompt is the last message: so the model
says what a test sends it.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.model.echo_model import ANSWER, CITIES, TOOLS, write_echo_model
from tests.support.worker.sim_worker import sim_worker


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = write_echo_model(tmp_path_factory.mktemp("echo"))
    with (
        sim_worker(*flags, "--reasoning-parser", "qwen3") as worker,
        openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def says(text: str) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "tools": TOOLS}


def test_the_clients_own_stream_gathers_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**says(ANSWER)).choices[0]
    pieces: dict[int, list[str]] = {}
    with client.chat.completions.stream(**says(ANSWER)) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.setdefault(event.index, []).append(event.arguments_delta)
        gathered = stream.get_final_completion().choices[0]
    assert gathered.finish_reason == whole.finish_reason
    assert gathered.message.content == whole.message.content == "I look."
    assert whole.message.model_extra["reasoning"] == "Two cities."
    calls = whole.message.tool_calls or []
    functions = [call.function for call in gathered.message.tool_calls or []]
    assert [(f.name, f.arguments) for f in functions] == [
        (call.function.name, call.function.arguments) for call in calls
    ]
    assert [functions[0].parsed_arguments, functions[1].parsed_arguments] == [
        {"city": city} for city in CITIES
    ]
    assert ["".join(pieces[n]) for n in range(2)] == [call.function.arguments for call in calls]


def test_an_agent_goes_on_for_ten_turns(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": ANSWER}]
    for _ in range(10):
        asked = {**says(""), "messages": messages}
        message = client.chat.completions.create(**asked).choices[0].message
        assert len(message.tool_calls or []) == 2
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            for call in message.tool_calls or []
        ]
        messages.append({"role": "user", "content": ANSWER})


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {"type": "object", "properties": {"a": {"enum": [7, 8]}}, "required": ["a"]},
    },
}


@pytest.mark.parametrize("thought", ["", "Is it {7}?"])
def test_a_constrained_answer_may_be_thought_about(client: openai.OpenAI, thought: str) -> None:
    before = f"<think>{thought}</think>\n\n" if thought else ""
    asked = {**says(before + '{"a": 7}'), "tools": openai.omit, "response_format": FORM}
    message = client.chat.completions.create(**asked).choices[0].message
    assert json.loads(message.content or "") == {"a": 7}
    assert (message.model_extra or {}).get("reasoning") == (thought or None)
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content


def test_a_required_call_may_be_thought_about(client: openai.OpenAI) -> None:
    call = json.dumps([{"name": "get_weather", "parameters": {"city": "Bern"}}])
    asked = {**says(f"<think>Bern.</think>{call}"), "tool_choice": "required"}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.model_extra or {})["reasoning"] == "Bern."
    [made] = message.tool_calls or []
    assert json.loads(made.function.arguments) == {"city": "Bern"}


def test_an_answer_to_a_prompt_that_ended_the_thought_is_constrained_at_once(
    client: openai.OpenAI,
) -> None:
    asked = {**says("<think>\n\n</think>\n\n"), "tools": openai.omit, "response_format": FORM}
    message = client.chat.completions.create(**asked, max_tokens=200).choices[0].message
    assert (message.content or "{").startswith("{")
    assert not (message.model_extra or {}).get("reasoning")
