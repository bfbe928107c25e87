"""One port where the replicas of several pools are heard, each about its own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest

from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.server import MAX_CALLS, PeerServer, PoolReports, peer_port
from picker.peers.wire import REPORT_METHOD
from tests.support.picker.replica_mesh import KEYS, Node, node
from tests.support.picker.replicas_scene import LOOPBACK
from tests.support.waiting import until


@dataclass
class Pool:
    """One that is heard of here."""

    node: Node
    is_ready: bool = True
    series: Any = field(default_factory=lambda: PickerMetrics().peers)

    @property
    def heard(self) -> float:
        """How many replicas tell about it."""
        return dict(self.series.heard.numbers()).get((), 0.0)

    @property
    def refused(self) -> float:
        """How many messages about it were refused."""
        return dict(self.series.messages_refused_total.numbers()).get((), 0.0)


@dataclass
class Scene:
    """The port's pools, and a way to call."""

    pools: Mapping[str, Pool]
    channel: grpc.aio.Channel
    rng: Random
    server: PeerServer

    def caller(self, pool: str) -> Node:
        return node(self.rng, pool=pool)

    def call(self) -> Any:
        """A call to the port."""
        return self.channel.stream_stream(REPORT_METHOD)()


@asynccontextmanager
async def scene(*names: str) -> AsyncIterator[Scene]:
    """A port of these pools."""
    rng = Random(5)
    pools = {name: Pool(node(rng, pool=name)) for name in names}

    def hearing(pool: Pool) -> PoolReports:
        return PoolReports(pool.node.exchange, pool.series, lambda: pool.is_ready)

    server = PeerServer({name: hearing(pool) for name, pool in pools.items()}, lambda: 0.0)
    port = await server.start(peer_port(LOOPBACK, 0))
    options = [("grpc.use_local_subchannel_pool", 1)]
    try:
        address = f"{LOOPBACK}:{port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Scene(pools, channel, rng, server)
    finally:
        await server.stop()


async def test_a_call_is_about_the_pool_that_it_names() -> None:
    """What it tells is learned there, and counted there; the other pool knows of nothing."""
    async with scene("a", "b") as here:
        caller, calling = here.caller("b"), here.call()
        await calling.write(caller.exchange.hello(0.0))
        peer, cursor = caller.exchange.welcomed(await calling.read(), 0.0)
        assert peer == here.pools["b"].node.exchange.replica_id
        caller.inflight.acquire(KEYS[0])
        caller.exchange.tick(0.0)
        message = caller.exchange.next(cursor, 0.0)
        await calling.write(message)
        await until(lambda: here.pools["b"].node.inflight.requests(KEYS[0]) == 1)
        assert here.pools["a"].node.inflight.requests(KEYS[0]) == 0
        assert (here.pools["a"].heard, here.pools["b"].heard) == (0, 1)
        received = here.pools["b"].series.messages_total.numbers()
        assert (("received",), 1.0) in list(received)
        assert not any(number for _, number in here.pools["a"].series.messages_total.numbers())


async def test_a_pool_that_is_not_served_here_is_refused_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its replica tries again and again, but the log is told once."""
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
async def test_who_says_nothing_sensible_first_is_refused(first: bytes) -> None:
    async with scene("a", "b") as here:
        calling = here.call()
        await calling.write(first)
        assert await calling.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (here.pools["a"].heard, here.pools["b"].heard) == (0, 0)


async def test_what_a_pools_replica_says_wrong_is_counted_for_that_pool() -> None:
    """And not for the one that comes first."""
    async with scene("a", "b") as here:
        caller, calling = here.caller("b"), here.call()
        await calling.write(caller.exchange.hello(0.0))
        caller.exchange.welcomed(await calling.read(), 0.0)
        await calling.write(b"\xff\xff")
        assert await calling.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert here.pools["b"].refused == 1
        assert here.pools["a"].refused == 0


async def test_one_pool_that_is_not_known_yet_puts_off_only_its_own() -> None:
    """The others' replicas are heard."""
    async with scene("a", "b") as here:
        here.pools["a"].is_ready = False
        put_off, heard = here.call(), here.call()
        await put_off.write(here.caller("a").exchange.hello(0.0))
        assert await put_off.code() is grpc.StatusCode.UNAVAILABLE
        caller = here.caller("b")
        await heard.write(caller.exchange.hello(0.0))
        caller.exchange.welcomed(await heard.read(), 0.0)
        here.pools["b"].is_ready = False
        nobody = here.call()
        assert await nobody.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_replica_that_calls_itself_finds_out_for_each_pool() -> None:
    """By the id that it has in that pool."""
    async with scene("a", "b") as here:
        for pool in here.pools.values():
            exchange, calling = pool.node.exchange, here.call()
            await calling.write(exchange.hello(0.0))
            assert await calling.read() is not grpc.aio.EOF
            assert await calling.code() is grpc.StatusCode.OK
            assert pool.heard == 0


@pytest.mark.parametrize(
    ("calls", "is_taken"), [(MAX_CALLS, True), (2 * MAX_CALLS - 1, True), (2 * MAX_CALLS, False)]
)
async def test_there_is_room_for_the_replicas_of_every_pool(calls: int, is_taken: bool) -> None:
    """With room for those of one alone, five other replicas of 64 pools would not find any."""
    async with scene("a", "b") as here:
        here.server._num_calls = calls
        caller, calling = here.caller("b"), here.call()
        if is_taken:
            await calling.write(caller.exchange.hello(0.0))
            caller.exchange.welcomed(await calling.read(), 0.0)
            calling.cancel()
            await until(lambda: here.server._num_calls == calls)
        else:
            assert await calling.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_replica_is_heard_until_the_last_of_its_calls_is_over() -> None:
    """It may have two at a time; then it is forgotten."""
    pool = Pool(node(Random(1), pool=KEYS[0]))
    reports = PoolReports(pool.node.exchange, pool.series, lambda: True)
    for peer in (b"a", b"b", b"a"):
        reports.begin(peer, "10.0.0.1")
    heard = []
    for peer in (b"a", b"a", b"b"):
        reports.end(peer)
        heard.append(pool.heard)
    assert heard == [2, 1, 0]
