"""A pool of hundreds of endpoints is neither scanned for each request nor overfilled."""

import asyncio

import pytest

from tests.support.picker.flow_scene import Pool, Scene, Slots, inference_request

pytestmark = pytest.mark.looptime


async def test_a_change_of_a_large_pool_survives_other_events() -> None:
    """A pass with the old estimate, before the next scan, must not discard the change."""
    scene = Scene(Pool(100))
    running = [await scene.arrive() for _ in range(100)]
    waiting = [await scene.arrive() for _ in range(10)]
    scene.settings.detector.slots = 2  # type: ignore[attr-defined]
    scene.gate.pool_changed()
    assert waiting[0].waits
    await scene.done(running[0])
    assert [one.ticket is not None for one in waiting] == [True] + [False] * 9
    await asyncio.sleep(0.004)
    assert all(one.ticket is not None for one in waiting)


async def test_a_large_pool_is_not_scanned_for_each_request() -> None:
    detector = Slots(10)
    scene = Scene(Pool(1000), detector=detector)
    tickets = 0
    while scene.gate.is_open:
        ticket = await scene.gate.admit(inference_request(), None)
        key = f"default/e{tickets % 1000}"
        scene.pool.under_way[key] += 1
        ticket.left(key)
        tickets += 1
    assert tickets == pytest.approx(10_000, abs=1000 / 16)
    assert detector.asked < 1000
