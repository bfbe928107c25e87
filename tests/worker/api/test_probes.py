"""Health, models, metrics and tokenization."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.engine.messages import EngineStats
from worker.tokenizer import sim


@pytest.mark.parametrize("alive", [True, False])
async def test_health_follows_the_engine(bench: Any, alive: bool) -> None:
    """Every probe is empty, 200 while the engine lives and 503 after."""
    bench.engine.is_alive = alive
    async with bench.client() as client:
        probes = [
            await client.get("/health"),
            await client.get("/ping"),
            await client.post("/ping"),
            await client.get("/health/ready"),
        ]
    assert {(p.status_code, p.content) for p in probes} == {(200 if alive else 503, b"")}


async def test_models_have_cards(bench: Any) -> None:
    """One card for every served name, with the length clients plan by."""
    async with bench.client(model_root="/models/tiny") as client:
        body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    assert {(c["max_model_len"], c["root"]) for c in body["data"]} == {(64, "/models/tiny")}


async def test_metrics_show_the_engine_and_parse(bench: Any) -> None:
    """The page is a snapshot of the engine's numbers in Prometheus' format."""
    bench.engine.stats = EngineStats(num_running=2, num_waiting=3, kv_cache_usage=0.5)
    async with bench.client() as client:
        await client.post("/v1/completions", json={"prompt": "a"})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["vllm:num_requests_running"] == 2
    assert samples["vllm:num_requests_waiting"] == 3
    assert samples["vllm:kv_cache_usage_perc"] == 0.5
    assert samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:request_generation_tokens_sum"] == 3


async def test_version_and_load_are_small_objects(bench: Any) -> None:
    """Tools that ask get a version and the number of sequences inside."""
    async with bench.client() as client:
        assert "version" in (await client.get("/version")).json()
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_tokenize_agrees_with_generation(bench: Any) -> None:
    """The ids of a conversation are those a chat would prefill."""
    messages = [{"role": "user", "content": "shono hi"}]
    async with bench.client() as client:
        answer = (await client.post("/tokenize", json={"messages": messages})).json()
        await client.post("/v1/chat/completions", json={"messages": messages})
        plain = (
            await client.post("/tokenize", json={"prompt": "shono.", "return_token_strs": True})
        ).json()
        back = await client.post("/detokenize", json={"tokens": answer["tokens"][:1]})
    assert answer["tokens"] == bench.engine.requests[0].prompt_token_ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 64)
    assert plain["token_strs"] == [" shono", "."]
    assert back.json() == {"prompt": sim.IM_START}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": "a", "model": "x"}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
async def test_wrong_questions_are_refused(bench: Any, path: str, body: dict[str, Any]) -> None:
    """These routes are as strict as the others."""
    async with bench.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
