"""A fleet under load is watched: with the page in a real browser, and with `pointsman top`."""

import asyncio

import pytest

from tests.support.fleet.browser import Browser, browser
from tests.support.fleet.running_fleet import Fleet, pointsman, ready_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.full]
WORKERS = 10
AT_ONCE = 6


async def _load(fleet: Fleet) -> None:
    async def one() -> None:
        while True:
            assert await fleet.say_hello() == 4

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one())


async def test_the_page_and_top_show_a_fleet_under_load() -> None:
    async with ready_fleet("--workers", str(WORKERS)) as fleet, browser() as window:
        load = asyncio.ensure_future(_load(fleet))
        try:
            await _watch_page(window, fleet)
            await _watch_top(fleet)
            assert not load.done(), load
        finally:
            load.cancel()
            await asyncio.wait([load])


async def _watch_page(window: Browser, fleet: Fleet) -> None:
    await window.look(1280)
    await window.open(fleet.picker_url)
    await window.until(f"document.querySelectorAll('#endpoints-rows > tr').length === {WORKERS}")
    await window.until("document.querySelectorAll('#requests-rows > tr').length === 15")
    # Somewhere something runs, and every endpoint is known to be well.
    await window.until(
        "[...document.querySelectorAll('#endpoints-rows .running .line')]"
        ".some((one) => one.getAttribute('d').split('L').length > 2)"
    )
    rows = "document.querySelector('#endpoints-rows').innerText"
    await window.until(f"{rows}.match(/healthy/g)?.length === {WORKERS}")
    text = await window.run(rows)
    assert all(f"worker-{number}" in text for number in range(1, WORKERS + 1))
    summary = "document.querySelector('#summary').innerText"
    await window.until(f"{summary}.includes('{WORKERS} of {WORKERS}')")
    await window.until("document.querySelector('#requests-rows').innerText.includes('completed')")
    assert window.complaints == []


async def _top(fleet: Fleet) -> list[str]:
    done = await pointsman("top", "--once", "--picker", fleet.picker_url)
    assert done.returncode == 0
    return done.stdout.splitlines()


async def _watch_top(fleet: Fleet) -> None:
    def are_well(lines: list[str]) -> bool:
        is_usable = f"{WORKERS} of {WORKERS} endpoints usable" in lines[0]
        return is_usable and sum("healthy" in line for line in lines) == WORKERS

    lines = await until(lambda: _top(fleet), are_well, what="all endpoints are well")
    names = {line.split()[0] for line in lines if line.startswith("worker-")}
    assert names == {f"worker-{number}" for number in range(1, WORKERS + 1)}
    assert any(" completed " in line and " worker-" in line for line in lines)
