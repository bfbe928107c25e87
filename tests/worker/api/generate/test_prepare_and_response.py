"""From a body to engine requests, and from engine outputs to an answer."""

import asyncio
import json
from typing import Any

import pytest

from worker.errors import EngineDeadError
from worker.tokenizer import sim
from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[Any]:
    frames = body.split("\n\n")
    assert frames.pop() == ""
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


async def test_a_chat_is_rendered_run_and_answered(bench: Any) -> None:
    response = await bench.post(CHAT, {"messages": USER, "model": "alias"})
    body = response.json()
    assert response.status_code == 200
    assert body["model"] == "tiny"
    assert body["choices"][0]["message"]["content"] == "hi"
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (
        "stop",
        None,
    )
    (request,) = bench.engine.requests
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == sim.SimTokenizer().encode(prompt, add_special_tokens=False)
    # Without a limit of its own, an answer may fill the context.
    assert request.params.max_tokens == 64 - len(request.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert bench.engine.aborted == []


async def test_a_chat_streams_role_text_and_ending(bench: Any) -> None:
    asked = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    response = await bench.post(CHAT, asked)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    role, first, last, usage, done = events(response.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"] for c in (first, last)] == [{"content": "h"}, {"content": "i"}]
    assert [c["choices"][0]["finish_reason"] for c in (first, last)] == [None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"
    assert len({(e["id"], e["created"]) for e in (role, first, last, usage)}) == 1


async def test_usage_can_come_with_every_chunk(bench: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "a", "stream": True, "stream_options": options}
    response = await bench.post(TEXT, asked)
    counts = [e["usage"]["completion_tokens"] for e in events(response.text)[:-1]]
    assert counts == [1, 3, 3]


async def test_cached_tokens_are_reported(bench: Any) -> None:
    bench.engine.steps = [bench.say("x", FinishReason.LENGTH, cached=16)]
    async with bench.client() as client:
        body = (await client.post(TEXT, json={"prompt": "a"})).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert body["choices"][0]["finish_reason"] == "length"
    assert bench.engine.requests[0].params.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_several_choices(bench: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"prompt": ["a", "b b"], "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    response = await bench.post(TEXT, asked)
    assert len({r.request_id for r in bench.engine.requests}) == 2
    if not stream:
        body = response.json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "hi"), (1, "hi")]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 6)
        return
    *chunks, usage, done = events(response.text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert (texts, done) == ({0: "hi", 1: "hi"}, "[DONE]")
    assert usage["usage"]["total_tokens"] == 9


async def test_token_ids_are_a_prompt(bench: Any) -> None:
    async with bench.client() as client:
        await client.post(TEXT, json={"prompt": [5, 6, 7]})
        await client.post(TEXT, json={"prompt": [[5], [6]]})
    assert [r.prompt_token_ids for r in bench.engine.requests] == [[5, 6, 7], [5], [6]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_chunks_ends_and_aborts(bench: Any, stream: bool) -> None:
    never = asyncio.Event()
    bench.engine.steps = [bench.say(t) for t in ("one E", "N", "D two")] + [never]
    response = await bench.post(TEXT, {"prompt": "a", "stop": ["END"], "stream": stream})
    if stream:
        *chunks, done = events(response.text)
        choices = [c["choices"][0] for c in chunks]
        assert done == "[DONE]"
    else:
        choices = response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "one "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")
    assert bench.engine.aborted == [bench.engine.requests[0].request_id]


async def test_a_stop_token_of_the_client_is_reported(bench: Any) -> None:
    bench.engine.steps = [bench.say("ab", FinishReason.STOP, stop_token=ord("b"))]
    async with bench.client() as client:
        body = (await client.post(TEXT, json={"prompt": "a", "stop_token_ids": [ord("b")]})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("a", ord("b"))


async def test_characters_cut_by_tokens_arrive_whole(bench: Any) -> None:
    raw = "€".encode()
    steps = [bench.say([b]) for b in raw]
    bench.engine.steps = [*steps, bench.say([raw[0]], FinishReason.LENGTH)]
    response = await bench.post(TEXT, {"prompt": "a", "stream": True})
    texts = [e["choices"][0]["text"] for e in events(response.text)[:-1]]
    assert texts == ["€", "�"]


async def test_the_clients_request_id_is_in_ours(bench: Any) -> None:
    async with bench.client(enable_request_id_headers=True) as client:
        first = await client.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "r-1"})
        await client.post(CHAT, json={"messages": USER}, headers={"x-request-id": "r-1"})
    third = await bench.post(TEXT, {"prompt": "a", "request_id": "r-2"})
    assert first.json()["id"] == "cmpl-r-1"
    assert first.headers["x-request-id"] == "r-1"
    assert third.json()["id"] == "cmpl-r-2"
    ids = [r.request_id for r in bench.engine.requests]
    assert ids[1].startswith("chatcmpl-r-1")
    assert len(set(ids)) == 3


async def test_max_tokens_is_clamped_to_the_room(bench: Any) -> None:
    async with bench.client() as client:
        await client.post(TEXT, json={"prompt": [1] * 60, "max_tokens": 50})
    assert bench.engine.requests[0].params.max_tokens == 4


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (TEXT, {"prompt": "a", "model": "gpt-5"}, 404, "model", "The model `gpt-5` does not exist"),
        (TEXT, {"prompt": ""}, 400, "prompt", "prompt cannot be empty"),
        (
            TEXT,
            {"prompt": [1] * 65},
            400,
            "input_tokens",
            "This model's maximum context length is 64 tokens.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x " * 2000}]},
            400,
            "input_text",
            "This model's maximum context length is 64 tokens.",
        ),
        (TEXT, {"prompt": [99999]}, 400, None, "Token id 99999"),
        (TEXT, {"prompt": "a", "max_tokens": 65}, 400, "max_tokens", "max_tokens=65 cannot be"),
        (CHAT, {"messages": []}, 400, None, "messages is empty"),
        (TEXT, {"prompt": "a", "temperature": 3}, 400, "temperature", "temperature must be"),
    ],
)
async def test_errors_have_a_status_and_a_field(
    bench: Any, path: str, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    response = await bench.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param)
    assert error["message"].startswith(message)
    assert bench.engine.requests == []


@pytest.mark.parametrize("model", [None, "", "tiny", "alias", "/models/tiny"])
async def test_every_name_of_the_model_is_taken(bench: Any, model: str | None) -> None:
    response = await bench.post(TEXT, {"prompt": "a", "model": model})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", ["dies", "error", "abort"])
async def test_a_failure_before_the_first_token_has_a_status(
    bench: Any, stream: bool, failure: str
) -> None:
    step, status = {
        "dies": (EngineDeadError("gone"), 503),
        "error": (bench.say([], FinishReason.ERROR, error="no blocks"), 500),
        "abort": (bench.say([], FinishReason.ABORT, error="we stop"), 503),
    }[failure]
    bench.engine.steps = [step]
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert ("retry-after" in response.headers) is (status == 503)
    reason = "abort" if failure == "abort" else "error"
    assert f'finished_reason="{reason}"}} 1\n' in api.page()
