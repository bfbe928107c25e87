"""Buffered request bodies: the picker's own server behind a generated bootstrap on a real Envoy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from random import Random

import pytest

from fleet.envoy.settings import Mechanism, SocketAddress
from picker.extproc.server import build_server
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.types import Endpoint
from tests.support.picker.first_candidate import first_candidate
from tests.support.waiting import until

pytestmark = pytest.mark.envoy
BOTH = pytest.mark.parametrize("mechanism", list(Mechanism), ids=lambda m: m.value)


class Picker:
    """This project's picker over whatever endpoint it is told, in this process."""

    def __init__(self) -> None:
        self.inflight = InflightLoad()
        self._datastore = Datastore()
        director = Director(
            first_candidate(), RequestContext(self._datastore, self.inflight, Random(1))
        )
        options = ServerOptions(host="127.0.0.1", port=0)
        health = HealthService(lambda: True)
        self.server = build_server(director, options=options, health=health)

    def pick(self, *ports: int) -> None:
        """From now on choose the first of these workers."""
        self._datastore.set_endpoints(
            [Endpoint(f"pod-{port}", "127.0.0.1", port) for port in ports]
        )


@contextlib.asynccontextmanager
async def picked(bench, mechanism: Mechanism = Mechanism.OVERRIDE_HOST) -> AsyncIterator:
    """Envoy with buffered bodies, echo workers, and our picker instead of the scripted one."""
    picker = Picker()
    address = SocketAddress("127.0.0.1", await picker.server.start())
    try:
        given = {"buffer_request_body": True, "message_timeout_seconds": 60.0, "picker": address}
        async with bench(mechanism=mechanism, **given) as b:
            if mechanism is Mechanism.OVERRIDE_HOST:
                await b.until_healthy("pool", 2)
            yield b, picker
    finally:
        await picker.server.stop(0)


@BOTH
async def test_the_picked_endpoint_serves_bodies_up_to_the_limit(bench, mechanism) -> None:
    """By metadata (override-host) and by header (original-dst); what is larger is a 413."""
    async with picked(bench, mechanism) as (b, picker):
        for worker in b.workers:
            picker.pick(worker.port)
            for size in (1, 100_000, 3_000_000, 4 * 1024 * 1024):
                answer = await b.post(size=size)
                assert (answer["worker"], answer["size"]) == (worker.name, size)
        assert (await b.post(size=4 * 1024 * 1024 + 1))["status"] == 413
        await until(lambda: picker.inflight.total == 0, what="all is released")


async def test_a_request_counts_until_its_last_token(bench) -> None:
    """The picker's own load count covers a stream from its decision to its end."""
    async with picked(bench) as (b, picker):
        picker.pick(b.workers[0].port)
        async with b.client.post(f"{b.url}/stream", data=b"x") as response:
            assert await response.content.readline() == b"data: first\n"
            await b.post()
            await until(lambda: picker.inflight.total == 1, what="the short one is released")
            b.workers[0].go_on.set()
            await response.content.read()
            await until(lambda: picker.inflight.total == 0, what="the stream is released")
