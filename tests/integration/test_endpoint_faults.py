"""Workers that fail behind a real Envoy and a real picker: little is lost, and they come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from failing_fleet import FAILS_ALL, FAILS_NONE, FailingFleet, until
from running_fleet import LIMIT_SECONDS, Fleet, free_base_port, running_fleet

pytestmark = pytest.mark.envoy
CLIENTS = 32
EJECTIONS = "pointsman_endpoint_ejections_total"
PROBES = "pointsman_endpoint_probes_total"


@asynccontextmanager
async def failing_fleet(*flags: str) -> AsyncIterator[tuple[Fleet, FailingFleet]]:
    """Three workers."""
    timeout = aiohttp.ClientTimeout(LIMIT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        running_fleet(free_base_port(), "--workers", "3", *flags) as fleet,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
    ):
        await fleet.ready()
        yield fleet, FailingFleet(fleet, http)


@asynccontextmanager
async def clients(failing: FailingFleet) -> AsyncIterator[None]:
    """So many ask one thing after the other."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(failing.keep_asking(stop))
        try:
            yield
        finally:
            stop.set()


async def knows_two(failing: FailingFleet) -> bool:
    """Whether the picker has taken one endpoint away."""
    return await failing.num_endpoints() == 2


async def are_busy(failing: FailingFleet) -> bool:
    """Whether the workers that serve have shown that they can."""
    return failing.statuses[200] >= 3 * CLIENTS


async def has_received(failing: FailingFleet, number: int, requests: int) -> bool:
    """Whether a worker has been sent so many requests, ever."""
    return await failing.received(number) >= requests


@pytest.mark.parametrize("routing", ["override-host", "original-dst"])
async def test_a_worker_that_fails_everything_spoils_few_requests(routing: str) -> None:
    """It joins while 32 clients ask, gets no more than five, then a probe a second at most; once it
    is well, the next probe brings it back.
    """
    async with failing_fleet("--routing", routing) as (_, failing):
        failing.list_workers(0, 1)
        await until(lambda: knows_two(failing))
        await failing.configure(2, FAILS_ALL)
        async with clients(failing):
            await until(lambda: are_busy(failing))
            failing.list_workers(0, 1, 2)
            await failing.until(EJECTIONS, 1)
            loop = asyncio.get_running_loop()
            ejected_at, before = loop.time(), failing.statuses[500]
            assert before <= 5
            await failing.until(PROBES, 2, result="failure")
            assert failing.statuses[500] - before <= loop.time() - ejected_at + 1
            await failing.configure(2, FAILS_NONE)
            spoilt = failing.statuses[500]
            await failing.until(PROBES, 1, result="success")
            assert failing.statuses[500] - spoilt <= 1  # a probe that was under way
            before = await failing.received(2)
            await until(lambda: has_received(failing, 2, before + 20))
        assert await failing.series(EJECTIONS) == 1
        assert await failing.series("pointsman_endpoints_ejected") == 0
        assert set(failing.statuses) == {200, 500}


async def test_a_crowd_risks_little_on_an_idle_pool_with_a_broken_worker() -> None:
    """All come at once, before any worker has answered: those beyond a few wait a moment. The
    worker itself has seen no more than what the clients have been told.
    """
    async with failing_fleet() as (_, failing):
        await failing.configure(0, FAILS_ALL)
        received = await failing.received(0)
        async with clients(failing):
            await failing.until(EJECTIONS, 1)
            assert failing.statuses[500] <= 5
            await until(lambda: are_busy(failing))
            await failing.until(PROBES, 1, result="failure")
        assert set(failing.statuses) == {200, 500}
        assert await failing.received(0) - received == failing.statuses[500]


async def test_a_worker_that_is_killed_costs_no_request() -> None:
    """Envoy tries elsewhere, the picker learns it from who has answered; started again, the worker
    is used again.
    """
    async with failing_fleet() as (_, failing):
        async with clients(failing):
            await until(lambda: are_busy(failing))
            os.kill(failing.pid_of(0), signal.SIGKILL)
            await failing.until(EJECTIONS, 1, endpoint_name="worker-1")
            before = await failing.received(0)
            await until(lambda: has_received(failing, 0, before + 20))
        assert await failing.series("pointsman_endpoints_ejected") == 0
        assert set(failing.statuses) == {200}
