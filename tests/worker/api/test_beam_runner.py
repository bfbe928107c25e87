"""A beam search over the engine: one-token requests in, ranked choices out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

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
