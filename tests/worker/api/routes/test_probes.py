"""Health, models and metrics."""

from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.api.generate.adapters import ServedAdapters
from worker.api.http.exchange import Exchange
from worker.api.routes.probes import ProbeRoutes
from worker.config import KvEventsConfig
from worker.types import EngineStats

ESCAPED = "/v1/models/org%2Ftiny-v1.0"


@pytest.mark.parametrize(
    ("alive", "stalled", "status"), [(True, False, 200), (True, True, 503), (False, False, 503)]
)
async def test_health_follows_the_engine(
    bench: Any, alive: bool, stalled: bool, status: int
) -> None:
    bench.engine.is_alive, bench.engine.is_stalled = alive, stalled
    async with bench.client() as client:
        paths = (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))
        probes = [await client.request(method, path) for method, path in paths]
        named = await client.get("/healthz")
    assert {(p.status_code, p.content) for p in probes} == {(status, b"")}
    assert (named.status_code, named.json() == {"status": "ok"}) == (status, status == 200)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({}, None),
        ({"is_alive": False}, "The engine is not running"),
        ({"is_stalled": True}, "The engine makes no progress"),
        ({"stats": EngineStats(sleep_level=0)}, "The engine is asleep"),
        ({"stats": EngineStats(sleep_level=2)}, "The engine is asleep"),
        ({"stats": EngineStats(is_paused=True)}, None),
    ],
)
async def test_the_readiness_probe_names_the_reason(
    bench: Any, fault: dict[str, Any], reason: str | None
) -> None:
    for name, value in fault.items():
        setattr(bench.engine, name, value)
    async with bench.client() as client:
        ready, health = await client.get("/health/ready"), await client.get("/health")
    if reason is None:
        assert (ready.status_code, ready.content) == (200, b"")
    else:
        error = ready.json()["error"]
        assert (ready.status_code, error["type"]) == (503, "Service Unavailable")
        assert error["message"].startswith(reason)
    assert (health.status_code == 200) is (reason is None or "asleep" in reason)


async def test_models_have_cards(bench: Any) -> None:
    async with bench.client(model_root="/models/tiny") as client:
        body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    assert {(c["max_model_len"], c["root"]) for c in body["data"]} == {(64, "/models/tiny")}
    assert all(c["permission"][0]["allow_logprobs"] for c in body["data"])


@pytest.mark.parametrize("url", [ESCAPED, "/v1/models/org/tiny-v1.0", "/v1/models/alias"])
async def test_one_model_is_the_card_of_the_list(bench: Any, url: str) -> None:
    api = bench.api(served_model_names=["org/tiny-v1.0", "alias"])
    async with bench.listening(api) as base, httpx.AsyncClient(base_url=base, timeout=60) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        answer = await client.get(url)
    assert answer.status_code == 200
    assert answer.json() in listed
    assert 'handler="/v1/models/{id}"' in api.page()


@pytest.mark.parametrize("url", ["/v1/models/other", "/v1/models/org/other", "/v1/models/tiny/"])
async def test_an_unknown_model_is_an_error_of_openai(bench: Any, url: str) -> None:
    async with bench.client() as client:
        answer = await client.get(url)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "NotFoundError", 404)
    assert error["param"] == "model"
    assert url.removeprefix("/v1/models/") in error["message"]


async def test_one_model_needs_the_key(bench: Any) -> None:
    async with bench.client(api_keys=["k"]) as client:
        refused = await client.get("/v1/models/tiny")
        taken = await client.get("/v1/models/tiny", headers={"authorization": "Bearer k"})
    assert (refused.status_code, taken.status_code) == (401, 200)


async def test_metrics_show_the_engine_and_parse(bench: Any) -> None:
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


async def test_version_load_and_docs_are_small(bench: Any) -> None:
    async with bench.client() as client:
        assert "version" in (await client.get("/version")).json()
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert "/openapi.json" in (await client.get("/docs")).text


async def test_event_sources_are_listed(bench: Any) -> None:
    async with bench.client() as client:
        assert (await client.get("/kv_event_sources")).json() == {}
    config = KvEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:1")
    api, engine = bench.api(), bench.engine
    adapters = ServedAdapters(engine, ("m",), has_files=True)
    parts = (api.admission, api.metrics, config, adapters)
    routes = ProbeRoutes(api.config, engine, lambda: engine.stats, *parts)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "GET", "path": "/kv_event_sources", "headers": []}
    exchange = Exchange(scope, send, send, write_stall_seconds=1)
    await routes.handlers()["kv_event_sources"](exchange)
    assert msgspec.json.decode(sent[1]["body"]) == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:1",
            "replay_endpoint": None,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
    }
