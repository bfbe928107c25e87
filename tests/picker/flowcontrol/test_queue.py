"""The queue manages bands, flows and caps; a full one displaces requests."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol import queue as queues
from picker.flowcontrol.capacity import MAX_DISPLACED, Cap, displaced_by
from picker.flowcontrol.queue import FlowQueue
from picker.flowcontrol.removable_heap import RemovableHeap
from picker.framework.flow import QueuedRequest, Rank
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import Usage
from tests.depth import examples
from tests.support.picker.flow_scene import (
    Fcfs,
    FirstOfAll,
    GlobalStrict,
    Scene,
    Sharing,
    Slots,
    band,
    flow_settings,
    inference_request,
    settle,
)

pytestmark = pytest.mark.looptime
CAP = 12


def item(sequence: int, flow: str = "t", priority: int = 0, size_bytes: int = 10) -> QueuedRequest:
    request = inference_request(fairness_id=flow, priority=priority, size_bytes=size_bytes)
    return QueuedRequest(request, sequence, float(sequence), size_bytes)


class Backwards:
    def rank(self, item: QueuedRequest) -> Rank:
        return (-item.enqueued_at_seconds,)


class QueueScene:
    def __init__(self, **values: object) -> None:
        self.forgotten: list[tuple[int, str]] = []
        self.settings = flow_settings(**values)
        self.queue = FlowQueue(self.settings, lambda *flow: self.forgotten.append(flow))

    def push(self, one: QueuedRequest) -> None:
        self.queue.push(one, self.queue.band_for(one.request.priority))
        self.queue.check_integrity()

    def fairness(self, priority: int) -> FirstOfAll:
        return self.queue.band_for(priority).fairness


def test_policies_receive_heads_only_when_they_change() -> None:
    scene = QueueScene()
    first, second, third = item(1), item(2), item(3)
    for one in (first, second, third):
        scene.push(one)
    scene.queue.remove(second, 5.0)
    assert scene.fairness(0).calls == [("head", "t", 1)]
    scene.queue.remove(first, 5.0)
    scene.queue.remove(third, 6.0, is_dispatched=True)
    calls = scene.fairness(0).calls[1:]
    assert calls == [("head", "t", 3), ("dispatched", "t", 3), ("head", "t", None)]
    scene.queue.check_integrity()


def test_flows_are_remembered_for_five_minutes() -> None:
    scene = QueueScene()
    for sequence, flow in enumerate("abc"):
        scene.push(item(sequence, flow))
        scene.queue.remove(item(sequence, flow), float(sequence))
    scene.push(item(9, "b"))
    assert scene.queue.next_idle_seconds == 300.0
    scene.queue.forget_idle(299.9)
    assert scene.forgotten == []
    scene.queue.forget_idle(305.0)
    assert scene.forgotten == [(0, "a"), (0, "c")]
    assert ("forget", "a") in scene.fairness(0).calls
    assert scene.queue.next_idle_seconds is None


def test_the_number_of_idle_flows_is_bounded() -> None:
    scene = QueueScene()
    limit = queues.MAX_IDLE_FLOWS
    for sequence in range(limit + 5):
        one = item(sequence, f"flow-{sequence}")
        scene.queue.pass_by(one, scene.queue.band_for(0), 1.0)
    assert len(scene.queue.band_for(0).idle) == limit
    assert scene.forgotten == [(0, f"flow-{sequence}") for sequence in range(5)]


def test_a_request_may_reach_a_cap_but_not_exceed_it() -> None:
    everything = {"max_bytes": 30, "max_requests": 9}
    for values, cap in (
        (everything, Cap.BYTES),
        ({"max_requests": 3}, Cap.REQUESTS),
        ({"default_band": band(max_bytes=30)}, Cap.BAND_BYTES),
        ({"default_band": band(max_requests=3)}, Cap.BAND_REQUESTS),
    ):
        scene = QueueScene(**values)
        place = scene.queue.band_for(0)
        for sequence in range(3):
            assert not scene.queue.excess(item(sequence), place)
            scene.push(item(sequence))
        assert next(iter(scene.queue.excess(item(3, size_bytes=1), place))) is cap


def test_wanted_bands_are_bounded_and_lower_ones_replace_the_others() -> None:
    scene = QueueScene(bands={1000: band()})
    scene.queue.want(range(500))
    assert len(scene.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 2
    assert scene.queue.band_for(499).priority == queues.MAX_DYNAMIC_BANDS
    assert scene.queue.band_for(2000).priority == 1000
    scene.queue.want(())
    assert scene.queue.priorities == (1000, 0)


def test_bands_created_below_all_others_are_bounded() -> None:
    scene = QueueScene()
    for sequence in range(500):
        scene.push(item(sequence, priority=-sequence))
    assert len(scene.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 1
    lowest = scene.queue.band_for(-(10**6))
    assert lowest.priority == scene.queue.priorities[-1]
    assert sum(one.num_requests for one in scene.queue) == 500


def test_a_band_has_the_default_settings_of_its_sign() -> None:
    scene = QueueScene(
        default_band=band(max_requests=1),
        default_negative_band=band(max_requests=2),
        bands={7: band(max_requests=3)},
    )
    scene.queue.want([5, -5])
    found = {one.priority: one.settings.max_requests for one in scene.queue}
    assert found == {7: 3, 5: 1, 0: 1, -5: 2}


def test_a_new_policy_receives_the_head_of_every_flow() -> None:
    scene = QueueScene()
    for sequence, flow in enumerate("aab"):
        scene.push(item(sequence, flow))
    scene.queue.pass_by(item(7, "idle"), scene.queue.band_for(0), 3.0)
    fairness = GlobalStrict()
    scene.queue.use(flow_settings(default_band=band(fairness=fairness)), 4.0)
    assert fairness.bands[0].calls == [("head", "a", 0), ("head", "b", 2)]
    scene.queue.check_integrity()
    scene.queue.forget_idle(303.0)
    assert scene.forgotten == [(0, "idle")]


def test_an_unchanged_fairness_policy_keeps_its_state_over_a_reload() -> None:
    fairness, ordering = GlobalStrict(), Fcfs()
    scene = QueueScene(default_band=band(fairness=fairness, ordering=ordering))
    for sequence, flow in enumerate("aab"):
        scene.push(item(sequence, flow))
    before, seen = scene.fairness(0), len(scene.fairness(0).calls)
    wider = band(fairness=fairness, ordering=ordering, max_requests=7)
    scene.queue.use(flow_settings(default_band=wider), 4.0)
    assert scene.fairness(0) is before
    assert (before.calls[seen:], scene.queue.band_for(0).settings) == ([], wider)
    scene.queue.check_integrity()
    scene.queue.use(flow_settings(default_band=band(fairness=fairness, ordering=Backwards())), 5.0)
    assert scene.fairness(0) is before
    assert sorted(before.calls[seen : seen + 2]) == [("head", "a", None), ("head", "b", None)]
    assert before.calls[seen + 2 :] == [("head", "a", 0), ("head", "a", 1), ("head", "b", 2)]
    scene.queue.check_integrity()


def test_waiting_requests_move_to_a_new_band_of_their_priority() -> None:
    fairness, ordering = GlobalStrict(), Fcfs()
    same = band(fairness=fairness, ordering=ordering)
    scene = QueueScene(default_band=same)
    for sequence, priority in enumerate((0, 5, 5)):
        scene.push(item(sequence, f"p{priority}", priority))
    scene.queue.use(flow_settings(default_band=same, bands={5: band()}), 4.0)
    scene.queue.check_integrity()
    assert [(one.priority, one.num_requests) for one in scene.queue] == [(5, 2), (0, 1)]
    assert scene.fairness(0).heads.keys() == {"p0"}
    assert scene.queue.band_for(0).idle == {"p5": 4.0}


def test_deficits_survive_a_reload() -> None:
    shares = DeficitRoundRobinFairnessPolicy(DeficitRoundRobinFairnessPolicyParameters())
    ordering = Fcfs()
    scene = QueueScene(default_band=band(fairness=shares, ordering=ordering))
    for sequence, flow in enumerate("ab"):
        scene.queue.pass_by(item(sequence, flow), scene.queue.band_for(0), 1.0)
    scene.queue.completed(item(0, "a"), 0, Usage(50_000, 50_000, 100_000), 2.0)
    changed = band(fairness=shares, ordering=ordering, max_requests=100)
    scene.queue.use(flow_settings(default_band=changed), 3.0)
    for sequence, flow in enumerate("aabb", 2):
        scene.push(item(sequence, flow))
    order = []
    while (first := scene.queue.band_for(0).next(4.0)) is not None:
        order.append(first.flow)
        scene.queue.remove(first, 4.0, is_dispatched=True)
    assert "".join(order) == "bbaa"


def sharing(**values: object) -> object:
    return band(fairness=Sharing(), **values)


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


async def test_a_larger_request_displaces_several_or_none_if_they_do_not_suffice() -> None:
    scene = Scene(max_bytes=100, bands={5: band(max_bytes=150)}, detector=Slots(1))
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=30) for _ in range(3)]
    assert (await scene.arrive(priority=5, size_bytes=101)).refusal is not None
    assert all(client.waits for client in low)
    assert (await scene.arrive(priority=5, size_bytes=60)).waits
    assert [client.waits for client in low] == [True, False, False]
    assert scene.gate.queued() == (2, 90)


async def test_a_request_displaces_a_bounded_number() -> None:
    scene = Scene(max_bytes=2 * MAX_DISPLACED, bands={5: band()})
    await scene.arrive(size_bytes=0)
    low = [await scene.arrive(size_bytes=1) for _ in range(2 * MAX_DISPLACED)]
    assert (await scene.arrive(priority=5, size_bytes=MAX_DISPLACED + 1)).refusal is not None
    assert (await scene.arrive(priority=5, size_bytes=MAX_DISPLACED)).waits
    assert sum(client.waits for client in low) == MAX_DISPLACED


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


async def test_a_request_above_the_memory_cap_gets_no_retry_after() -> None:
    scene = Scene(max_memory_bytes=100, detector=Slots(1))
    await scene.arrive()
    refusal = (await scene.arrive(size_bytes=1, held_bytes=101)).refusal
    assert refusal.retry_after_seconds is None
    assert "it takes 101 bytes, and no more than 100 may ever wait" in refusal.message


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


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 300)),
        st.tuples(st.just("pop"), st.just(0)),
    ),
    max_size=300,
)


@examples(100)
@given(STEPS)
def test_a_heap_agrees_with_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    heap: RemovableHeap[int, str] = RemovableHeap()
    model: dict[int, tuple[int, int, str]] = {}
    for sequence, (step, value) in enumerate(steps):
        if step == "push":
            heap.push(value, sequence, f"#{sequence}")
            model[sequence] = (value, sequence, f"#{sequence}")
        elif step == "remove":
            assert heap.remove(value) is (model.pop(value, None) is not None)
        else:
            least = min(model.values(), default=None)
            if least is not None:
                del model[least[1]]
            assert heap.pop() == (None if least is None else least[2])
        least = min(model.values(), default=None)
        assert heap.first() == (None if least is None else (least[0], least[2]))
        assert (len(heap), set(heap)) == (len(model), {one[2] for one in model.values()})
        assert len(heap._places) <= 2 * len(heap) + 33


def test_removed_entries_take_no_memory() -> None:
    heap: RemovableHeap[int, int] = RemovableHeap()
    heap.push(0, 0, 0)
    for sequence in range(1, 10_000):
        heap.push(1, sequence, sequence)
        heap.remove(sequence)
    assert len(heap._places) < 50
    heap.clear()
    assert heap.first() is None
