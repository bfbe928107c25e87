"""The port for the reports of replicas about one pool or several."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest

from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.discovery import PeerAddress
from picker.peers.inbox import InboxLimits
from picker.peers.mesh import Mesh
from picker.peers.outbox import Cursor
from picker.peers.server import MAX_CALLS, PeerServer, PoolReports, peer_port
from picker.peers.wire import REPORT_METHOD
from tests.support.picker.replica_mesh import KEYS, Node, node
from tests.support.picker.replicas_scene import LOOPBACK
from tests.support.waiting import until


@dataclass
class Pool:
    node: Node
    is_ready: bool = True
    series: Any = field(default_factory=lambda: PickerMetrics().peers)

    @property
    def num_reporting(self) -> float:
        return dict(self.series.reporting.numbers()).get((), 0.0)

    @property
    def refused(self) -> float:
        return dict(self.series.messages_refused_total.numbers()).get((), 0.0)


@dataclass
class Scene:
    pools: Mapping[str, Pool]
    rng: Random
    now: float = 0.0

    def __post_init__(self) -> None:
        reports = {name: self._reports_of(pool) for name, pool in self.pools.items()}
        self.server = PeerServer(reports, lambda: self.now)

    def _reports_of(self, pool: Pool) -> PoolReports:
        return PoolReports(pool.node.exchange, pool.series, lambda: pool.is_ready)

    async def open(self) -> None:
        port = await self.server.start(peer_port(LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(self.address, options=options)

    def caller(self, pool: str) -> Node:
        return node(self.rng, pool=pool)

    def call(self) -> Any:
        return self.channel.stream_stream(REPORT_METHOD)()


async def begun(calling: Any, caller: Node) -> tuple[bytes, Cursor]:
    await calling.write(caller.exchange.hello(0.0))
    return caller.exchange.welcomed(await calling.read(), 0.0)


@asynccontextmanager
async def scene(*names: str, seed: int = 5) -> AsyncIterator[Scene]:
    rng = Random(seed)
    opened = Scene({name: Pool(node(rng, pool=name)) for name in names}, rng)
    await opened.open()
    try:
        yield opened
    finally:
        await opened.channel.close()
        await opened.server.stop()


async def test_the_load_of_a_killed_replica_expires() -> None:
    async with scene("pool") as opened:
        here, killed, calling = opened.pools["pool"].node, opened.caller("pool"), opened.call()
        killed.inflight.acquire(KEYS[0])
        killed.exchange.tick(0.0)
        _, cursor = await begun(calling, killed)
        await calling.write(killed.exchange.next(cursor, 0.0))
        await until(lambda: here.inflight.requests(KEYS[0]) == 1)
        await opened.channel.close(0)
        opened.now = InboxLimits().silence_seconds
        here.exchange.tick(opened.now)
        assert here.inflight.requests(KEYS[0]) == 1
        here.exchange.tick(opened.now + 0.1)
        assert here.inflight.counts == {}


async def test_a_mesh_follows_addresses_but_not_its_own() -> None:
    async with scene("pool", seed=3) as own, scene("pool", seed=4) as other:
        here, there = own.pools["pool"].node, other.pools["pool"].node
        metrics = PickerMetrics().peers
        mesh = Mesh(here.exchange, metrics, lambda: 0.0, None, 0.01)
        mesh.follow([PeerAddress(one.address, "") for one in (own, other)])
        tasks = [asyncio.create_task(mesh.run()), asyncio.create_task(mesh.tick())]
        try:

            def ended(result: str) -> float:
                return dict(metrics.calls_total.numbers()).get((result,), 0)

            def connected() -> float:
                return dict(metrics.connected.numbers()).get((), 0)

            assert mesh.num_peers is None
            await until(lambda: ended("self") == 1 and connected() == 1)
            assert mesh.num_peers == 1
            here.placements.place(KEYS[1], 4, 5)
            await until(lambda: (KEYS[1], (4, 5)) in there.placements.known)
            mesh.follow([PeerAddress("127.0.0.1:1", "")])
            await until(lambda: ended("unreachable") == 1)
            assert (connected(), mesh.num_peers) == (0, None)
            mesh.follow([PeerAddress(own.address, "")])
            await until(lambda: mesh.num_peers == 0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_call_belongs_to_the_pool_that_it_names() -> None:
    async with scene("a", "b") as here:
        caller, calling = here.caller("b"), here.call()
        peer, cursor = await begun(calling, caller)
        assert peer == here.pools["b"].node.exchange.replica_id
        caller.inflight.acquire(KEYS[0])
        caller.exchange.tick(0.0)
        message = caller.exchange.next(cursor, 0.0)
        await calling.write(message)
        await until(lambda: here.pools["b"].node.inflight.requests(KEYS[0]) == 1)
        assert here.pools["a"].node.inflight.requests(KEYS[0]) == 0
        assert (here.pools["a"].num_reporting, here.pools["b"].num_reporting) == (0, 1)
        received = here.pools["b"].series.messages_total.numbers()
        assert (("received",), 1.0) in list(received)
        assert not any(number for _, number in here.pools["a"].series.messages_total.numbers())


async def test_a_call_about_another_pool_is_refused_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene("a", "b") as here:
        with caplog.at_level(logging.WARNING, "picker.peers.server"):
            for _ in range(3):
                calling = here.call()
                await calling.write(here.caller("c").exchange.hello(0.0))
                assert await calling.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert await calling.details() == "this is a replica of the pools a, b, not of 'c'"
        assert [each.name for each in caplog.records].count("picker.peers.server") == 1
        assert here.pools["a"].refused == 3


@pytest.mark.parametrize("first", [b"", b"\xff\xff", b"\x12\x00"])
async def test_a_call_without_a_hello_is_refused(first: bytes) -> None:
    async with scene("a", "b") as here:
        calling = here.call()
        await calling.write(first)
        assert await calling.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (here.pools["a"].num_reporting, here.pools["b"].num_reporting) == (0, 0)


async def test_an_invalid_message_is_counted_for_its_pool() -> None:
    async with scene("a", "b") as here:
        caller, calling = here.caller("b"), here.call()
        await begun(calling, caller)
        await calling.write(b"\xff\xff")
        assert await calling.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert here.pools["b"].refused == 1
        assert here.pools["a"].refused == 0


async def test_a_pool_that_is_not_known_yet_refuses_only_its_own_calls() -> None:
    async with scene("a", "b") as here:
        here.pools["a"].is_ready = False
        refused, accepted = here.call(), here.call()
        await refused.write(here.caller("a").exchange.hello(0.0))
        assert await refused.code() is grpc.StatusCode.UNAVAILABLE
        await begun(accepted, here.caller("b"))
        here.pools["b"].is_ready = False
        late = here.call()
        assert await late.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_replica_that_calls_itself_notices_it_in_each_pool() -> None:
    async with scene("a", "b") as here:
        for pool in here.pools.values():
            exchange, calling = pool.node.exchange, here.call()
            await calling.write(exchange.hello(0.0))
            assert await calling.read() is not grpc.aio.EOF
            assert await calling.code() is grpc.StatusCode.OK
            assert pool.num_reporting == 0


@pytest.mark.parametrize(
    ("calls", "is_taken"), [(MAX_CALLS, True), (2 * MAX_CALLS - 1, True), (2 * MAX_CALLS, False)]
)
async def test_the_limit_on_calls_grows_with_the_number_of_pools(
    calls: int, is_taken: bool
) -> None:
    """Otherwise five other replicas of 64 pools would exceed it."""
    async with scene("a", "b") as here:
        here.server._num_calls = calls
        caller, calling = here.caller("b"), here.call()
        if is_taken:
            await begun(calling, caller)
            calling.cancel()
            await until(lambda: here.server._num_calls == calls)
        else:
            assert await calling.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_replica_counts_until_its_last_call_ends() -> None:
    pool = Pool(node(Random(1), pool=KEYS[0]))
    reports = PoolReports(pool.node.exchange, pool.series, lambda: True)
    for peer in (b"a", b"b", b"a"):
        reports.begin(peer, "10.0.0.1")
    counts = []
    for peer in (b"a", b"a", b"b"):
        reports.end(peer)
        counts.append(pool.num_reporting)
    assert counts == [2, 1, 0]
