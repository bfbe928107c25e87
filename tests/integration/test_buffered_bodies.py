"""Buffered request bodies: the picker's own server behind a generated bootstrap on a real Envoy."""

import pytest

from fleet.envoy.settings import Mechanism
from tests.support.picker.bench_picker import picked
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
BOTH = pytest.mark.parametrize("mechanism", list(Mechanism), ids=lambda m: m.value)


@BOTH
async def test_the_picked_endpoint_serves_bodies_up_to_the_limit(bench, mechanism) -> None:
    async with picked(bench, mechanism) as (b, picker):
        for worker in b.workers:
            picker.pick(worker.port)
            for size in (1, 100_000, 3_000_000, 4 * 1024 * 1024):
                answer = await b.post(size=size)
                assert (answer["worker"], answer["size"]) == (worker.name, size)
        assert (await b.post(size=4 * 1024 * 1024 + 1))["status"] == 413
        await until(lambda: picker.inflight.total == 0, what="all is released")


async def test_a_request_counts_until_its_last_token(bench) -> None:
    async with picked(bench) as (b, picker):
        picker.pick(b.workers[0].port)
        async with b.client.post(f"{b.url}/stream", data=b"x") as response:
            assert await response.content.readline() == b"data: first\n"
            await b.post()
            await until(lambda: picker.inflight.total == 1, what="the short one is released")
            b.workers[0].go_on.set()
            await response.content.read()
            await until(lambda: picker.inflight.total == 0, what="the stream is released")
