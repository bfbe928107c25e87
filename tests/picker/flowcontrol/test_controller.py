"""Requests enter if there is room, else wait, are refused or evict others; reloads lose none."""

import asyncio
from itertools import pairwise

import pytest

from picker.errors import DropReason, RefusedError
from picker.flowcontrol.core import MAX_DISPATCHES_PER_PASS
from picker.types import DEFAULT_FAIRNESS_ID, FinishCause, Usage
from tests.support.picker.flow_scene import (
    Ceilings,
    Client,
    GlobalStrict,
    Pool,
    Scene,
    Sheddable,
    Slots,
    band,
    inference_request,
    settle,
    with_settings,
)

pytestmark = pytest.mark.looptime


def is_refused(refusal: RefusedError | None, status: int, reason: str, begins: str) -> bool:
    if refusal is None or refusal.drop_reason is None:
        return False
    found = (refusal.status, refusal.drop_reason.value)
    begins_so = (refusal.reference or "").startswith(begins)
    return found == (status, reason) and begins_so and 1 <= (refusal.retry_after_seconds or 0) <= 60


async def test_no_request_waits_while_there_is_room() -> None:
    scene = Scene(Pool(2))
    assert scene.gate.is_open
    asking = scene.gate.admit(inference_request(), None)
    with pytest.raises(StopIteration) as answered:
        asking.send(None)
    assert answered.value.value.queue_seconds == 0
    assert scene.gate.is_open  # one of two


async def test_a_reserved_slot_counts_as_taken() -> None:
    scene = Scene()
    first = await scene.arrive(leaves=False)
    assert not scene.gate.is_open
    second = await scene.arrive()
    assert first.ticket is not None
    assert second.waits
    scene.leave(first)
    await settle()
    assert second.waits
    await scene.done(first)
    assert second.ticket is not None


async def test_one_free_slot_admits_one_waiting_request() -> None:
    scene = Scene(Pool(3))
    running = [await scene.arrive() for _ in range(3)]
    waiting = [await scene.arrive(leaves=False) for _ in range(10)]
    await scene.done(running[0])
    assert [one.ticket is not None for one in waiting] == [True] + [False] * 9


