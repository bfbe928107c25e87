"""The official client against a real worker process: what users of the API see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
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
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A worker with two API keys, without waiting in its steps."""
    with sim_worker("--api-key", "sk-one", "sk-two", "--max-model-len", "512") as worker:
        yield worker.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """The synchronous client, which does not try again."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-two", max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    """The deltas of a seeded chat add up to its whole answer, and so does the usage."""
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 11, "max_tokens": 20}
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


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    """The same of text completions, with several prompts and answers."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["foko", "lasa"],
        "n": 2,
        "seed": 3,
        "max_tokens": 8,
    }
    whole = client.completions.create(**asked)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text != whole.choices[1].text
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {c.index: c.text for c in whole.choices}
    assert whole.usage.prompt_tokens == 2


def test_logprobs_are_aligned_with_the_answer(client: openai.OpenAI) -> None:
    """As many entries as tokens, whose bytes spell the text; streamed, each comes once."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "seed": 4,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": LONG,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 6
    spelled = b"".join(bytes(t.bytes or ()) for t in whole.logprobs.content)
    assert spelled.decode() == whole.message.content
    assert all(t.logprob <= 0 for t in whole.logprobs.content)
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += [] if logprobs is None or logprobs.content is None else logprobs.content
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in whole.logprobs.content]


def test_completion_logprobs_count_characters(client: openai.OpenAI) -> None:
    """The legacy shape: offsets into the text, and the echoed prompt in front."""
    answer = client.completions.create(
        model=MODEL, prompt=[300, 301], max_tokens=4, logprobs=2, echo=True, seed=1, extra_body=LONG
    ).choices[0]
    logprobs = answer.logprobs
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == 6
    assert "".join(logprobs.tokens) == answer.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert answer.text.startswith(token, offset)
    assert logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in logprobs.token_logprobs[1:])


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    """What a seeded answer says at its third word ends it when that word is a stop string."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "foko", "seed": 9, "max_tokens": 8}
    text = client.completions.create(**asked, extra_body=LONG).choices[0].text
    word = text.split()[2]
    cut = client.completions.create(**asked, stop=[word], extra_body=LONG).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(word)], "stop")
    assert cut.model_extra["stop_reason"] == word
    kept = client.completions.create(
        **asked, stop=word, extra_body={**LONG, "include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == text[: text.index(word) + len(word)]


class Step(pydantic.BaseModel):
    """Some of what pydantic puts into a schema."""

    kind: Literal["add", "remove"]
    count: int = pydantic.Field(ge=1, le=20)
    note: str | None


class Plan(pydantic.BaseModel):
    """A schema with a reference."""

    title: str
    steps: list[Step]


def test_an_answer_is_an_instance_of_a_model(client: openai.OpenAI) -> None:
    """The client makes a schema of the class and parses the answer with it."""
    answers = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Plan, n=3, seed=2, max_tokens=400
    ).choices
    ended = [choice for choice in answers if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(choice.message.parsed, Plan) for choice in ended)


def test_a_constrained_stream_says_the_same(client: openai.OpenAI) -> None:
    """With log probabilities, and up to a stop string."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "seed": 8,
        "max_tokens": 60,
        "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": BOOK}},
    }
    whole = client.chat.completions.create(**asked).choices[0]
    text = whole.message.content or ""
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert text.startswith("{")
    assert whole.logprobs is not None
    cut = client.chat.completions.create(**asked, stop=['"']).choices[0]
    assert cut.message.content == text[: text.index('"')]


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
    """Whatever the model: arguments are of the tool's schema, streamed or not."""
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "max_tokens": 300}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False}
    num_calls = 0
    for seed in range(6):
        whole = client.chat.completions.create(**asked, seed=seed).choices[0]
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            streamed = stream.get_final_completion().choices[0]
        calls = whole.message.tool_calls or []
        told = [(call.function.name, call.function.arguments) for call in calls]
        assert told == [
            (call.function.name, call.function.arguments)
            for call in streamed.message.tool_calls or []
        ]
        if whole.finish_reason == "length":
            continue
        assert (whole.finish_reason, len(told)) == ("tool_calls", 1)
        assert not whole.message.content
        for name, arguments in told:
            assert choice == "required" or name == "count"
            jsonschema.validate(json.loads(arguments), schemas[name])
            num_calls += 1
    assert num_calls


