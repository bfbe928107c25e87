"""Agents of LangChain, litellm, OpenAI's Agents SDK, Pydantic AI and Instructor, ten turns each,
through a fleet's Envoy.

The frameworks run in an environment of their own, which `make test-agents` makes; `AGENTS_PYTHON`
names the interpreter of another one.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet.framework_agents import CITIES, DONE, NAME
from tests.support.fleet.running_fleet import talking_fleet

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTS_PYTHON", ROOT / ".venv-agents/bin/python"))
pytestmark = [
    pytest.mark.envoy,
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="not installed: make test-agents"),
]
ANY_CHOICE = ("auto", "required", NAME)
CHOICES = {
    "langchain": ANY_CHOICE,
    "langchain_responses": ANY_CHOICE,
    "litellm": ANY_CHOICE,
    "openai_agents": ("auto",),
    "openai_agents_responses": ("auto",),
    "pydantic_ai": ("auto",),
    "instructor": (NAME,),
}
MIN_CACHED = 0.95


async def ten_turns(url: str, framework: str, choice: str, streams: bool) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, ROOT / "tests/support/fleet/framework_agents.py"),
        *(f"{url}/v1", framework, choice, str(streams)),
        stdout=asyncio.subprocess.PIPE,
        # litellm's import wants the network without the first one.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"},
    )
    written, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(written.splitlines()[-1])


@pytest.mark.parametrize("framework", CHOICES)
async def test_an_agent_goes_on_for_ten_turns(framework: str, tmp_path: Path) -> None:
    """Every call arrives, whatever the choice of tools, streamed and not, and so does the text
    behind them; all turns but the first find the conversation in the prefix cache.
    """
    async with talking_fleet(tmp_path) as fleet:
        for choice in CHOICES[framework]:
            for streams in (False, True):
                found = await ten_turns(fleet.url, framework, choice, streams)
                assert (found["asked"], found["answer"]) == (CITIES, DONE)
                assert min(found["shares"][1:], default=1) > MIN_CACHED, found["shares"]
