"""The port for reports, and replicas that call it and vanish."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import grpc

from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.discovery import PeerAddress
from picker.peers.inbox import InboxLimits
from picker.peers.mesh import Mesh
from picker.peers.server import PeerServer, PoolReports, peer_port
from picker.peers.wire import REPORT_METHOD
from tests.support.picker.replica_mesh import KEYS, Node, node
from tests.support.picker.replicas_scene import LOOPBACK
from tests.support.waiting import until


class Clock:
    now = 0.0
    is_ready = True

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def listening(one: Node, clock: Clock) -> AsyncIterator[int]:
    series = PickerMetrics().peers
    server = PeerServer({"pool": PoolReports(one.exchange, series, lambda: clock.is_ready)}, clock)
    try:
        yield await server.start(peer_port(LOOPBACK, 0))
    finally:
        await server.stop()


async def test_the_load_of_a_killed_replica_expires() -> None:
    rng, clock = Random(1), Clock()
    here, killed = node(rng), node(rng)
    killed.inflight.acquire(KEYS[0])
    killed.exchange.tick(0.0)
    async with listening(here, clock) as port:
        channel = grpc.aio.insecure_channel(f"{LOOPBACK}:{port}")
        calling = channel.stream_stream(REPORT_METHOD)()
        await calling.write(killed.exchange.hello(0.0))
        _, cursor = killed.exchange.welcomed(await calling.read(), 0.0)
        message = killed.exchange.next(cursor, 0.0)
        await calling.write(message)
        await until(lambda: here.inflight.requests(KEYS[0]) == 1)
        await channel.close(0)
        clock.now = InboxLimits().silence_seconds
        here.exchange.tick(clock.now)
        assert here.inflight.requests(KEYS[0]) == 1
        here.exchange.tick(clock.now + 0.1)
        assert here.inflight.counts == {}


async def test_calls_are_refused_until_the_pool_is_known() -> None:
    """Reports about unknown endpoints would be lost."""
    rng, clock = Random(2), Clock()
    clock.is_ready = False
    async with (
        listening(node(rng), clock) as port,
        grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel,
    ):
        calling = channel.stream_stream(REPORT_METHOD)()
        assert await calling.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_mesh_follows_addresses_but_not_its_own() -> None:
    rng, clock = Random(3), Clock()
    here, there = node(rng), node(rng)
    metrics = PickerMetrics().peers
    mesh = Mesh(here.exchange, metrics, clock, None, 0.01)
    async with listening(here, clock) as own, listening(there, clock) as other:
        mesh.follow([PeerAddress(f"{LOOPBACK}:{port}", "") for port in (own, other)])
        tasks = [asyncio.create_task(mesh.run()), asyncio.create_task(mesh.tick())]
        try:

            def ended(result: str) -> float:
                return dict(metrics.calls_total.numbers()).get((result,), 0)

            def connected() -> float:
                return dict(metrics.connected.numbers()).get((), 0)

            await until(lambda: ended("self") == 1 and connected() == 1)
            here.placements.place(KEYS[1], 4, 5)
            await until(lambda: (KEYS[1], (4, 5)) in there.placements.known)
            mesh.follow([])
            await until(lambda: connected() == 0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
