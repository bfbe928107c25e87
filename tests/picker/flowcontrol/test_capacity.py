"""A full queue displaces requests of lower priority or of the largest flow."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.capacity import MAX_DISPLACED, displaced_by
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
    return band(fairness=Sharing(), **values)


@pytest.mark.looptime
async def test_a_smaller_flow_displaces_the_last_request_of_the_largest() -> None:
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
async def test_a_higher_priority_displaces_the_lowest_of_all() -> None:
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
async def test_a_larger_request_displaces_several_or_none_if_they_do_not_suffice() -> None:
    scene = Scene(max_bytes=100, bands={5: band(max_bytes=150)}, detector=Slots(1))
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=30) for _ in range(3)]
    assert (await scene.arrive(priority=5, size_bytes=101)).refusal is not None
    assert all(client.waits for client in low)
    assert (await scene.arrive(priority=5, size_bytes=60)).waits
    assert [client.waits for client in low] == [True, False, False]
    assert scene.gate.queued() == (2, 90)


@pytest.mark.looptime
async def test_a_request_displaces_a_bounded_number() -> None:
    scene = Scene(max_bytes=2 * MAX_DISPLACED, bands={5: band()})
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=1) for _ in range(2 * MAX_DISPLACED)]
    assert (await scene.arrive(priority=5, size_bytes=MAX_DISPLACED + 1)).refusal is not None
    assert (await scene.arrive(priority=5, size_bytes=MAX_DISPLACED)).waits
    assert sum(client.waits for client in low) == MAX_DISPLACED


@pytest.mark.looptime
async def test_bodies_and_memory_have_separate_caps() -> None:
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
async def test_a_request_above_the_memory_cap_gets_no_retry_after() -> None:
    scene = Scene(max_memory_bytes=100, detector=Slots(1))
    await scene.arrive()
    refusal = (await scene.arrive(size_bytes=1, held_bytes=101)).refusal
    assert refusal.retry_after_seconds is None
    assert "it takes 101 bytes, and no more than 100 may ever wait" in refusal.message


@pytest.mark.looptime
@pytest.mark.parametrize("caps", [{"max_bytes": 100}, {"bands": {0: band(max_bytes=100)}}])
@pytest.mark.parametrize("pool_size", [0, 1])
async def test_a_request_above_a_byte_cap_gets_no_retry_after(caps: Any, pool_size: int) -> None:
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
async def test_an_empty_pool_refuses_displaced_requests_with_503() -> None:
    scene = Scene(default_band=sharing(max_requests=2))
    await scene.resize(0)
    flood = [await scene.arrive(fairness_id="flood") for _ in range(2)]
    await scene.arrive(fairness_id="calm")
    await settle()
    assert flood[1].refusal.status == 503


@examples(60)
@given(
    flows=st.lists(st.sampled_from("abcd"), min_size=CAP, max_size=80),
    leaving=st.lists(st.integers(0, CAP), max_size=20),
)
def test_a_flow_below_its_share_is_not_refused_while_others_exceed_theirs(
    flows: list[str], leaving: list[int]
) -> None:
    chosen = flow_settings(default_band=sharing(max_requests=CAP))
    queue, waiting = FlowQueue(chosen, lambda *_: None), list[QueuedRequest]()
    where = queue.band_for(0)
    for sequence, flow in enumerate(flows):
        if sequence % 4 == 3 and leaving and waiting:
            queue.remove(waiting.pop(leaving.pop() % len(waiting)), 0.0)
        item = QueuedRequest(inference_request(fairness_id=flow), sequence, float(sequence), 1)
        if excess := queue.excess(item, where):
            displaced = displaced_by(item, where, queue, excess)
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
