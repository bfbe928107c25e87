"""A reload applies new rules to waiting requests and loses none."""

import asyncio
from itertools import pairwise

import pytest

from picker.flowcontrol.core import MAX_DISPATCHES_PER_PASS
from tests.support.picker.flow_scene import Scene, Slots, band, settle, with_settings

LABELS = {
    "fairness_id": "t",
    "priority": "0",
    "inference_pool": "pool",
    "model_name": "m",
    "target_model_name": "m",
}
pytestmark = pytest.mark.looptime


async def test_turning_the_gate_off_admits_every_waiting_request() -> None:
    scene = Scene()
    clients = [await scene.arrive() for _ in range(5)]
    scene.gate.use(None)
    await settle()
    assert all(client.ticket is not None for client in clients)
    assert scene.gate.is_open
    assert not scene.gate.queues().is_on
    clients.append(await scene.arrive(leaves=False))
    scene.gate.use(scene.settings)
    assert (await scene.arrive()).waits
    for client in clients:
        scene.close(client)
    await settle()
    assert scene.clients[-1].ticket is not None
    scene.gate.check_integrity()


async def test_a_gate_that_is_turned_off_empties_its_queue_in_bounded_passes() -> None:
    scene = Scene()
    for _ in range(10 * MAX_DISPATCHES_PER_PASS):
        await scene.arrive()
    scene.gate.use(None)
    left = [scene.gate.num_waiting]
    while left[-1]:
        await asyncio.sleep(0)
        left.append(scene.gate.num_waiting)
        scene.gate.check_integrity()
        assert scene.gate.is_open
    steps = [before - after for before, after in pairwise(left)]
    assert left[0] == 10 * MAX_DISPATCHES_PER_PASS - 1
    assert max(steps) == MAX_DISPATCHES_PER_PASS
    await settle()
    assert all(client.ticket is not None for client in scene.clients)
    assert scene.gauge("queue_size", **LABELS) == 0


async def test_a_gate_that_is_turned_on_again_queues_the_remaining_requests() -> None:
    scene = Scene(request_ttl_seconds=5.0)
    for _ in range(3 * MAX_DISPATCHES_PER_PASS):
        await scene.arrive()
    scene.gate.use(None)
    await asyncio.sleep(0)
    scene.gate.use(scene.settings)
    await settle()
    scene.gate.check_integrity()
    rest = [client for client in scene.clients if client.waits]
    assert rest == scene.clients[-len(rest) :]
    assert 0 < len(rest) == scene.gate.num_waiting == scene.gate.queued()[0]
    assert scene.gauge("queue_size", **LABELS) == len(rest)
    await asyncio.sleep(5.1)
    assert all(client.refusal is not None for client in rest)


async def test_a_reload_preserves_the_order_of_waiting_requests() -> None:
    scene = Scene()
    running = await scene.arrive()
    for name in ("a", "b", "c"):
        await scene.arrive(name, fairness_id=name)
    scene.gate.use(with_settings(scene.settings, max_requests=2, bands={3: band()}))
    assert (await scene.arrive("d")).refusal is not None
    await scene.done(running)
    await scene.done(scene.order[-1])
    assert (await scene.arrive("e")).waits
    while scene.order[-1].request.request_id != "e":
        await scene.done(scene.order[-1])
    assert [one.request.request_id for one in scene.order[1:]] == ["a", "b", "c", "e"]


async def test_a_reload_moves_waiting_requests_to_new_bands_of_their_priority() -> None:
    scene = Scene(bands={2: band()})
    await scene.arrive()
    await scene.arrive(priority=2)
    await scene.arrive(priority=8)
    scene.gate.use(with_settings(scene.settings, bands={8: band()}))
    bands = {one.priority: one.queued_requests for one in scene.gate.queues().bands}
    assert bands == {8: 1, 2: 1, 0: 0}
    scene.gate.check_integrity()


async def test_a_reload_that_adds_slots_admits_waiting_requests() -> None:
    scene = Scene()
    await scene.arrive()
    waiting = await scene.arrive()
    scene.gate.use(with_settings(scene.settings, detector=Slots(2)))
    await settle()
    assert waiting.ticket is not None


async def test_bands_of_objectives_are_added_and_removed() -> None:
    scene = Scene()
    scene.gate.set_priorities([7, -7])
    await scene.arrive()
    client = await scene.arrive(priority=7)
    scene.gate.set_priorities([])
    assert [one.priority for one in scene.gate.queues().bands] == [7, 0]
    client.task.cancel()
    await asyncio.sleep(301)
    assert [one.priority for one in scene.gate.queues().bands] == [0]
