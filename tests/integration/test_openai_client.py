"""The official client against a real worker process: what users of the API see."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.support.worker.sim_worker import sim_worker

MODEL = "sim"
HELLO: list[Any] = [{"role": "user", "content": "foko lasa vomo"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sim_worker("--api-key", "sk-one", "sk-two", "--max-model-len", "512") as worker:
        yield worker.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 11, "max_tokens": 20}
    asked |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert whole.system_fingerprint == chunks[-1].system_fingerprint
    assert len({c.id for c in chunks}) == 1
    scored = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    assert [t for one in scored for t in one.content or ()] == whole.choices[0].logprobs.content


class Step(pydantic.BaseModel):
    kind: Literal["add", "remove"]
    count: int = pydantic.Field(ge=1, le=20)
    note: str | None


class Plan(pydantic.BaseModel):
    title: str
    steps: list[Step]


def test_an_answer_is_an_instance_of_a_model(client: openai.OpenAI) -> None:
    answers = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Plan, n=3, seed=2, max_tokens=400
    ).choices
    ended = [choice for choice in answers if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(choice.message.parsed, Plan) for choice in ended)


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {key: {"enum": values}, "note": {"type": "string", "maxLength": 9}},
                "required": [key, "note"],
            },
        },
    }
    for name, key, values in (("paint", "colour", ["red", "blue"]), ("count", "number", [1, 2, 3]))
]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "count"}}], ids=str
)
def test_calls_that_must_come_come_and_validate(client: openai.OpenAI, choice: Any) -> None:
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "max_tokens": 300}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False}
    num_calls = 0
    for seed in range(6):
        whole = client.chat.completions.create(**asked, seed=seed).choices[0]
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            streamed = stream.get_final_completion().choices[0]
        calls = whole.message.tool_calls or []
        called = [(call.function.name, call.function.arguments) for call in calls]
        assert called == [
            (call.function.name, call.function.arguments)
            for call in streamed.message.tool_calls or []
        ]
        if whole.finish_reason == "length":
            continue
        assert (whole.finish_reason, len(called)) == ("tool_calls", 1)
        assert not whole.message.content
        for name, arguments in called:
            assert choice == "required" or name == "count"
            jsonschema.validate(json.loads(arguments), schemas[name])
            num_calls += 1
    assert num_calls


def test_errors_are_the_clients_exceptions(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be in") as wrong:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "BadRequestError")
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.models.retrieve("org/other")
    assert (unknown.value.param, unknown.value.type) == ("model", "NotFoundError")


async def bench_request(http: httpx.AsyncClient, path: str, payload: dict[str, Any]) -> str:
    response = await http.post(path, json=payload)
    assert response.status_code == 200
    *messages, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    text, usage = "", None
    for message in messages:
        if message.startswith(":"):
            continue
        event = json.loads(message.removeprefix("data: "))
        for chunk in event["choices"][:1]:
            text += chunk.get("text") or chunk.get("delta", {}).get("content") or ""
        usage = event.get("usage") or usage
    assert usage["completion_tokens"] == len(text.split()) == 16
    return text


@pytest.mark.parametrize("chat", [False, True])
async def test_the_pattern_of_vllm_bench_serve_runs(url: str, chat: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    if chat:
        path = "/v1/chat/completions"
        content = [{"type": "text", "text": "foko lasa " * 10}]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": 16,
            "temperature": 0.0,
        }
    else:
        path = "/v1/completions"
        body = {
            "model": MODEL,
            "prompt": "foko lasa " * 10,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 16,
            "logprobs": None,
        }
    headers = {"Authorization": "Bearer sk-one"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        asking = (bench_request(http, path, {**body, **options}) for _ in range(8))
        assert len(set(await asyncio.gather(*asking))) == 1


@pytest.fixture(scope="module")
def model_url(model_path: Path) -> Iterator[str]:
    flags = ("--engine", "torch", "--model", str(model_path), "--max-model-len", "512")
    with sim_worker(*flags, "--served-model-name", "tiny") as worker:
        yield worker.url


@pytest.mark.model
def test_the_models_own_answer_is_scored(model_url: str) -> None:
    client = openai.OpenAI(base_url=f"{model_url}/v1", api_key="none", max_retries=0)
    with client:
        answer = client.completions.create(
            model="tiny",
            prompt="The capital of France is",
            temperature=0,
            max_tokens=4,
            logprobs=2,
            extra_body={"return_token_ids": True},
        ).choices[0]
        assert answer.logprobs is not None
        assert answer.text.startswith(" Paris")
        likeliest = [max(top, key=top.__getitem__) for top in answer.logprobs.top_logprobs or ()]
        assert likeliest == answer.logprobs.tokens
        scored = client.completions.create(
            model="tiny",
            prompt=[*answer.model_extra["prompt_token_ids"], *answer.model_extra["token_ids"]],
            echo=True,
            max_tokens=0,
            logprobs=0,
        ).choices[0]
    assert scored.text == "The capital of France is" + answer.text
    assert scored.logprobs is not None
    assert (scored.logprobs.tokens or [])[-4:] == answer.logprobs.tokens
    assert (scored.logprobs.token_logprobs or [])[-4:] == pytest.approx(
        answer.logprobs.token_logprobs, abs=2e-3
    )


BOOK = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 30},
        "year": {"type": "integer", "minimum": 1500, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["novel", "poem"]}, "maxItems": 2},
    },
    "required": ["title", "year", "tags"],
}


@pytest.mark.model
def test_the_models_answers_validate(model_path: Path) -> None:
    flags = ["--engine", "torch", "--model", str(model_path), "--max-model-len", "512"]
    flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Name a famous book, as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": BOOK}},
        "max_tokens": 120,
        "seed": 3,
    }
    with (
        sim_worker(*flags, "--served-model-name", "tiny") as worker,
        openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answers = client.chat.completions.create(**asked, n=3).choices
        chunks = list(client.chat.completions.create(**asked, stream=True))
    for answer in answers:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content or ""), BOOK)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert streamed == answers[0].message.content


@pytest.mark.parametrize("of_model", ["url", pytest.param("model_url", marks=pytest.mark.model)])
def test_a_beam_search_answers_with_its_best_beams(
    request: pytest.FixtureRequest, of_model: str
) -> None:
    client = openai.OpenAI(
        base_url=f"{request.getfixturevalue(of_model)}/v1", api_key="sk-one", max_retries=0
    )
    beams = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.0, "ignore_eos": True}
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6, "logprobs": 1}
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, n=3, **asked, extra_body=beams)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    sums = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
    assert sums == sorted(sums, reverse=True)
    assert {len(choice.logprobs.tokens) for choice in answer.choices} == {6}
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 18
    fields = {"ignore_eos": True}
    greedy = client.completions.create(model=model, temperature=0, **asked, extra_body=fields)
    assert sums[0] >= sum(greedy.choices[0].logprobs.token_logprobs) - 1e-3
    chat = client.chat.completions.create(
        model=model, messages=HELLO, n=2, max_tokens=5, extra_body={"use_beam_search": True}
    )
    assert len(chat.choices) == 2
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.completions.create(model=model, stream=True, **asked, extra_body=beams)
