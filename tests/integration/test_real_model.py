"""The README, followed to the letter: a fleet with the real model, its curl, its Python."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.fleet.running_fleet import Fleet, pointsman, ready_fleet

pytestmark = [pytest.mark.envoy, pytest.mark.model]

README = (Path(__file__).parents[2] / "README.md").read_text()
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# What transformers says, greedily, on the dequantized weights in float32.
ANSWER = "The capital of France is Paris."


def example(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if containing in block)


async def output_of(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_the_readme_works(model_path: Path) -> None:
    flags = ("--engine", "torch", "--model", str(model_path))
    async with ready_fleet(*flags) as fleet:
        lines = fleet.output.splitlines()
        assert len(lines) <= 18, fleet.output  # a busy machine takes more than ten seconds
        assert "a small one, often wrong; better: --model Qwen2.5-Coder-0.5B" in fleet.output
        assert "warn" not in fleet.output.lower()
        await the_printed_curl_streams(fleet)
        await the_readmes_python_answers(fleet)
        await the_openai_client_gets_the_models_answer(fleet)
        said = await pointsman("chat", "--url", fleet.url, "--max-tokens", "5", "Hello!")
        assert said.returncode == 0
        assert said.stdout.strip()


async def the_printed_curl_streams(fleet: Fleet) -> None:
    """Both curls, the one `up` prints and the README's, end in a complete stream; the first answer
    that a newcomer gets is right.
    """
    printed = fleet.output[fleet.output.index("curl -N") :].partition("\n\n")[0]
    readme = example("bash", "curl -N").replace("http://127.0.0.1:8080", fleet.url)
    # Else the answer is one of chance, which may end sooner.
    options = '"max_tokens": 8, "ignore_eos": true, "temperature": 0'
    for command in (printed, readme):
        seeded = command.replace('"max_tokens": 200', '"max_tokens": 200, "seed": 41')
        first = "".join(re.findall(r'"content": ?"([^"]*)"', await output_of("bash", "-c", seeded)))
        assert first == "The capital of Japan is Tokyo."
        short = command.replace('"max_tokens": 200', options)
        frames = (await output_of("bash", "-c", short)).strip().split("\n\n")
        assert frames[-1] == "data: [DONE]"
        deltas = [json.loads(f.removeprefix("data: "))["choices"][0] for f in frames[:-1]]
        assert "".join(d["delta"].get("content") or "" for d in deltas).strip()
        assert deltas[-1]["finish_reason"] == "length"


async def the_readmes_python_answers(fleet: Fleet) -> None:
    code = example("python", "OpenAI").replace("http://127.0.0.1:8080", fleet.url)
    answer = await output_of(sys.executable, "-c", code)
    assert all(color in answer for color in ("Red", "Blue", "Yellow"))


async def the_openai_client_gets_the_models_answer(fleet: Fleet) -> None:
    (listed,) = [model async for model in fleet.openai.models.list()]
    model = listed.id
    whole = await fleet.openai.chat.completions.create(
        model=model, messages=QUESTION, temperature=0
    )
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    stream = await fleet.openai.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == ANSWER
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
