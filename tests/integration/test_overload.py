"""More requests than a fleet can serve: some wait, some are refused, and nothing is left."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import pytest

from tests.support.fleet.running_fleet import Fleet, ready_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("patient_envoy"), pytest.mark.full]

WORKERS, WAITING, SENT = 2, 6, 40
CONFIG = f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: active-request-scorer}}
- {{type: concurrency-detector, parameters: {{maxConcurrency: 1}}}}
flowControl:
  maxRequests: {WAITING}
  saturationDetector: {{pluginRef: concurrency-detector}}
  enableEviction: true
"""
OBJECTIVES = "\n---\n".join(
    f"""\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {{name: {name}}}
spec: {{priority: {priority}, poolRef: {{name: default}}}}
"""
    for name, priority in (("interactive", 10), ("batch", -5))
)
QUEUE = "llm_d_epp_flow_control_queue_size"
LONG = 1200  # tokens, of an answer that takes a minute unless it is hurried


class Crowd:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self._session = session

    async def ask(
        self, tokens: int = 12, objective: str = ""
    ) -> tuple[int, Mapping[str, str], str]:
        body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "model": "sim"}
        address = f"{self.fleet.url}/v1/completions"
        headers = {"x-llm-d-inference-fairness-id": "crowd"}
        headers |= {"x-llm-d-inference-objective": objective} if objective else {}
        async with self._session.post(address, json=body, headers=headers) as reply:
            return reply.status, reply.headers, await reply.text()

    async def until(self, name: str, expected: float) -> None:
        await until(lambda: self.fleet.series(name), lambda found: found == expected, what=name)

    async def is_at_rest(self) -> None:
        for name in (QUEUE, "llm_d_epp_flow_control_queue_bytes", "llm_d_epp_request_running"):
            await self.until(name, 0.0)
        async with self._session.get(f"{self.fleet.picker_url}/endpoints") as reply:
            rows = (await reply.json())["endpoints"]
        assert [row["inflight_requests"] for row in rows] == [0] * WORKERS


@contextlib.asynccontextmanager
async def crowded(folder: Path) -> AsyncIterator[Crowd]:
    path, policies = folder / "config.yaml", folder / "objectives.yaml"
    path.write_text(CONFIG)
    policies.write_text(OBJECTIVES)
    workers = "--max-num-seqs 1 --sim-decode-base-ms 50 --sim-decode-per-seq-ms 0"
    flags = ["--workers", str(WORKERS), "--config", str(path), "--trust-control-headers"]
    flags += ["--allow-experimental-plugins", "--objectives", str(policies)]
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        ready_fleet(*flags, "--worker-args", workers) as fleet,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        yield Crowd(fleet, session)


async def test_a_crowd_is_served_made_to_wait_or_sent_away(tmp_path: Path) -> None:
    async with crowded(tmp_path) as crowd:
        answers = await asyncio.gather(*(crowd.ask() for _ in range(SENT)))
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 429}, answers
        assert statuses[200] >= WORKERS + WAITING
        for status, headers, text in answers:
            if status == 429:
                assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
                assert int(headers["retry-after"]) >= 1
                error = json.loads(text)["error"]
                assert (error["type"], error["code"]) == ("RateLimitError", 429)
                assert "queue of requests is full" in error["message"]
        await crowd.is_at_rest()
        for name, status in (("request_error", 429), ("request", 200)):
            counted = await crowd.fleet.series(f"llm_d_epp_{name}_total", fairness_id="crowd")
            assert counted == statuses[status]
        assert (await crowd.ask(1))[0] == 200
        await leave_the_queue(crowd)
        await stop_for_a_better_one(crowd)


async def leave_the_queue(crowd: Crowd) -> None:
    async with asyncio.TaskGroup() as group:
        await crowd.is_at_rest()
        served = [group.create_task(crowd.ask(LONG)) for _ in range(WORKERS)]
        await crowd.until("llm_d_epp_request_running", WORKERS)
        leaving = [group.create_task(crowd.ask()) for _ in range(WAITING)]
        await crowd.until(QUEUE, WAITING)
        assert (await crowd.ask())[0] == 429
        for task in leaving:
            task.cancel()
        await crowd.until(QUEUE, 0)
        after = group.create_task(crowd.ask(1))
        await crowd.until(QUEUE, 1)
        await crowd.fleet.configure_workers(time_scale=0.001)
        assert (await after)[0] == 200
        assert [(await task)[0] for task in served] == [200] * WORKERS
        await crowd.is_at_rest()
        await crowd.fleet.configure_workers(time_scale=1)


async def stop_for_a_better_one(crowd: Crowd) -> None:
    async with asyncio.TaskGroup() as group:
        shed = [group.create_task(crowd.ask(LONG, "batch")) for _ in range(WORKERS)]
        await crowd.until("llm_d_epp_request_running", WORKERS)
        status, _, text = await crowd.ask(1, "interactive")
        assert status == 200, text
        await crowd.fleet.configure_workers(time_scale=0.001)
    answers = Counter(status for status, _, _ in map(asyncio.Task.result, shed))
    assert answers == {429: 1, 200: WORKERS - 1}
    (stopped,) = [one.result() for one in shed if one.result()[0] == 429]
    assert stopped[1]["x-llm-d-request-dropped-reason"] == "evicted"
    assert stopped[1]["retry-after"] == "1"
    message = json.loads(stopped[2])["error"]["message"]
    assert message == "The request was stopped to make room for others"
    await crowd.is_at_rest()
    revocations = "llm_d_epp_flow_control_revocations"
    assert await crowd.fleet.series(f"{revocations}_issued_total", priority="10") == 1
    assert await crowd.fleet.series(f"{revocations}_total", outcome="confirmed") == 1
