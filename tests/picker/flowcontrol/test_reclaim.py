"""Requests under way are evicted for waiting ones of higher priority, no more than needed."""

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
    """Requests of negative priority are evictable: the lowest first, then the newest."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        return item.request.priority < 0

    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        return (item.request.priority, -dispatched_at_seconds)


class EvictingScene(Scene):
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

    def evicted(self) -> list[int]:
        return [place for place, client in enumerate(self.clients) if client.evicted]


async def test_the_lowest_and_newest_is_evicted_for_a_blocked_request() -> None:
    scene = EvictingScene(4)
    await scene.fill(-1, -2, -2, 0)
    waiting = await scene.arrive()
    assert scene.evicted() == [2]
    assert scene.clients[2].evicted == [DropReason.EVICTED]
    await scene.done(scene.clients[2])
    assert waiting.ticket is not None


async def test_no_request_is_evicted_for_an_equal_or_lower_priority() -> None:
    scene = EvictingScene(2)
    await scene.fill(-1, -1)
    await scene.arrive(priority=-1)
    await scene.arrive(priority=-2)
    assert scene.evicted() == []
    await scene.arrive(priority=1)
    assert len(scene.evicted()) == 1


async def test_all_evicted_requests_have_a_lower_priority() -> None:
    """One eviction too few is better than one of an equal priority."""
    slots = Slots(4, settle_seconds=0.5)
    scene = EvictingScene(4, detector=slots)
    await scene.fill(-1, -2, 0, 0)
    slots.slots = 1
    scene.gate.pool_changed()
    await scene.arrive(priority=-1)
    assert scene.evicted() == [1]


async def test_requests_that_are_not_evictable_stay() -> None:
    scene = EvictingScene(2)
    await scene.fill(0)
    await scene.arrive(priority=-1, leaves=False)
    await scene.arrive(priority=1)
    assert scene.evicted() == []


async def test_no_other_request_is_evicted_before_the_effect_shows() -> None:
    scene = EvictingScene(3)
    await scene.fill(-1, -1, -1)
    for _ in range(3):
        await scene.arrive()
    assert scene.evicted() == [2]
    await asyncio.sleep(5)
    assert scene.evicted() == [2]
    await scene.done(scene.clients[2])
    await asyncio.sleep(0.4)
    assert scene.evicted() == [2]
    await asyncio.sleep(0.2)
    assert scene.evicted() == [1, 2]


async def test_an_eviction_times_out_after_ten_seconds() -> None:
    scene = EvictingScene(2)
    await scene.fill(-1, -1)
    await scene.arrive()
    await asyncio.sleep(9.9)
    assert scene.evicted() == [1]
    assert scene.gauge("pending_reclaim", inference_pool="pool") == pytest.approx(0.5)
    await asyncio.sleep(0.7)
    assert scene.evicted() == [0, 1]
    assert scene.gauge("revocations_total", outcome="timed_out", inference_pool="pool") == 1
    await scene.done(scene.clients[0])
    await scene.done(scene.clients[1])
    assert scene.gauge("revocations_total", outcome="confirmed", inference_pool="pool") == 1
    assert scene.gauge("pending_reclaim", inference_pool="pool") == 0
    assert scene.gauge("revocations_issued_total", priority="0", inference_pool="pool") == 2


@pytest.mark.parametrize(
    ("running", "expected"), [((-1, -1, -1, -1, -1), 2), ((-1, 0, 0, 0, 0), 1)]
)
async def test_at_most_two_are_evicted_at_a_time(running: tuple[int, ...], expected: int) -> None:
    slots = Slots(10, settle_seconds=0.5)
    scene = EvictingScene(10, detector=slots)
    await scene.fill(*running)
    slots.slots = 1
    scene.gate.pool_changed()
    await scene.arrive()
    assert len(scene.evicted()) == expected
    assert scene.gauge("reclaim_target", inference_pool="pool") == pytest.approx(4)


async def test_a_band_with_a_ceiling_of_0_evicts_nothing() -> None:
    limits = Ceilings({1: 1.0, 0: 1.0})
    scene = EvictingScene(2, usage_limits=limits)
    await scene.fill(-2, -2)
    limits.by_priority = {1: 0.0, 0: 1.0}
    scene.gate.pool_changed()
    await scene.arrive(priority=1)
    assert scene.evicted() == []
    await scene.arrive(priority=-2)
    await asyncio.sleep(0.3)
    assert scene.evicted() == []
    await scene.arrive()
    assert scene.evicted() == [1]
    assert scene.gauge("revocations_issued_total", priority="0", inference_pool="pool") == 1


async def test_a_reload_applies_new_eviction_policies_to_requests_under_way() -> None:
    scene = EvictingScene(1)
    eviction = scene.settings.eviction
    await scene.fill(-1)
    scene.gate.use(with_settings(scene.settings, eviction=None))
    await scene.arrive()
    assert scene.evicted() == []
    scene.gate.use(with_settings(scene.settings, eviction=eviction))
    await settle()
    assert scene.evicted() == [0]
