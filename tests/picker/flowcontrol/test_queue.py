"""The queue manages bands, flows and caps."""

from picker.flowcontrol import queue as queues
from picker.flowcontrol.capacity import Cap
from picker.flowcontrol.queue import FlowQueue
from picker.framework.flow import QueuedRequest, Rank
from picker.plugins.fairness_policies.deficit_round_robin_fairness_policy import (
    DeficitRoundRobinFairnessPolicy,
    DeficitRoundRobinFairnessPolicyParameters,
)
from picker.types import Usage
from tests.support.picker.flow_scene import (
    Fcfs,
    FirstOfAll,
    GlobalStrict,
    band,
    flow_settings,
    inference_request,
)


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
    scene.queue.take(third, 6.0)
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
        scene.queue.take(first, 4.0)
    assert "".join(order) == "bbaa"
