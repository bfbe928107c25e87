"""Requests that come to a pool which nobody can vouch for wait a moment, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from picker.outliers.settling import NeverUnsure, Settling
from picker.requestcontrol.director import Director
from picker.types import Candidate, Endpoint, FinishCause, RawRequest

COMPLETION = RawRequest({":path": "/v1/completions"}, b'{"model":"m","prompt":"p"}')


class Unsure:
    """A memory that says what it is told to say."""

    def __init__(self) -> None:
        self.unsure = True

    def is_unsure(self, now_seconds: float) -> bool:
        """As told."""
        return self.unsure


async def test_all_that_wait_go_on_when_the_answers_are_there() -> None:
    """And who comes later waits for the next ones."""
    memory = Unsure()
    settling = Settling(memory, lambda: 0.0, 1e6)
    waiting = [asyncio.create_task(settling.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    settling.wake()
    await asyncio.gather(*waiting)
    later = asyncio.create_task(settling.settled())
    await asyncio.sleep(0)
    assert not later.done()
    memory.unsure = False
    await settling.settled()
    settling.wake()
    await later


async def test_patience_ends() -> None:
    """An answer may take long."""
    settling = Settling(Unsure(), lambda: 0.0, 0.001)
    assert not settling.is_settled
    await settling.settled()
    assert not settling.is_settled  # nobody knows more: only patience has ended


def test_without_a_memory_all_is_settled() -> None:
    """Nobody could say when to go on."""
    assert Settling(NeverUnsure(), lambda: 0.0, 0.0).is_settled


async def test_a_request_that_would_wait_is_not_decided_at_once(house: Any) -> None:
    """It leaves after the wait; one that is cancelled meanwhile holds nothing."""
    house.pool_of(Candidate(Endpoint("pod-0", "10.0.0.1", 8000)))
    memory = Unsure()
    settling = Settling(memory, lambda: 0.0, 1e6)
    around = replace(house.director._surroundings, settling=settling)
    director = Director(house.pipeline(), around)
    waits, gone = director.begin(), director.begin()
    assert not waits.decides_at_once
    tasks = [asyncio.create_task(one.route(COMPLETION)) for one in (waits, gone)]
    await asyncio.sleep(0)
    assert around.inflight.total == 0
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    gone.finish(FinishCause.CLIENT_GONE)
    memory.unsure = False
    settling.wake()
    assert (await tasks[0]).destination == "10.0.0.1:8000"
    assert around.inflight.total == 1
    waits.finish(FinishCause.COMPLETED, 200)
    assert around.inflight.total == 0
    assert director.begin().decides_at_once
