"""WebSockets through generated bootstraps on the real Envoy: in both modes of request bodies."""

import asyncio

import pytest

from fleet.envoy.settings import SocketAddress
from tests.support.picker.bench_picker import picked
from tests.support.picker.websocket import ECHOED, echoing, over_http1, over_http2
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
LIMIT_SECONDS = 60.0


@pytest.mark.parametrize("buffered", [True, False])
async def test_a_websocket_reaches_its_worker(bench, buffered: bool) -> None:
    async with echoing() as first, echoing() as second, asyncio.timeout(LIMIT_SECONDS):
        endpoints = tuple(SocketAddress("127.0.0.1", port) for port in (first, second))
        changes = {"endpoints": endpoints, "buffer_request_body": buffered}
        async with picked(bench, **changes) as (b, picker):
            picker.pick(second)
            for talk in (over_http1, over_http2):
                assert await talk(int(b.url.rpartition(":")[2])) == ECHOED
            await until(lambda: picker.inflight.total == 0, what="all is released")
