"""Admission by queues, memory and draining."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from worker.api.generate.admission import Admission, MemoryGuard, resident_bytes
from worker.errors import RequestError
from worker.types import EngineStats

TEXT = "/v1/completions"


async def test_a_dead_engine_admits_no_request(bench: Any) -> None:
    bench.engine.is_alive = False
    response = await bench.post(TEXT, {"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_a_burst_is_counted_before_the_engine_knows_it(bench: Any) -> None:
    admission = bench.api(max_num_queued_reqs=2, max_num_seqs=4).admission
    with admission.entered(5):
        admission.check()
        with admission.entered(1), pytest.raises(RequestError, match="2 requests are waiting"):
            admission.check()
        admission.check()
    assert admission.num_inside == 0


@pytest.mark.parametrize(("inside", "refused"), [(0, False), (3, False), (4, True)])
async def test_a_queue_limit_of_zero_still_uses_every_slot(
    bench: Any, inside: int, refused: bool
) -> None:
    admission = bench.api(max_num_queued_reqs=0, max_num_seqs=4).admission
    expected = pytest.raises(RequestError, match="waiting already") if refused else nullcontext()
    with admission.entered(inside), expected:
        admission.check()
    assert admission.num_inside == 0


async def test_each_of_n_answers_counts(bench: Any) -> None:
    bench.engine.stats = EngineStats(num_running=4, num_waiting=1)
    api = bench.api(max_num_queued_reqs=3, max_num_seqs=4)
    async with bench.client_of(api) as client:
        two = await client.post(TEXT, json={"prompt": "a", "n": 2})
        three = await client.post(TEXT, json={"prompt": "a", "n": 4})
        several = await client.post(TEXT, json={"prompt": ["a", "b"], "n": 2})
    assert (two.status_code, three.status_code, several.status_code) == (200, 503, 503)
    error = three.json()["error"]
    assert error["type"] == "Service Unavailable"
    assert error["message"].startswith("The engine is currently busy and cannot accept new req")
    assert 'reason="max_num_queued_reqs"} 2\n' in api.page()
    assert len(bench.engine.requests) == 1
    assert api.admission.num_inside == 0


async def test_a_backlog_of_tokens_refuses_requests(bench: Any) -> None:
    bench.engine.steps = [go := asyncio.Event(), *bench.engine.steps]
    api = bench.api(max_num_queued_tokens=10)
    async with bench.client_of(api) as client:
        running = asyncio.ensure_future(client.post(TEXT, json={"prompt": list(range(20))}))
        await bench.engine.saw_request.wait()
        refused = await client.post(TEXT, json={"prompt": [1]})
        go.set()
        assert (await running).status_code == 200
        assert (await client.post(TEXT, json={"prompt": [1]})).status_code == 200
    assert refused.status_code == 503
    message = refused.json()["error"]["message"]
    assert message.startswith("The engine has reached its prefill token backlog limit.")
    assert 'reason="max_num_queued_tokens"} 1\n' in api.page()
    assert api.admission.num_queued_tokens == 0


async def test_a_lack_of_memory_refuses_requests(bench: Any) -> None:
    api = bench.api()
    guard = MemoryGuard(100, lambda: 101, lambda: 0.0)
    admission = Admission(
        bench.engine, api.metrics, max_num_seqs=4, max_num_queued_reqs=None, memory=guard
    )
    with pytest.raises(RequestError, match="short of memory") as refusal:
        admission.check()
    assert refusal.value.status == 503
    assert 'reason="memory"} 1\n' in api.page()


async def test_a_draining_worker_refuses_new_requests_and_finishes_running_ones(bench: Any) -> None:
    bench.engine.steps = [go := asyncio.Event(), *bench.engine.steps]
    api = bench.api()
    async with bench.client_of(api) as client:
        running = asyncio.ensure_future(client.post(TEXT, json={"prompt": "a"}))
        await bench.engine.saw_request.wait()
        api.admission.drains.set()
        refused = await client.post(TEXT, json={"prompt": "a"})
        health, ready = await client.get("/health"), await client.get("/health/ready")
        assert not await api.admission.wait_idle(0)
        go.set()
        assert (await running).status_code == 200
    assert (refused.status_code, health.status_code, ready.status_code) == (503, 200, 503)
    assert await api.admission.wait_idle(0)


def test_memory_is_read_four_times_a_second() -> None:
    readings = [100, 200, 50]
    now = [0.0]
    guard = MemoryGuard(100, lambda: readings.pop(0), lambda: now[0])
    seen = []
    for now[0] in (0.0, 0.2, 0.25, 0.4, 0.6):
        seen.append(guard.exceeded)
    assert seen == [False, False, True, True, False]
    assert readings == []
    assert MemoryGuard(None, lambda: 1 // 0, lambda: 0.0).exceeded is False


def test_resident_memory_is_plausible() -> None:
    assert 1 << 20 < resident_bytes() < 1 << 40
