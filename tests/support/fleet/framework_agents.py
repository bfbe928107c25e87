"""Agents of clients' frameworks, ten turns with tools each; run in an environment of theirs.

`python framework_agents.py URL FRAMEWORK CHOICE STREAMS` talks to an echo model: what a tool
answers is what the model says next, so each turn's result holds the next turn's call. It writes
what the tool was asked for, the last answer, and the share of each turn's prompt that was cached.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

CITIES = [f"City {n} 🙂" for n in range(10)]
NAME = "get_weather"
DONE = "All are sunny."
MANUAL = "".join(f"Rule {n}: look at the weather of a city before you speak.\n" for n in range(250))
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "The weather.", "parameters": PARAMETERS},
}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# The text with which a model makes a call, by `tool_choice`.
SPELLINGS: dict[str, Callable[[str], str]] = {
    "auto": lambda city: (
        f"I look.<tool_call>{_json({'name': NAME, 'arguments': {'city': city}})}</tool_call>"
    ),
    "required": lambda city: _json([{"name": NAME, "parameters": {"city": city}}]),
    NAME: lambda city: _json({"city": city}),
}


class Weather:
    """The tool: notes the cities it was asked for, and answers with the call of the next one."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._texts = [*map(spell, CITIES), DONE]
        self.asked: list[str] = []
        self.shares: list[float] = []

    @property
    def text(self) -> str:
        return self._texts[len(self.asked)]

    def look(self, city: str) -> str:
        self.asked.append(city)
        return self.text

    def used(self, cached: int, prompt: int) -> None:
        self.shares.append(cached / prompt)


async def langchain(url: str, weather: Weather, choice: str, streams: bool) -> str:
    return await _langchain(url, weather, choice, streams, responses=False)


async def langchain_responses(url: str, weather: Weather, choice: str, streams: bool) -> str:
    return await _langchain(url, weather, choice, streams, responses=True)


async def _langchain(
    url: str, weather: Weather, choice: str, streams: bool, *, responses: bool
) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    tool = StructuredTool.from_function(weather.look, name=NAME, description="The weather.")
    model = ChatOpenAI(
        model="echo",
        base_url=url,
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
        stream_usage=True,
    )
    bound = model.bind_tools([tool], tool_choice=choice)
    messages: list[Any] = [SystemMessage(MANUAL), HumanMessage(weather.text)]

    def note(message: Any) -> None:
        usage = message.usage_metadata
        weather.used(usage["input_token_details"]["cache_read"], usage["input_tokens"])

    for _ in CITIES:
        if streams:
            chunks = [chunk async for chunk in bound.astream(messages)]
            assert len(chunks) > 2
            message = sum(chunks[1:], chunks[0])
        else:
            message = await bound.ainvoke(messages)
        note(message)
        [call] = message.tool_calls
        if responses and choice == "auto":
            kinds = [(block["type"], "id" in block) for block in message.content]
            assert kinds == [("text", True), ("function_call", True)], message.content
        messages += [message, await tool.ainvoke(call)]
    last = await model.ainvoke(messages)
    return last.text if isinstance(last.text, str) else last.text()


async def litellm(url: str, weather: Weather, choice: str, streams: bool) -> str:
    import litellm as lib

    where = {"model": "openai/echo", "api_base": url, "api_key": "none", "max_retries": 0}
    named = {"type": "function", "function": {"name": NAME}}
    tools = {"tools": [TOOL], "tool_choice": named if choice == NAME else choice}
    messages: list[Any] = [
        {"role": "system", "content": MANUAL},
        {"role": "user", "content": weather.text},
    ]
    for _ in CITIES:
        asked: dict[str, Any] = {**where, **tools, "messages": messages, "stream": streams}
        if streams:
            asked["stream_options"] = {"include_usage": True}
        answer = await lib.acompletion(**asked)
        if streams:
            chunks = [chunk async for chunk in answer]
            assert len(chunks) > 2
            answer = lib.stream_chunk_builder(chunks, messages=messages)
        _note_usage(weather, answer.usage)
        message = answer.choices[0].message
        [call] = message.tool_calls
        result = weather.look(**json.loads(call.function.arguments))
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
    answer = await lib.acompletion(**where, messages=messages)
    return answer.choices[0].message.content


