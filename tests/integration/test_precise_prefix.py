"""The precise prefix cache follows a real worker's events: joining late, eviction, a new life."""

import asyncio
import json
from collections.abc import Sequence
from struct import pack
from typing import Any

import httpx
import msgspec
import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import SkippedKvEvent
from picker.kvevents.listener import KvEventListener
from picker.plugins.producers.precise_prefix_cache_producer import (
    PrecisePrefixCacheParameters,
    PrecisePrefixCacheProducer,
)
from picker.pool.datastore import Datastore
from picker.prefix.match import match_info_key
from picker.types import Api, Endpoint, InferenceRequest, ParsedBody
from tests.support.local_ports import free_ports
from tests.support.worker.sim_worker import SimWorker, sim_worker

pytestmark = pytest.mark.full

MODEL = "tiny"
PATIENCE_SECONDS = 120.0
PROMPT = list(range(100, 200))  # six full blocks of 16 tokens


class Watcher(PrecisePrefixCacheProducer):
    def __init__(self, **events: Any) -> None:
        super().__init__("p", msgspec.convert(events, PrecisePrefixCacheParameters))
        self.news = asyncio.Event()

    def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
        skipped = super().kv_events(key, topic, payload)
        self.news.set()
        return skipped

    def kv_events_lost(self, key: str) -> None:
        super().kv_events_lost(key)
        self.news.set()

    def blocks(self, prompt: list[int], salt: str = "") -> dict[str, int]:
        body = ParsedBody(Api.COMPLETIONS, MODEL, cache_salt=salt)
        prompts = (pack(f"<{len(prompt)}I", *prompt),)
        attributes = Attributes()
        request = InferenceRequest("r", {}, body, MODEL, MODEL, prompts=prompts)
        self.produce(request, [], attributes)
        info = attributes.get(match_info_key("p"))
        return dict(info.match_blocks)

    async def until(self, expected: dict[str, int], prompt: list[int], salt: str = "") -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self.blocks(prompt, salt) != expected:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            assert self.blocks(prompt, salt) == expected  # shows the difference
            raise


def flags(ports: list[int], form: str) -> list[str]:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        "topic": f"kv@127.0.0.1:8000@{MODEL}",
        "format": form,
    }
    few_blocks = ("--num-gpu-blocks-override", "64")
    return ["--kv-events-config", json.dumps(events), "--served-model-name", MODEL, *few_blocks]


async def complete(worker: SimWorker, prompt: list[int], **fields: Any) -> None:
    async with httpx.AsyncClient(base_url=worker.url, timeout=PATIENCE_SECONDS) as http:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("form", ["map", "array"])
async def test_a_workers_cache_is_known_block_by_block(form: str) -> None:
    ports = free_ports(2)
    labels = {"kv-events-port": str(ports[0]), "kv-events-replay-port": str(ports[1])}
    watcher, datastore = Watcher(), Datastore()
    datastore.set_endpoints([Endpoint("w", "127.0.0.1", 8000, labels=labels)])
    listening: asyncio.Task[None] | None = None
    try:
        with sim_worker(*flags(ports, form)) as worker:
            await complete(worker, PROMPT)
            listening = asyncio.create_task(KvEventListener(watcher, datastore).run())
            await watcher.until({"default/w": 6}, PROMPT)
            assert watcher.blocks(PROMPT[:40] + [1] * 60) == {"default/w": 2}
            await complete(worker, PROMPT[:64] + list(range(500, 564)), cache_salt="mine")
            await watcher.until({"default/w": 8}, PROMPT[:64] + list(range(500, 564)), "mine")
            # Others take all there is: the first prompt is evicted.
            for first in range(200, 208):
                await complete(worker, [first, *range(300, 550)])
            await watcher.until({}, PROMPT)
            watcher.check_integrity()
        with sim_worker(*flags(ports, form)) as worker:
            await complete(worker, PROMPT[:32])
            await watcher.until({"default/w": 2}, PROMPT)
            assert watcher.index_size <= 3
    finally:
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
