"""The four HTTP behaviours that forge-infer tests, under its names."""

from __future__ import annotations

import json
from typing import Any

from worker.tokenizer import sim

TEXT = "/v1/completions"


async def test_healthz_reports_ok(bench: Any) -> None:
    """A worker with an engine that makes progress reports that it is well."""
    async with bench.client() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/health/ready")).status_code == 200
        bench.engine.is_alive = False
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/healthz")).status_code == 503


async def test_generate_returns_a_completion(bench: Any) -> None:
    """Plain generation gives the text and both counts; the other one tokens too."""
    async with bench.client() as client:
        answer = (await client.post("/generate", json={"prompt": "a", "max_tokens": 8})).json()
        assert answer == {"text": "hi", "prompt_tokens": 1, "completion_tokens": 3}
        body = {"token_ids": [1, 2, 3], "output_mode": "text"}
        answer = (await client.post("/inference/v1/generate", json=body)).json()
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["token_ids"] == [ord("h"), ord("i"), sim.IM_END_ID]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 3


async def test_openai_completions_non_streaming(bench: Any) -> None:
    """One body in OpenAI's shape, with an id, the finish reason and the usage."""
    async with bench.client() as client:
        answer = (await client.post(TEXT, json={"prompt": "a", "max_tokens": 8})).json()
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == 1 + 3


async def test_openai_completions_streams_sse(bench: Any) -> None:
    """A chunk for each step, the last with the finish reason, then [DONE]."""
    async with bench.client() as client:
        body = {"prompt": "a", "max_tokens": 8, "stream": True}
        response = await client.post(TEXT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, done = response.text.strip().split("\n\n")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert done == "data: [DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hi"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
    assert len({c["id"] for c in chunks}) == 1