def test_text_completions_and_older_names_are_constrained(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["foko", "lasa"], "n": 2, "max_tokens": 30}
    for extra in (
        {"guided_choice": ["foko", "lasa"]},
        {"structured_outputs": {"regex": "foko|lasa"}},
        {"guided_grammar": 'root ::= "foko" | "lasa"'},
    ):
        for choice in client.completions.create(**asked, extra_body=extra).choices:
            assert (choice.text in ("foko", "lasa"), choice.finish_reason) == (True, "stop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be in"),
        ({"n": 17}, "n must be at most 16"),
        ({"max_tokens": 4096}, "max_tokens=4096 cannot be greater than max_model_len"),
        ({"messages": [{"role": "user", "content": "foko " * 600}]}, "maximum context length"),
        ({"extra_body": {"best_of": 2}}, "`best_of` is not supported yet"),
        (
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "some"},
            "tool_choice must be one",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"not": {}}},
                }
            },
            "cannot be enforced: Unimplemented keys",
        ),
    ],
)
def test_a_bad_request_is_a_bad_request_error(
    client: openai.OpenAI, fields: dict[str, Any], message: str
) -> None:
    """A 400 with a message, a type and, in `param`, the place."""
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})
    assert caught.value.type in ("BadRequestError", "Bad Request")
    assert caught.value.param


def test_errors_are_the_clients_exceptions(url: str, client: openai.OpenAI) -> None:
    """A wrong model, key or path each raise their own class."""
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=MODEL, prompt="x")
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.models.retrieve("org/other")
    assert (unknown.value.param, unknown.value.type) == ("model", "NotFoundError")


async def test_many_asynchronous_chats_run_at_once(async_client: openai.AsyncOpenAI) -> None:
    """Each gets its own answer, the one its seed gives alone."""

    async def ask(seed: int) -> str | None:
        answer = await async_client.chat.completions.create(
            model=MODEL, messages=HELLO, seed=seed, max_tokens=10
        )
        return answer.choices[0].message.content

    together = await asyncio.gather(*(ask(seed) for seed in range(8)))
    assert together == [await ask(seed) for seed in range(8)]


async def bench_request(url: str, path: str, payload: dict[str, Any]) -> dict[str, Any]:
    """One request as `vllm bench serve` sends and reads it: SSE, timestamps, usage."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-one"}
    text, usage, stamps, buffer, done = "", None, [], "", False
    async with httpx.AsyncClient(timeout=60) as http:
        request = http.build_request("POST", url + path, json=payload, headers=headers)
        response = await http.send(request, stream=True)
        assert response.status_code == 200
        async for piece in response.aiter_bytes():
            buffer += piece.decode("utf-8")
            while "\n\n" in buffer:
                message, buffer = buffer.split("\n\n", 1)
                if message.startswith(":"):
                    continue
                data = message.strip().removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if choices := event.get("choices"):
                    stamps.append(time.perf_counter())
                    chunk = choices[0]
                    text += chunk.get("text") or chunk.get("delta", {}).get("content") or ""
                if event.get("usage"):
                    assert not done
                    usage = event["usage"]
        await response.aclose()
    assert done
    assert buffer == ""
    return {"text": text, "usage": usage, "stamps": stamps}


@pytest.mark.parametrize("chat", [False, True])
async def test_the_pattern_of_vllm_bench_serve_runs(url: str, chat: bool) -> None:
    """Eight of its requests at once: each ends with its usage, which counts what was asked for."""
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
    found = await asyncio.gather(*(bench_request(url, path, {**body, **options}) for _ in range(8)))
    for result in found:
        assert result["usage"]["completion_tokens"] == 16
        assert len(result["text"].split()) == 16
        assert result["stamps"] == sorted(result["stamps"])
    assert len({result["text"] for result in found}) == 1


@pytest.fixture(scope="module")
def model_url(model_path: Path) -> Iterator[str]:
    """A worker with the real model."""
    flags = ("--engine", "torch", "--model", str(model_path), "--max-model-len", "512")
    with sim_worker(*flags, "--served-model-name", "tiny") as worker:
        yield worker.url


@pytest.mark.model
def test_the_models_own_answer_is_scored(model_url: str) -> None:
    """Greedy: each token is the likeliest one, and an echo gives it the same probability."""
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


@pytest.mark.model
def test_the_models_answers_repeat_by_seed_and_differ_by_branch(model_url: str) -> None:
    """n answers of one seed are different, and the same when asked again."""
    client = openai.OpenAI(base_url=f"{model_url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "n": 3, "seed": 5}
    asked["temperature"] = 1.0  # its card's is 0.2
    with client:
        first, second = (
            client.chat.completions.create(**asked, max_tokens=12).choices for _ in range(2)
        )
        texts = [c.message.content for c in first]
        assert texts == [c.message.content for c in second]
        assert len(set(texts)) == 3


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
@pytest.mark.parametrize("speculates", [False, True])
def test_the_models_answers_validate(model_path: Path, speculates: bool) -> None:
    """Sampled, streamed or not, with drafts and without: the same answers, all of the schema."""
    flags = ["--engine", "torch", "--model", str(model_path), "--max-model-len", "512"]
    if speculates:
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
