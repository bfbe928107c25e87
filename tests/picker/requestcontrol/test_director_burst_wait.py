"""Requests that come to a pool of which nothing is known wait a moment, and no longer."""

import asyncio
from dataclasses import replace
from typing import Any

from picker.outliers.burst_wait import BurstWait
from picker.outliers.detector import OutlierDetector
from picker.requestcontrol.director import Director
from picker.types import Candidate, Endpoint, FinishCause, RawRequest

COMPLETION = RawRequest({":path": "/v1/completions"}, b'{"model":"m","prompt":"p"}')


class Unsure(OutlierDetector):
    unsure = True

    def __init__(self) -> None:
        super().__init__()
        self.held.add("another endpoint")

    def is_unsure(self, now_seconds: float) -> bool:
        return self.unsure


async def test_all_that_wait_go_on_when_the_answers_are_there() -> None:
    burst = BurstWait(1e6)
    waiting = [asyncio.create_task(burst.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    burst.wake()
    await asyncio.gather(*waiting)
    later = asyncio.create_task(burst.settled())
    await asyncio.sleep(0)
    assert not later.done()
    burst.wake()
    await later


async def test_a_wait_ends() -> None:
    await BurstWait(0.001).settled()


async def test_a_request_that_would_wait_is_not_decided_at_once(house: Any) -> None:
    house.pool_of(Candidate(Endpoint("pod-0", "10.0.0.1", 8000)))
    unsure = Unsure()
    burst = BurstWait(1e6)
    around = replace(house.director.context, health=unsure, burst_wait=burst)
    director = Director(house.pipeline(), around)
    waits, gone = director.begin(), director.begin()
    assert not waits.decides_at_once(COMPLETION)
    tasks = [asyncio.create_task(one.route(COMPLETION)) for one in (waits, gone)]
    await asyncio.sleep(0)
    assert around.inflight.total == 0
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    gone.finish(FinishCause.CLIENT_GONE)
    unsure.unsure = False
    burst.wake()
    assert (await tasks[0]).destination == "10.0.0.1:8000"
    assert around.inflight.total == 1
    waits.finish(FinishCause.COMPLETED, 200)
    assert around.inflight.total == 0
    assert director.begin().decides_at_once(COMPLETION)
