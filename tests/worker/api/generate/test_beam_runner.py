"""A beam search over the engine: one-token requests in, ranked choices out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from worker.engine.messages import AddRequest
from worker.tokenizer import sim
from worker.types import FinishReason, TokenLogprobs

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = sim.IM_END_ID
# After each token, the likeliest next ones.
TREE = {
    "": {"a": -0.4, "b": -1.2, "c": -3.0},
    "a": {"x": -2.0, "y": -2.1, END: -4.0},
    "b": {END: -0.1, "x": -3.0, "y": -4.0},
}


def play(bench: Any) -> None:
    """Answer one-token requests from the tree."""

    def script(request: AddRequest, branch: int) -> list[Any]:
        said = bytes(i for i in request.prompt_token_ids[1:] if i < 256).decode()
        pairs = list(TREE.get(said, {"z": -5.0, "w": -6.0}).items())
        pairs = [pairs[0], *pairs]
        ids = tuple(i if isinstance(i, int) else ord(i) for i, _ in pairs)
        entry = TokenLogprobs(ids, tuple(p for _, p in pairs), 1)
        return [bench.say([ids[0]], FinishReason.LENGTH, logprobs=[entry], cached=1)]

    bench.engine.script = script


async def test_the_best_beams_are_the_choices(bench: Any) -> None:
    """Ranked by log probability over length; the end token is counted but not shown."""
    play(bench)
    asked = {"prompt": [1], "n": 2, "use_beam_search": True, "max_tokens": 2, "logprobs": 1}
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json=asked)
    body = response.json()
    # "b"+end: -1.3 over 2 tokens; "ax": -2.4 over 3; "ay": -2.5 over 3.
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
        ("b", "stop"),
        ("ax", "length"),
    ]
    first = body["choices"][0]["logprobs"]
    assert first["tokens"] == ["b", "<|im_end|>"]
    assert first["token_logprobs"] == [-1.2, -0.1]
    assert first["top_logprobs"][0] == {"b": -1.2, "a": -0.4}
    assert body["usage"]["prompt_tokens"] == 1
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    # One request for the prompt, then one for each of two beams.
    assert [r.prompt_token_ids for r in bench.engine.requests] == [[1], [1, 97], [1, 98]]
    params = bench.engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.logprobs) == (1, 0.0, 4)
    assert len({r.request_id for r in bench.engine.requests}) == 3
    # For the metrics it was one request.
    page = api.page()
    assert 'finished_reason="stop"} 1\n' in page
    assert 'vllm:request_params_n_sum{model_name="tiny",engine="0"} 2' in page


async def test_ends_are_ordinary_tokens_when_told_to_ignore_them(bench: Any) -> None:
    """`ignore_eos` searches on to the limit."""
    play(bench)
    asked = {"prompt": [1], "n": 2, "use_beam_search": True, "max_tokens": 2, "ignore_eos": True}
    async with bench.client() as client:
        body = (await client.post(TEXT, json=asked)).json()
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}


async def test_a_chat_streams_its_beams_at_the_end(bench: Any) -> None:
    """Role, text and ending of every beam, usage, [DONE]: all at once."""
    play(bench)
    messages = [{"role": "user", "content": "hi"}]
    asked = {
        "messages": messages,
        "n": 2,
        "use_beam_search": True,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with bench.client() as client:
        response = await client.post(CHAT, json=asked)
    *frames, usage, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    choices = [json.loads(f.removeprefix("data: "))["choices"][0] for f in frames]
    assert [c["index"] for c in choices] == [0, 0, 1, 1]
    assert [c["finish_reason"] for c in choices] == [None, "length", None, "length"]
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 2


async def test_a_failure_in_a_search_is_the_requests(bench: Any) -> None:
    """One beam that the engine gives up ends the search, and aborts the others."""

    def script(request: AddRequest, branch: int) -> list[Any]:
        if len(request.prompt_token_ids) == 1:
            entry = bench.logprob("a", ("a", -0.5), ("b", -0.9))
            return [bench.say("a", FinishReason.LENGTH, logprobs=[entry])]
        if request.prompt_token_ids[-1] == ord("a"):
            return [bench.say([], FinishReason.ERROR, error="corrupt")]
        return [asyncio.Event()]

    bench.engine.script = script
    api = bench.api()
    asked = {"prompt": [1], "n": 2, "use_beam_search": True, "max_tokens": 4}
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json=asked)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "corrupt")
    assert bench.engine.aborted == [bench.engine.requests[2].request_id]
    assert 'finished_reason="error"} 1\n' in api.page()


@pytest.mark.parametrize("asked_id", ["mine", "cmpl-mine"])
async def test_an_abort_by_id_ends_a_search(bench: Any, asked_id: str) -> None:
    """The best beams so far are the answers; also when the step had ended in the engine already,
    which then has nothing to abort.
    """
    play(bench)
    answer, in_second_step, go_on = bench.engine.script, asyncio.Event(), asyncio.Event()

    def script(request: AddRequest, branch: int) -> list[Any]:
        steps = answer(request, branch)
        if len(request.prompt_token_ids) == 1:
            return steps
        in_second_step.set()
        return [go_on, *steps]

    bench.engine.script = script
    api = bench.api()
    asked = {"prompt": [1], "n": 2, "use_beam_search": True, "max_tokens": 9}
    async with bench.client_of(api) as client, asyncio.TaskGroup() as group:
        headers = {"x-request-id": "mine"}
        search = group.create_task(client.post(TEXT, json=asked, headers=headers))
        await in_second_step.wait()
        abort = {"request_ids": [asked_id]}
        aborted = await client.post("/inference/v1/abort_requests", json=abort)
        go_on.set()
        response = await search
    assert (aborted.status_code, response.status_code) == (200, 200)
    choices = response.json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("a", "abort"), ("b", "abort")]
    _, *second = [r.request_id for r in bench.engine.requests]
    assert bench.engine.aborted == second
    assert len(second) == 2
    assert 'finished_reason="abort"} 1\n' in api.page()


async def test_streamed_beams_tell_their_usage_continuously(bench: Any) -> None:
    """Each frame has the counts of its own beam."""
    play(bench)
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "hi"}]
    asked = {"messages": messages, "n": 2, "use_beam_search": True, "max_tokens": 1}
    async with bench.client() as client:
        response = await client.post(
            CHAT, json={**asked, "stream": True, "stream_options": options}
        )
    frames = [json.loads(f.removeprefix("data: ")) for f in response.text.split("\n\n")[:-2]]
    assert [f["usage"]["completion_tokens"] for f in frames] == [1, 1, 1, 1, 2]
    assert len({f["usage"]["prompt_tokens"] for f in frames}) == 1


@pytest.mark.looptime
async def test_a_stream_of_beams_is_kept_alive(bench: Any) -> None:
    """The search is silent to its end, but for the comments."""
    play(bench)
    answer, found = bench.engine.script, asyncio.Event()
    bench.engine.script = lambda request, branch: [found, *answer(request, branch)]
    asyncio.get_running_loop().call_later(25, found.set)
    messages = [{"role": "user", "content": "hi"}]
    asked = {"messages": messages, "use_beam_search": True, "max_tokens": 1, "stream": True}
    async with bench.client(sse_keep_alive_seconds=10.0) as client:
        response = await client.post(CHAT, json=asked)
    assert response.text.startswith(": keep-alive\n\n" * 2 + "data: {")
    assert response.text.count(": keep-alive") == 2
    assert response.text.endswith("data: [DONE]\n\n")
