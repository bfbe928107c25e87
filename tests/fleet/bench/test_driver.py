"""Sessions of several turns, bodies of both APIs, limits, and a run that is stopped."""

import asyncio
from contextlib import suppress
from itertools import repeat

import pytest

from fleet.bench.driver import Driver, RequestForm
from fleet.bench.workload import SessionTurn, TurnSession
from fleet.sim.virtual_time import run_in_virtual_time
from tests.support.fleet.virtual_endpoint import Times, VirtualEndpoint

TALK = TurnSession(
    "be brief", (SessionTurn("one", 2), SessionTurn("two", 1), SessionTurn("three", 1))
)


def endpoint(ttft: float = 1.0) -> VirtualEndpoint:
    return VirtualEndpoint(lambda number, now: Times(ttft, 0.5))


def run(
    driver_of: VirtualEndpoint, session: TurnSession, form: RequestForm | None = None
) -> Driver:
    async def once() -> Driver:
        driver = driver_of.driver(form)
        driver.think_seconds = 2.0
        await driver.open_loop([(0.0, session)])
        return driver

    return run_in_virtual_time(once())


def test_a_turn_has_all_previous_ones_and_follows_a_pause() -> None:
    seen = endpoint()
    driver = run(seen, TALK)
    last = seen.bodies[-1]["messages"]
    assert [(one["role"], one["content"]) for one in last] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", " w0 w1"),
        ("user", "two"),
        ("assistant", " w0"),
        ("user", "three"),
    ]
    assert seen.came_at == pytest.approx([0.0, 1.5 + 2, 1.5 + 2 + 1 + 2])
    assert [one.intended for one in driver.outcomes] == pytest.approx(seen.came_at)


def test_a_failure_ends_its_session() -> None:
    seen = endpoint()
    seen.answer = b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"
    assert len(run(seen, TALK).outcomes) == 1


def test_bodies_of_both_apis() -> None:
    seen = endpoint()
    run(seen, TurnSession("", (SessionTurn("a", 3),)))
    run(seen, TurnSession("s", (SessionTurn("a", 3),)), RequestForm("m", False, False))
    shared = {"model": "m", "max_tokens": 3, "stream": True}
    shared["stream_options"] = {"include_usage": True}
    chat = [{"role": "user", "content": "a"}]
    assert seen.bodies == [
        {**shared, "ignore_eos": True, "messages": chat},
        {**shared, "prompt": "s\na"},
    ]


def test_a_closed_loop_never_exceeds_its_sessions() -> None:
    async def stage(limit: int | None) -> tuple[Driver, VirtualEndpoint]:
        seen = endpoint(0.5)
        driver = seen.driver()
        driver.max_requests = limit
        await driver.closed_loop(repeat(TurnSession("", (SessionTurn("a", 2),))), 4, 9.5)
        return driver, seen

    driver, seen = run_in_virtual_time(stage(None))
    assert (len(driver.outcomes), seen.connections) == (40, 4)
    assert max(one.in_flight for one in driver.pulses) == 4
    driver, _ = run_in_virtual_time(stage(13))
    assert len(driver.outcomes) == 13


@pytest.mark.parametrize(
    ("header", "came_at"),
    [
        (b"Retry-After: 3\r\n", [0.0, 0.0, 3.1, 3.1, 6.2, 6.2]),  # 0.1 s each
        (b"retry-after: 60\r\n", [0.0, 0.0]),  # the stage ends at its time nevertheless
    ],
)
def test_a_closed_loop_waits_as_long_as_a_refusal_asks(header: bytes, came_at: list[float]) -> None:
    seen = endpoint()
    seen.answer = b"HTTP/1.1 429 Busy\r\n%bcontent-length: 0\r\n\r\n" % header

    async def once() -> float:
        driver = seen.driver()
        await driver.closed_loop(repeat(TurnSession("", (SessionTurn("a", 1),))), 2, 8.0)
        return asyncio.get_running_loop().time()

    ended = run_in_virtual_time(once())
    assert seen.came_at == pytest.approx(came_at)
    assert ended == pytest.approx(8.0)


def test_a_stopped_run_keeps_what_was_answered() -> None:
    async def stopped() -> Driver:
        driver = endpoint().driver()
        arrivals = ((float(at), TurnSession("", (SessionTurn("a", 1),))) for at in range(100))
        task = asyncio.create_task(driver.open_loop(arrivals))
        await asyncio.sleep(10.5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return driver

    driver = run_in_virtual_time(stopped())
    assert (len(driver.outcomes), driver.client.in_flight) == (10, 0)
