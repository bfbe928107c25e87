"""A loop whose clock jumps keeps the order of events, and reports a deadlock."""

import asyncio
import time

import pytest

from fleet.sim.virtual_time import run_in_virtual_time


def test_a_day_of_waiting_takes_no_time_and_keeps_its_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("late", 86_400.0))
            group.create_task(sleeper("early", 0.5))

    before = time.monotonic()
    run_in_virtual_time(main())
    assert woken == [("early", pytest.approx(0.5)), ("late", pytest.approx(86_400.0))]
    assert time.monotonic() - before < 86_400.0


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task is waiting"):
        run_in_virtual_time(main())
