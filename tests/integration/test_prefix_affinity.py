"""Requests that share a prefix meet on the worker that holds it, unless its queue is deep."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fleet.running_fleet import Fleet, ready_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("patient_envoy"), pytest.mark.full]

NUM_GROUPS = 8
LATER_REQUESTS = 12
PREFIX_WORDS = 1000
VOCABULARY = ["track", "signal", "switch", "points", "train", "yard", "lever", "lamp", "rail"]


class Client:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self._session = session

    async def complete(self, prompt: str, url: str | None = None, max_tokens: int = 4) -> int:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "model": "sim"}
        address = f"{url or self.fleet.url}/v1/completions"
        async with self._session.post(address, json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def counters(self, name: str) -> list[float]:
        totals = []
        for url in self.fleet.worker_urls:
            async with self._session.get(f"{url}/metrics") as reply:
                page = await reply.text()
            samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
            totals.append(sum(sample.value for sample in samples if sample.name == name))
        return totals

    async def seen_queue(self) -> int:
        async with self._session.get(f"{self.fleet.picker_url}/endpoints") as reply:
            endpoints = (await reply.json())["endpoints"]
        first = next(e for e in endpoints if e["name"].endswith("worker-1"))
        return int((first["metrics"] or {}).get("waiting_requests", 0))


@contextlib.asynccontextmanager
async def client(*flags: str) -> AsyncIterator[Client]:
    async with ready_fleet("--workers", "2", *flags) as fleet, aiohttp.ClientSession() as session:
        yield Client(fleet, session)


def prefix(rng: Random) -> str:
    return " ".join(rng.choice(VOCABULARY) + str(rng.randrange(10)) for _ in range(PREFIX_WORDS))


async def test_later_requests_of_a_group_go_where_its_prefix_is() -> None:
    rng = Random(3)
    prefixes = [prefix(rng) for _ in range(NUM_GROUPS)]
    later = [(group, n) for group in range(NUM_GROUPS) for n in range(LATER_REQUESTS)]
    rng.shuffle(later)
    async with client() as fleet:
        for text in prefixes:
            assert await fleet.complete(text) < 100
        assert min(await fleet.counters("vllm:request_success_total")) > 0
        before = sum(await fleet.counters("vllm:prefix_cache_hits_total"))

        gate = asyncio.Semaphore(4)

        async def ask(group: int, n: int) -> int:
            async with gate:
                return await fleet.complete(f"{prefixes[group]} and then question {n}?")

        cached = await asyncio.gather(*(ask(*which) for which in later))
        hits = [tokens for tokens in cached if tokens > 0.9 * PREFIX_WORDS]
        assert len(hits) >= 0.9 * len(later)
        counted = sum(await fleet.counters("vllm:prefix_cache_hits_total")) - before
        assert counted == sum(cached)


async def test_new_groups_avoid_a_deep_queue() -> None:
    rng = Random(4)
    async with client("--worker-args", "--max-num-seqs 2") as fleet:
        busy = fleet.fleet.worker_urls[0]
        async with asyncio.TaskGroup() as group:
            load = [
                group.create_task(fleet.complete(f"load {n}", busy, max_tokens=2000))
                for n in range(20)
            ]
            await until(fleet.seen_queue, lambda depth: depth >= 10)
            before = await fleet.counters("vllm:request_success_total")
            for _ in range(NUM_GROUPS):
                await fleet.complete(prefix(rng))
            after = await fleet.counters("vllm:request_success_total")
            for task in load:
                task.cancel()
    assert after[1] - before[1] == NUM_GROUPS