async def openai_agents(url: str, weather: Weather, choice: str, streams: bool) -> str:
    from agents import OpenAIChatCompletionsModel

    return await _openai_agents(url, weather, streams, OpenAIChatCompletionsModel)


async def openai_agents_responses(url: str, weather: Weather, choice: str, streams: bool) -> str:
    from agents import OpenAIResponsesModel

    return await _openai_agents(url, weather, streams, OpenAIResponsesModel)


async def _openai_agents(url: str, weather: Weather, streams: bool, kind: Any) -> str:
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = kind(model="echo", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    agent = Agent(
        name="Weather",
        instructions=MANUAL,
        tools=[function_tool(weather.look, name_override=NAME)],
        model=model,
        model_settings=ModelSettings(include_usage=True),
    )
    turns = len(CITIES) + 1
    if streams:
        result: Any = Runner.run_streamed(agent, weather.text, max_turns=turns)
        assert len([event async for event in result.stream_events()]) > turns
    else:
        result = await Runner.run(agent, weather.text, max_turns=turns)
    for response in result.raw_responses:
        usage = response.usage
        weather.used(usage.input_tokens_details.cached_tokens, usage.input_tokens)
    return result.final_output


async def pydantic_ai(url: str, weather: Weather, choice: str, streams: bool) -> str:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("echo", provider=OpenAIProvider(base_url=url, api_key="none"))
    tool = Tool(weather.look, name=NAME, takes_ctx=False)
    agent = Agent(model, instructions=MANUAL, tools=[tool])
    if streams:
        # Text ahead of a call would end `run_stream`.
        async with agent.iter(weather.text) as result:
            async for node in result:
                if Agent.is_model_request_node(node):
                    async with node.stream(result.ctx) as stream:
                        assert len([event async for event in stream]) > 2
        run: Any = result.result
    else:
        run = await agent.run(weather.text)
    for message in run.all_messages():
        if message.kind == "response":
            weather.used(message.usage.cache_read_tokens, message.usage.input_tokens)
    return run.output


async def instructor(url: str, weather: Weather, choice: str, streams: bool) -> str:
    import instructor as lib
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Asked(BaseModel):
        city: str

    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    patched = lib.from_openai(client, mode=lib.Mode.TOOLS)
    messages: list[Any] = [
        {"role": "system", "content": MANUAL},
        {"role": "user", "content": weather.text},
    ]
    for _ in CITIES:
        asked: dict[str, Any] = {"model": "echo", "messages": messages, "max_retries": 1}
        if streams:
            parts = patched.chat.completions.create_partial(response_model=Asked, **asked)
            *_, made = [part async for part in parts]
            call: dict[str, Any] = {"id": "call_1", "type": "function"}
            call["function"] = {"name": "Asked", "arguments": made.model_dump_json()}
        else:
            with_completion = patched.chat.completions.create_with_completion
            made, whole = await with_completion(response_model=Asked, **asked)
            _note_usage(weather, whole.usage)
            call = whole.choices[0].message.tool_calls[0].model_dump(exclude_none=True)
        result = weather.look(made.city)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    last = await client.chat.completions.create(model="echo", messages=messages)
    return last.choices[0].message.content or ""


def _note_usage(weather: Weather, usage: Any) -> None:
    weather.used(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)


FRAMEWORKS: dict[str, Callable[[str, Weather, str, bool], Awaitable[str]]] = {
    one.__name__: one
    for one in (
        langchain,
        langchain_responses,
        litellm,
        openai_agents,
        openai_agents_responses,
        pydantic_ai,
        instructor,
    )
}


async def main(url: str, framework: str, choice: str, streams: str) -> None:
    weather = Weather(SPELLINGS[choice])
    answer = await FRAMEWORKS[framework](url, weather, choice, streams == "True")
    found = {"asked": weather.asked, "answer": answer, "shares": weather.shares}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
