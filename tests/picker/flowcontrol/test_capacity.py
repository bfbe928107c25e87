"""Who has to go when a queue is full."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.capacity import MAX_DISPLACED
from picker.flowcontrol.queue import FlowQueue
from picker.framework.flow import QueuedRequest
from tests.depth import examples
from tests.support.picker.flow_scene import (
    Scene,
    Sharing,
    Slots,
    band,
    flow_settings,
    inference_request,
    settle,
)

CAP = 12


def sharing(**values: object) -> object:
    """A band whose flows share a full queue."""
    return band(fairness=Sharing(), **values)


@pytest.mark.looptime
async def test_the_last_of_the_largest_flow_makes_room_for_a_smaller_one() -> None:
    """It is told why, and when to come back; its flow keeps its order and its others."""
    scene = Scene(default_band=sharing(max_requests=4))
    await scene.arrive()
    flood = [await scene.arrive(fairness_id="flood") for _ in range(4)]
    assert (await scene.arrive(fairness_id="flood")).refusal is not None
    calm = await scene.arrive(fairness_id="calm")
    assert calm.waits
    assert [client.waits for client in flood] == [True, True, True, False]
    refusal = flood[3].refusal
    assert (refusal.status, refusal.drop_reason.value) == (429, "rejected-saturated")  # type: ignore[union-attr]
    assert refusal.message.startswith("the queue of requests is full (")
    assert 1 <= (refusal.retry_after_seconds or 0) <= 60
    scene.gate.check_integrity()
    assert scene.gate.queues().outcomes == {"Dispatched": 1, "RejectedCapacity": 2}


@pytest.mark.looptime
async def test_a_higher_priority_takes_the_place_of_the_lowest_one_in_all() -> None:
    """Whatever the policies are; an equal or a lower one does not."""
    scene = Scene(max_requests=4, bands={5: band(), -5: band()})
    await scene.arrive()
    mid = [await scene.arrive(priority=0) for _ in range(2)]
    low = [await scene.arrive(priority=-5) for _ in range(2)]
    assert (await scene.arrive(priority=-5)).refusal is not None
    assert (await scene.arrive(priority=5)).waits
    assert [client.waits for client in low] == [True, False]
    assert (await scene.arrive(priority=0)).waits
    assert not low[0].waits
    assert (await scene.arrive(priority=0)).refusal is not None
    assert (await scene.arrive(priority=5)).waits
    assert [client.waits for client in mid] == [True, True]


@pytest.mark.looptime
async def test_several_go_for_one_that_is_larger_or_none_if_that_is_not_enough() -> None:
    """Nobody is sent away for a newcomer that is refused all the same."""
    scene = Scene(max_bytes=100, bands={5: band(max_bytes=150)}, detector=Slots(1))
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=30) for _ in range(3)]
    assert (await scene.arrive(priority=5, size_bytes=101)).refusal is not None
    assert all(client.waits for client in low)
    assert (await scene.arrive(priority=5, size_bytes=60)).waits
    assert [client.waits for client in low] == [True, False, False]
    assert scene.gate.queued() == (2, 90)


@pytest.mark.looptime
async def test_no_more_than_so_many_go_for_one() -> None:
    most = MAX_DISPLACED
    scene = Scene(max_bytes=2 * most, bands={5: band()})
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=1) for _ in range(2 * most)]
    assert (await scene.arrive(priority=5, size_bytes=most + 1)).refusal is not None
    assert (await scene.arrive(priority=5, size_bytes=most)).waits
    assert sum(client.waits for client in low) == most


@pytest.mark.looptime
async def test_bodies_and_memory_are_counted_apart() -> None:
    """Neither takes of the other's cap; a higher priority takes a lower one's memory."""
    scene = Scene(max_bytes=100, max_memory_bytes=1000, bands={5: band()}, detector=Slots(1))
    await scene.arrive(size_bytes=0)
    small = [await scene.arrive(size_bytes=10, held_bytes=400) for _ in range(2)]
    assert scene.gate.queued() == (2, 20)
    refused = (await scene.arrive(size_bytes=10, held_bytes=201)).refusal
    assert "memory in all" in refused.message
    assert (await scene.arrive(size_bytes=80, held_bytes=200)).waits
    assert (await scene.arrive(priority=5, size_bytes=0, held_bytes=200)).waits
    assert [client.waits for client in small] == [True, True]
    assert (await scene.arrive(priority=5, size_bytes=0, held_bytes=400)).waits
    assert [client.waits for client in small] == [True, False]
    view = scene.gate.queues()
    assert (view.queued_bytes, view.queued_memory_bytes, view.max_memory_bytes) == (10, 1000, 1000)


@pytest.mark.looptime
async def test_what_can_never_be_held_is_not_asked_to_come_again() -> None:
    scene = Scene(max_memory_bytes=100, detector=Slots(1))
    await scene.arrive()
    refusal = (await scene.arrive(size_bytes=1, held_bytes=101)).refusal
    assert refusal.retry_after_seconds is None
    assert "it takes 101 bytes, and no more than 100 may ever wait" in refusal.message


@pytest.mark.looptime
@pytest.mark.parametrize("caps", [{"max_bytes": 100}, {"bands": {0: band(max_bytes=100)}}])
@pytest.mark.parametrize("pool_size", [0, 1])
async def test_what_can_never_fit_is_not_asked_to_come_again(caps: Any, pool_size: int) -> None:
    """With and without waiting requests, and with an empty pool; one that fits alone may retry."""
    scene = Scene(**caps)
    await scene.resize(pool_size)
    for _ in range(2):
        refusal = (await scene.arrive(size_bytes=101)).refusal
        assert (refusal.status, refusal.retry_after_seconds) == (429, None)
        assert "it takes 101 bytes, and no more than 100 may ever wait" in refusal.message
        assert "retry-after" not in dict(refusal.headers)
        await scene.arrive(size_bytes=0)
        await scene.arrive(size_bytes=60)
    refusal = (await scene.arrive(size_bytes=100)).refusal
    assert refusal.retry_after_seconds is not None


@pytest.mark.looptime
async def test_before_an_empty_pool_nobody_is_to_blame() -> None:
    """503 for whoever makes room, as for newcomers."""
    scene = Scene(default_band=sharing(max_requests=2))
    await scene.resize(0)
    flood = [await scene.arrive(fairness_id="flood") for _ in range(2)]
    await scene.arrive(fairness_id="calm")
    await settle()
    refusal = flood[1].refusal
    assert refusal.status == 503


@examples(60)
@given(
    flows=st.lists(st.sampled_from("abcd"), min_size=CAP, max_size=80),
    leaving=st.lists(st.integers(0, CAP), max_size=20),
)
def test_nobody_below_their_share_is_refused_while_others_hold_more_than_theirs(
    flows: list[str], leaving: list[int]
) -> None:
    """A share is by weight, of the flows that wait and of the newcomer's."""
    chosen = flow_settings(default_band=sharing(max_requests=CAP))
    queue, waiting = FlowQueue(chosen, lambda *_: None), list[QueuedRequest]()
    where = queue.band_for(0)
    for sequence, flow in enumerate(flows):
        if sequence % 4 == 3 and leaving and waiting:
            queue.remove(waiting.pop(leaving.pop() % len(waiting)), 0.0)
        item = QueuedRequest(inference_request(fairness_id=flow), sequence, float(sequence), 1)
        if queue.cap_exceeded(item, where) is not None:
            displaced = queue.displaced_by(item, where)
            assert len(displaced) <= 1
            if not displaced:
                _check_that_it_is_above_its_share(waiting, flow)
                continue
            mine = [one for one in waiting if one.flow == displaced[0].flow]
            assert displaced[0] is mine[-1]
            waiting.remove(displaced[0])
            queue.remove(displaced[0], 0.0)
        queue.push(item, where)
        waiting.append(item)
        assert queue.num_requests <= CAP
        queue.check_integrity()


def _check_that_it_is_above_its_share(waiting: list[QueuedRequest], flow: str) -> None:
    weight = {"b": 2.0}
    held = Counter(one.flow for one in waiting)
    weights = sum(weight.get(one, 1.0) for one in {*held, flow})
    share = {one: CAP * weight.get(one, 1.0) / weights for one in {*held, flow}}
    assert held[flow] + 1 > share[flow] or not any(held[one] > share[one] for one in held)
