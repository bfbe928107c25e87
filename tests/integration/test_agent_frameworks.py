"""Agents of LangChain and litellm, ten turns each, through a fleet's Envoy.

What a tool answers is what the model says next, so each turn's result holds the next turn's call.
The frameworks are the extra `agents`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet.running_fleet import Fleet, free_base_port, running_fleet
from tests.support.model.echo_model import TOOLS, write_echo_model

pytestmark = [pytest.mark.envoy, pytest.mark.full]

CITIES = [f"City {n} 🙂" for n in range(10)]
NAME = "get_weather"
NAMED = {"type": "function", "function": {"name": NAME}}
DONE = "All are sunny."


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# How a model says a call, by what `tool_choice` is.
SPELLINGS: dict[str, Callable[[str], str]] = {
    "auto": lambda city: (
        f"<tool_call>{_json({'name': NAME, 'arguments': {'city': city}})}</tool_call>"
    ),
    "required": lambda city: _json([{"name": NAME, "parameters": {"city": city}}]),
    NAME: lambda city: _json({"city": city}),
}


class Weather:
    """The tool: notes the cities it was asked for, and answers with the call of the next one."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._texts = [*map(spell, CITIES), DONE]
        self.asked: list[str] = []

    @property
    def text(self) -> str:
        """What the model is to say next."""
        return self._texts[len(self.asked)]

    def look(self, city: str) -> str:
        """One call of the tool."""
        self.asked.append(city)
        return self.text


@asynccontextmanager
async def echo_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Two workers that say what they are sent."""
    _, model, *flags = write_echo_model(folder)
    worker_args = " ".join((*flags, "--sim-time-scale", "0"))
    ways = ("--workers", "2", "--model", model, "--worker-args", worker_args)
    async with running_fleet(free_base_port(), *ways) as fleet:
        await fleet.ready()
        yield fleet


async def langchain_agent(url: str, weather: Weather, choice: str, streams: bool) -> str:
    """Until it answers without a call, or ten turns; its last text."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    tool = StructuredTool.from_function(weather.look, name=NAME, description="The weather.")
    model = ChatOpenAI(model="echo", base_url=url, api_key="none", max_retries=0)
    bound = model.bind_tools([tool], tool_choice=choice)
    messages: list[Any] = [HumanMessage(weather.text)]
    for _ in CITIES:
        if streams:
            chunks = [chunk async for chunk in bound.astream(messages)]
            assert len(chunks) > 2
            message = sum(chunks[1:], chunks[0])
        else:
            message = await bound.ainvoke(messages)
        [call] = message.tool_calls
        messages += [message, await tool.ainvoke(call)]
    return (await model.ainvoke(messages)).content


async def litellm_agent(url: str, weather: Weather, choice: str, streams: bool) -> str:
    """The same with litellm's OpenAI-compatible provider."""
    import litellm

    where = {"model": "openai/echo", "api_base": url, "api_key": "none", "max_retries": 0}
    tools = {"tools": TOOLS, "tool_choice": NAMED if choice == NAME else choice}
    messages: list[Any] = [{"role": "user", "content": weather.text}]
    for _ in CITIES:
        answer = await litellm.acompletion(**where, **tools, messages=messages, stream=streams)
        if streams:
            chunks = [chunk async for chunk in answer]
            assert len(chunks) > 2
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        message = answer.choices[0].message
        [call] = message.tool_calls
        result = weather.look(**json.loads(call.function.arguments))
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
    answer = await litellm.acompletion(**where, messages=messages)
    return answer.choices[0].message.content


@pytest.mark.parametrize(
    ("module", "agent"),
    [("langchain_openai", langchain_agent), ("litellm", litellm_agent)],
    ids=["LangChain", "litellm"],
)
async def test_an_agent_goes_on_for_ten_turns(
    module: str, agent: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every choice of tools, streamed and not: each call arrives, and the text behind them."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import wants the network
    pytest.importorskip(module, reason="not installed: pip install '.[agents]'")
    async with echo_fleet(tmp_path) as fleet:
        for choice, spell in SPELLINGS.items():
            for streams in (False, True):
                weather = Weather(spell)
                assert await agent(f"{fleet.url}/v1", weather, choice, streams) == DONE
                assert weather.asked == CITIES