async def test_all_free_slots_are_filled_at_once() -> None:
    scene = Scene(Pool(0))
    waiting = [await scene.arrive(leaves=False) for _ in range(1000)]
    before = scene.loop.time()
    await scene.resize(700)
    assert 0 < sum(one.ticket is not None for one in waiting) < 700
    for _ in range(700 // MAX_DISPATCHES_PER_PASS):
        await asyncio.sleep(0)
    assert sum(one.ticket is not None for one in waiting) == 700
    assert scene.loop.time() - before < 0.05


async def test_a_request_cancelled_on_admission_returns_its_ticket() -> None:
    scene = Scene()
    running = await scene.arrive()
    quitter, other = await scene.arrive(leaves=False), await scene.arrive()
    scene.close(running)
    await asyncio.sleep(0)  # the pass is over: the ticket is on its way
    quitter.task.cancel()
    await settle()
    assert quitter.ticket is None
    assert other.ticket is not None
    assert scene.gate.num_under_way == 1


async def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    scene = Scene(max_requests=1)
    await scene.arrive()
    quitter = await scene.arrive()
    assert (await scene.arrive()).refusal is not None
    quitter.task.cancel()
    await settle()
    assert (await scene.arrive()).waits
    assert scene.gate.queues().outcomes["EvictedContextCancelled"] == 1


async def test_a_higher_priority_goes_first() -> None:
    scene = Scene()
    running = await scene.arrive()
    scene.gate.set_priorities([5, -5])
    names = [("low", -5), ("mid", 0), ("high", 5), ("higher", 5), ("lower", -5)]
    for name, priority in names:
        await scene.arrive(name, priority=priority)
    await scene.done(running)
    while scene.order[-1].request.request_id != "lower":
        await scene.done(scene.order[-1])
    order = [client.request.request_id for client in scene.order[1:]]
    assert order == ["high", "higher", "mid", "low", "lower"]


async def test_a_priority_at_its_ceiling_blocks_lower_ones_while_it_waits() -> None:
    scene = Scene(Pool(4), usage_limits=Ceilings({5: 0.5}))
    scene.gate.set_priorities([5])
    running = [await scene.arrive() for _ in range(2)]
    low = await scene.arrive()
    assert low.ticket is not None
    high = await scene.arrive(priority=5)
    lower = await scene.arrive()
    assert high.waits
    assert lower.waits
    for client in (*running, low):
        await scene.done(client)
    assert high.ticket is not None
    assert lower.ticket is not None


async def test_a_cancelled_request_unblocks_lower_priorities() -> None:
    scene = Scene(Pool(4), usage_limits=Ceilings({5: 0.5}), bands={5: band()})
    for _ in range(2):
        await scene.arrive()
    high, low = await scene.arrive(priority=5), await scene.arrive()
    assert low.waits
    high.task.cancel()
    await settle()
    assert low.ticket is not None


async def test_a_request_does_not_wait_after_an_open_gate() -> None:
    scene = Scene(usage_limits=Ceilings({-9: 0.0}))
    assert scene.gate.is_open
    with pytest.raises(StopIteration):
        scene.gate.admit(inference_request(priority=-9), None).send(None)
    assert not scene.gate.is_open
    assert (await scene.arrive(priority=-9)).waits


async def test_an_unknown_priority_waits_in_the_nearest_lower_band() -> None:
    scene = Scene(bands={10: band(), -1: band()}, default_negative_band=band(max_requests=1))
    await scene.arrive()
    for priority in (12, 10, 9, 0, -1, -7):
        assert (await scene.arrive(priority=priority)).waits
    bands = {one.priority: one.queued_requests for one in scene.gate.queues().bands}
    assert bands == {10: 2, 0: 2, -1: 1, -7: 1}
    assert is_refused(
        (await scene.arrive(priority=-7)).refusal, 429, "rejected-saturated", "request rejected"
    )


async def test_a_band_may_have_its_own_time_to_live() -> None:
    scene = Scene(
        request_ttl_seconds=3.0,
        no_endpoint_ttl_seconds=1.0,
        bands={
            5: band(request_ttl_seconds=2.0),
            -1: band(request_ttl_seconds=9.0),
            -2: band(request_ttl_seconds=None),
        },
    )
    await scene.arrive()
    began = scene.loop.time()
    *waiting, forever = [await scene.arrive(priority=priority) for priority in (5, 0, -1, -2)]
    await asyncio.sleep(10.0)
    waited = [(client.settled_at or began) - began for client in waiting]
    assert waited == pytest.approx([2.0, 3.0, 9.0], abs=0.002)
    assert forever.waits
    await scene.resize(0)
    await asyncio.sleep(1.1)
    assert not forever.waits


async def test_a_request_times_out_to_the_millisecond() -> None:
    scene = Scene(request_ttl_seconds=3.25)
    await scene.arrive()
    began = scene.loop.time()
    late = await scene.arrive()
    await asyncio.sleep(1)
    later = await scene.arrive()
    assert later.task is not None
    await late.task
    assert scene.loop.time() - began == pytest.approx(3.25, abs=0.002)
    assert is_refused(late.refusal, 429, "rejected-ttl-expired", "request timed out in queue: ")
    await later.task
    assert scene.loop.time() - began == pytest.approx(4.25, abs=0.002)


async def test_requests_without_a_time_to_live_never_time_out() -> None:
    scene = Scene(Pool(0), request_ttl_seconds=None, no_endpoint_ttl_seconds=None)
    client = await scene.arrive()
    await asyncio.sleep(1000)
    assert client.waits
    await scene.resize(1)
    assert client.ticket.queue_seconds == pytest.approx(1000, rel=0.01)


async def test_an_empty_pool_holds_requests_until_it_has_endpoints() -> None:
    scene = Scene(Pool(0), request_ttl_seconds=10, no_endpoint_ttl_seconds=30)
    client = await scene.arrive()
    await asyncio.sleep(29)
    assert client.waits
    await asyncio.sleep(1.1)
    begins = "request timed out in queue and no endpoints are available: "
    assert is_refused(client.refusal, 503, "rejected-no-endpoints", begins)
    other = await scene.arrive()
    await asyncio.sleep(20)
    await scene.resize(1)
    assert other.ticket is not None


async def test_the_time_to_live_restarts_when_the_pool_becomes_empty_or_not() -> None:
    scene = Scene(request_ttl_seconds=10, no_endpoint_ttl_seconds=30)
    await scene.arrive()
    client = await scene.arrive()
    await asyncio.sleep(9)
    await scene.resize(0)
    await asyncio.sleep(29)
    assert client.waits
    await scene.resize(1)  # its only slot is taken
    await asyncio.sleep(9.9)
    assert client.waits
    await asyncio.sleep(0.2)
    assert is_refused(client.refusal, 429, "rejected-ttl-expired", "request timed out in queue: ")


async def test_shutdown_refuses_waiting_and_new_requests() -> None:
    scene = Scene()
    running, waiting = await scene.arrive(), await scene.arrive()
    scene.gate.shut_down()
    await settle()
    late = await scene.arrive()
    for client in (waiting, late):
        assert is_refused(client.refusal, 503, "rejected-shutting-down", "internal flow control")
    await scene.done(running)
    assert scene.gate.queues().outcomes == {"Dispatched": 1, "EvictedOther": 1, "RejectedOther": 1}
    scene.gate.check_integrity()


async def test_policies_are_called_alike_for_waiting_and_passing_requests() -> None:
    fairness = GlobalStrict()
    scene = Scene(default_band=band(fairness=fairness))
    passing = await scene.arrive(fairness_id="a")
    waiting = await scene.arrive(fairness_id="b")
    usage = Usage(1, 2, 3)
    await scene.done(passing, usage)
    assert waiting.ticket is not None
    assert fairness.bands[0].calls == [
        *(("head", "a", 1), ("dispatched", "a", 1), ("head", "a", None)),
        *(("head", "b", 2), ("completed", "a", 1, usage)),
        *(("dispatched", "b", 2), ("head", "b", None)),
    ]
    await asyncio.sleep(300.5)
    assert {("forget", "a"), ("forget", "b")} <= set(fairness.bands[0].calls)


async def test_a_request_without_a_fairness_id_joins_the_default_flow() -> None:
    scene = Scene()
    await scene.arrive()
    await scene.arrive(fairness_id="")
    (shown,) = scene.gate.queues().bands
    assert [flow.fairness_id for flow in shown.flows] == [DEFAULT_FAIRNESS_ID]


async def test_a_fairness_policy_that_names_an_unknown_flow_blocks_nothing() -> None:
    fairness = GlobalStrict()
    scene = Scene(default_band=band(fairness=fairness))
    running = await scene.arrive()
    first, second = await scene.arrive(fairness_id="x"), await scene.arrive(fairness_id="y")
    fairness.bands[0].heads = {"unknown": ((0.0,), 0)}
    await scene.done(running)
    assert first.ticket is not None
    assert second.waits


async def test_ceilings_are_read_once_per_decision() -> None:
    """A policy that admits every n-th blocked request would otherwise count wrongly."""
    limits = Ceilings()
    scene = Scene(usage_limits=limits)
    for expected in (1, 2):
        assert scene.gate.is_open
        assert scene.gate.is_open
        client = await scene.arrive()
        assert limits.asked == expected
        await scene.done(client)
    await scene.arrive()
    asked = limits.asked
    for _ in range(3):  # blocked
        await scene.arrive()
    assert limits.asked == asked + 3


async def test_saturation_that_depends_on_time_is_rechecked() -> None:
    class Fading(Slots):
        def saturation(self, candidates, attributes, now_seconds):  # type: ignore[no-untyped-def]
            return 1.0 if now_seconds < 5 else 0.0

    scene = Scene(detector=Fading())
    client = await scene.arrive()
    await asyncio.sleep(4.9)
    assert client.waits
    await asyncio.sleep(0.4)
    assert client.ticket is not None


async def test_retry_after_estimates_when_the_queue_ahead_is_served() -> None:
    scene = Scene(max_requests=20, request_ttl_seconds=None)
    running = await scene.arrive()
    refused = [await scene.arrive() for _ in range(21)][-1].refusal
    assert refused.retry_after_seconds is not None
    for _ in range(20):
        await asyncio.sleep(0.5)
        await scene.done(running)
        running = scene.order[-1]
        await scene.arrive()
    refusal = (await scene.arrive()).refusal
    assert refusal.retry_after_seconds == pytest.approx(21 / 2, abs=2)


async def test_a_ticket_closes_once() -> None:
    scene = Scene()
    client = await scene.arrive()
    client.ticket.left("again")
    for cause in (FinishCause.COMPLETED, FinishCause.RESET):
        client.ticket.closed(cause, None)
    client.ticket.left("late")
    assert scene.gate.num_under_way == 0
    scene.gate.check_integrity()


LABELS = {
    "fairness_id": "t",
    "priority": "0",
    "inference_pool": "pool",
    "model_name": "m",
    "target_model_name": "m",
}


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
