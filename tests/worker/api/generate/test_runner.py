"""Sequences run side by side: order of the choices, counts, records, and ends."""

import asyncio
import json
from typing import Any

import pytest

from worker.engine.messages import AddRequest
from worker.errors import EngineDeadError
from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[Any]:
    payloads = [f.removeprefix("data: ") for f in body.split("\n\n") if f.startswith("data: ")]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


def outputs_of(bench: Any) -> None:
    """Make each sequence say its prompt's first token and its number; later ones end first."""

    def script(request: AddRequest, branch: int) -> list[Any]:
        name = f"{request.prompt_token_ids[0]}.{branch}"
        words = [bench.say(" " * (3 - branch))] * (3 - branch)
        return [*words, bench.say(name, FinishReason.LENGTH, cached=1)]

    bench.engine.script = script


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_by_prompt_then_answer(bench: Any, stream: bool) -> None:
    outputs_of(bench)
    asked: dict[str, Any] = {"prompt": [[1, 2], [7]], "n": 3, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    response = await bench.post(TEXT, asked)
    if stream:
        *chunks, last, done = events(response.text)
        texts = dict.fromkeys(range(6), "")
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert done == "[DONE]"
        usage = last["usage"]
        ends = [c for c in chunks if c["choices"][0]["finish_reason"]]
        assert len(ends) == 6
    else:
        body = response.json()
        assert [c["index"] for c in body["choices"]] == list(range(6))
        texts = {c["index"]: c["text"] for c in body["choices"]}
        usage = body["usage"]
    expected = ["1.0", "1.1", "1.2", "7.0", "7.1", "7.2"]
    assert [texts[i].strip() for i in range(6)] == expected
    # Three prompt tokens, whatever n; each answer 3 bytes of name and its spaces.
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 2 * (3 * 3 + 9 + 4 + 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_streamed_chat_opens_every_answer_once(bench: Any) -> None:
    outputs_of(bench)
    asked = {"messages": USER, "n": 3, "stream": True}
    response = await bench.post(CHAT, asked)
    found = events(response.text)
    assert found.count("[DONE]") == 1
    assert found[-1] == "[DONE]"
    choices = [e["choices"][0] for e in found[:-1]]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1, 2]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]


async def test_the_last_record_of_a_request_carries_its_n(bench: Any) -> None:
    outputs_of(bench)
    api = bench.api()
    async with bench.client_of(api) as client:
        await client.post(TEXT, json={"prompt": [[1], [2]], "n": 3})
    page = api.page()
    assert 'finished_reason="length"} 6\n' in page
    assert 'vllm:request_params_n_count{model_name="tiny",engine="0"} 2\n' in page
    assert 'vllm:request_params_n_sum{model_name="tiny",engine="0"} 6' in page
    longest = "vllm:request_max_num_generation_tokens"
    assert f'{longest}_sum{{model_name="tiny",engine="0"}} 24' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answers_failure_ends_them_all(bench: Any, stream: bool) -> None:
    never = asyncio.Event()

    def script(request: AddRequest, branch: int) -> list[Any]:
        if branch == 1:
            return [bench.say([], FinishReason.ERROR, error="corrupt")]
        return [never]

    bench.engine.script = script
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "n": 3, "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "corrupt")
    (request,) = bench.engine.requests
    assert sorted(bench.engine.aborted) == sorted([request.request_id, request.branch_ids[1]])
    page = api.page()
    assert 'finished_reason="error"} 1\n' in page
    assert 'finished_reason="abort"} 2\n' in page


async def test_an_engine_that_is_gone_fails_every_sequence_once(bench: Any) -> None:
    def gone(request: AddRequest, branch: int) -> list[Any]:
        raise EngineDeadError("gone")

    bench.engine.script = gone
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a", "n": 2})
    assert response.status_code == 503
    assert 'finished_reason="error"} 2\n' in api.page()


async def test_a_stop_string_ends_one_answer_and_not_the_others(bench: Any) -> None:

    def script(request: AddRequest, branch: int) -> list[Any]:
        if branch == 0:
            return [bench.say("aENDb"), asyncio.Event()]
        return [bench.say("xyz"), bench.say("!", FinishReason.LENGTH)]

    bench.engine.script = script
    async with bench.client() as client:
        body = (await client.post(TEXT, json={"prompt": "a", "n": 2, "stop": "END"})).json()
    assert [(c["text"], c["stop_reason"]) for c in body["choices"]] == [
        ("a", "END"),
        ("xyz!", None),
    ]
    assert bench.engine.aborted == [bench.engine.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_by_id_ends_the_answers_it_names(bench: Any, stream: bool) -> None:
    saw, aborted = asyncio.Event(), asyncio.Event()

    def script(request: AddRequest, branch: int) -> list[Any]:
        saw.set()
        if branch == 0:
            return [aborted, bench.say([], FinishReason.ABORT)]
        if branch == 1:
            return [bench.say("x"), aborted, bench.say([], FinishReason.ABORT)]
        return [bench.say("y", FinishReason.LENGTH)]

    bench.engine.script = script
    asked = {"prompt": [1, 2], "n": 3, "stream": stream, "request_id": "mine", "echo": True}
    asked |= {"logprobs": 0}
    async with bench.client() as client, asyncio.TaskGroup() as group:
        answer = group.create_task(client.post(TEXT, json=asked))
        await saw.wait()
        (request,) = bench.engine.requests
        named = {"request_ids": [request.request_id, request.branch_ids[0]]}
        await client.post("/abort_requests", json=named)
        aborted.set()
        response = await answer
    assert response.status_code == 200
    if stream:
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        parts = [c["choices"][0] for c in chunks]
    else:
        parts = response.json()["choices"]
    ends = {p["index"]: p["finish_reason"] for p in parts if p["finish_reason"]}
    assert ends == {0: "abort", 1: "abort", 2: "length"}
    texts = dict.fromkeys(range(3), "")
    for part in parts:
        texts[part["index"]] += part["text"]
    assert texts == {0: "\1\2", 1: "\1\2x", 2: "\1\2y"}
    # What is not known of the echoed prompt is null.
    firsts = [next(p for p in parts if p["index"] == i)["logprobs"] for i in range(3)]
    assert [f["token_logprobs"][:2] for f in firsts] == [[None, None]] * 3
