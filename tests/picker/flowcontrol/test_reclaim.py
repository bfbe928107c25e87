"""Requests under way make room for those of higher priority, not more of them than need be."""

from __future__ import annotations

import asyncio

import pytest

from picker.errors import DropReason
from picker.framework.flow import QueuedRequest, Rank
from tests.support.picker.flow_scene import (
    Ceilings,
    Client,
    Pool,
    Scene,
    Slots,
    band,
    settle,
    with_settings,
)

pytestmark = pytest.mark.looptime


class Sheddable:
    """Those of negative priority may be stopped; the lowest first, of equal ones the newest."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        return item.request.priority < 0

    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        return (item.request.priority, -dispatched_at_seconds)


class EvictingScene(Scene):
    """Requests may be stopped."""

    def __init__(self, slots: int, **values: object) -> None:
        policies = (Sheddable(), Sheddable())
        detector = values.pop("detector", None) or Slots(slots, settle_seconds=0.5)
        bands = {-1: band(), -2: band(), 1: band()}
        super().__init__(Pool(1), eviction=policies, detector=detector, bands=bands, **values)

    async def fill(self, *priorities: int) -> list[Client]:
        clients = []
        for priority in priorities:
            clients.append(await self.arrive(priority=priority))
            await asyncio.sleep(0.01)
        assert all(client.ticket is not None for client in clients)
        return clients

    def told(self) -> list[int]:
        return [place for place, client in enumerate(self.clients) if client.evicted]


async def test_the_lowest_and_newest_is_stopped_for_whoever_is_held_back() -> None:
    """One for one place, and it is told so."""
    scene = EvictingScene(4)
    await scene.fill(-1, -2, -2, 0)
    waiting = await scene.arrive()
    assert scene.told() == [2]
    assert scene.clients[2].evicted == [DropReason.EVICTED]
    await scene.done(scene.clients[2])
    assert waiting.ticket is not None


async def test_nobody_is_stopped_for_an_equal_or_a_lower_one() -> None:
    scene = EvictingScene(2)
    await scene.fill(-1, -1)
    await scene.arrive(priority=-1)
    await scene.arrive(priority=-2)
    assert scene.told() == []
    await scene.arrive(priority=1)
    assert len(scene.told()) == 1


async def test_of_two_to_be_stopped_both_are_lower() -> None:
    """Rather one too few than one of the same priority."""
    slots = Slots(4, settle_seconds=0.5)
    scene = EvictingScene(4, detector=slots)
    await scene.fill(-1, -2, 0, 0)
    slots.slots = 1
    scene.gate.pool_changed()
    await scene.arrive(priority=-1)
    assert scene.told() == [1]


async def test_those_who_may_not_be_stopped_are_not() -> None:
    """Priority 0 and above is never evictable, nor is who has not left."""
    scene = EvictingScene(2)
    await scene.fill(0)
    await scene.arrive(priority=-1, leaves=False)
    await scene.arrive(priority=1)
    assert scene.told() == []


async def test_nobody_else_is_stopped_before_the_effect_shows() -> None:
    """Neither while somebody was told, nor for the time that the detector needs."""
    scene = EvictingScene(3)
    await scene.fill(-1, -1, -1)
    for _ in range(3):
        await scene.arrive()
    assert scene.told() == [2]
    await asyncio.sleep(5)
    assert scene.told() == [2]
    await scene.done(scene.clients[2])
    await asyncio.sleep(0.4)
    assert scene.told() == [2]
    await asyncio.sleep(0.2)
    assert scene.told() == [1, 2]


async def test_whoever_does_not_stop_is_given_up_after_ten_seconds() -> None:
    scene = EvictingScene(2)
    await scene.fill(-1, -1)
    await scene.arrive()
    await asyncio.sleep(9.9)
    assert scene.told() == [1]
    assert scene.gauge("pending_reclaim", inference_pool="pool") == pytest.approx(0.5)
    await asyncio.sleep(0.7)
    assert scene.told() == [0, 1]
    assert scene.gauge("revocations_total", outcome="timed_out", inference_pool="pool") == 1
    await scene.done(scene.clients[0])
    await scene.done(scene.clients[1])
    assert scene.gauge("revocations_total", outcome="confirmed", inference_pool="pool") == 1
    assert scene.gauge("pending_reclaim", inference_pool="pool") == 0
    assert scene.gauge("revocations_issued_total", priority="0", inference_pool="pool") == 2


@pytest.mark.parametrize(
    ("running", "expected"), [((-1, -1, -1, -1, -1), 2), ((-1, 0, 0, 0, 0), 1)]
)
async def test_at_most_two_are_stopped_at_a_time(running: tuple[int, ...], expected: int) -> None:
    """As many as the saturation is above the ceiling, and as there are."""
    slots = Slots(10, settle_seconds=0.5)
    scene = EvictingScene(10, detector=slots)
    await scene.fill(*running)
    slots.slots = 1
    scene.gate.pool_changed()
    await scene.arrive()
    assert len(scene.told()) == expected
    assert scene.gauge("reclaim_target", inference_pool="pool") == pytest.approx(4)


async def test_a_band_that_may_never_go_asks_for_nothing() -> None:
    """Its ceiling is 0; the next one below asks."""
    limits = Ceilings({1: 1.0, 0: 1.0})
    scene = EvictingScene(2, usage_limits=limits)
    await scene.fill(-2, -2)
    limits.by_priority = {1: 0.0, 0: 1.0}
    scene.gate.pool_changed()
    await scene.arrive(priority=1)
    assert scene.told() == []
    await scene.arrive(priority=-2)
    await asyncio.sleep(0.3)
    assert scene.told() == []
    await scene.arrive()
    assert scene.told() == [1]
    assert scene.gauge("revocations_issued_total", priority="0", inference_pool="pool") == 1


async def test_a_reload_knows_who_may_be_stopped() -> None:
    """Those under way are judged by the new policies; without any, nobody is stopped."""
    scene = EvictingScene(1)
    eviction = scene.settings.eviction
    await scene.fill(-1)
    scene.gate.use(with_settings(scene.settings, eviction=None))
    await scene.arrive()
    assert scene.told() == []
    scene.gate.use(with_settings(scene.settings, eviction=eviction))
    await settle()
    assert scene.told() == [0]
