"""Bands, flows and caps, without a gate around them."""

from __future__ import annotations

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
    """Whoever came last goes first."""

    def rank(self, item: QueuedRequest) -> Rank:
        return (-item.enqueued_at_seconds,)


class Kept:
    """A queue, and which flows it forgot."""

    def __init__(self, **values: object) -> None:
        self.forgotten: list[tuple[int, str]] = []
        self.settings = flow_settings(**values)
        self.queue = FlowQueue(self.settings, lambda *flow: self.forgotten.append(flow))

    def push(self, one: QueuedRequest) -> None:
        self.queue.push(one, self.queue.band_for(one.request.priority))
        self.queue.check_integrity()

    def fairness(self, priority: int) -> FirstOfAll:
        return self.queue.band_for(priority).fairness


def test_policies_are_told_of_heads_only_when_they_change() -> None:
    """Whoever comes behind another is no news, and neither is whoever leaves from there."""
    kept = Kept()
    first, second, third = item(1), item(2), item(3)
    for one in (first, second, third):
        kept.push(one)
    kept.queue.remove(second, 5.0)
    assert kept.fairness(0).told == [("head", "t", 1)]
    kept.queue.remove(first, 5.0)
    kept.queue.take(third, 6.0)
    told = kept.fairness(0).told[1:]
    assert told == [("head", "t", 3), ("dispatched", "t", 3), ("head", "t", None)]
    kept.queue.check_integrity()


def test_flows_are_remembered_for_five_minutes() -> None:
    """From when the last of them had gone; then policies forget them, and series do."""
    kept = Kept()
    for sequence, flow in enumerate("abc"):
        kept.push(item(sequence, flow))
        kept.queue.remove(item(sequence, flow), float(sequence))
    kept.push(item(9, "b"))
    assert kept.queue.next_idle_seconds == 300.0
    kept.queue.forget_idle(299.9)
    assert kept.forgotten == []
    kept.queue.forget_idle(305.0)
    assert kept.forgotten == [(0, "a"), (0, "c")]
    assert ("forget", "a") in kept.fairness(0).told
    assert kept.queue.next_idle_seconds is None


def test_invented_flows_do_not_pile_up() -> None:
    """The oldest is forgotten before its time."""
    kept = Kept()
    most = queues.MAX_IDLE_FLOWS
    for sequence in range(most + 5):
        one = item(sequence, f"flow-{sequence}")
        kept.queue.pass_by(one, kept.queue.band_for(0), 1.0)
    assert len(kept.queue.band_for(0).idle) == most
    assert kept.forgotten == [(0, f"flow-{sequence}") for sequence in range(5)]


def test_caps_are_reached_before_they_are_exceeded() -> None:
    """What makes a cap full may wait; what is beyond it by one is turned away."""
    everything = {"max_bytes": 30, "max_requests": 9}
    for values, cap in (
        (everything, Cap.BYTES),
        ({"max_requests": 3}, Cap.REQUESTS),
        ({"default_band": band(max_bytes=30)}, Cap.BAND_BYTES),
        ({"default_band": band(max_requests=3)}, Cap.BAND_REQUESTS),
    ):
        kept = Kept(**values)
        place = kept.queue.band_for(0)
        for sequence in range(3):
            assert kept.queue.cap_exceeded(item(sequence), place) is None
            kept.push(item(sequence))
        assert kept.queue.cap_exceeded(item(3, size_bytes=1), place) is cap


def test_wanted_bands_are_bounded_and_the_next_lower_ones_take_their_place() -> None:
    kept = Kept(bands={1000: band()})
    kept.queue.want(range(500))
    assert len(kept.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 2
    assert kept.queue.band_for(499).priority == queues.MAX_DYNAMIC_BANDS
    assert kept.queue.band_for(2000).priority == 1000
    kept.queue.want(())
    assert kept.queue.priorities == (1000, 0)


def test_bands_made_below_all_others_are_bounded() -> None:
    kept = Kept()
    for sequence in range(500):
        kept.push(item(sequence, priority=-sequence))
    assert len(kept.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 1
    lowest = kept.queue.band_for(-(10**6))
    assert lowest.priority == kept.queue.priorities[-1]
    assert sum(one.num_requests for one in kept.queue) == 500


def test_a_band_takes_the_settings_of_its_sign() -> None:
    kept = Kept(
        default_band=band(max_requests=1),
        default_negative_band=band(max_requests=2),
        bands={7: band(max_requests=3)},
    )
    kept.queue.want([5, -5])
    found = {one.priority: one.settings.max_requests for one in kept.queue}
    assert found == {7: 3, 5: 1, 0: 1, -5: 2}


def test_a_new_policy_is_told_of_all_who_wait() -> None:
    kept = Kept()
    for sequence, flow in enumerate("aab"):
        kept.push(item(sequence, flow))
    kept.queue.pass_by(item(7, "idle"), kept.queue.band_for(0), 3.0)
    fairness = GlobalStrict()
    kept.queue.use(flow_settings(default_band=band(fairness=fairness)), 4.0)
    assert fairness.bands[0].told == [("head", "a", 0), ("head", "b", 2)]
    kept.queue.check_integrity()
    kept.queue.forget_idle(303.0)
    assert kept.forgotten == [(0, "idle")]


def told_since(kept: Kept, seen: int) -> list[tuple[object, ...]]:
    """What the policy of priority 0 was told beyond that."""
    return kept.fairness(0).told[seen:]


def test_an_unchanged_fairness_policy_keeps_what_it_remembers_over_a_reload() -> None:
    """Other caps are no news to it; another order is told as heads that go and come."""
    fairness, ordering = GlobalStrict(), Fcfs()
    kept = Kept(default_band=band(fairness=fairness, ordering=ordering))
    for sequence, flow in enumerate("aab"):
        kept.push(item(sequence, flow))
    before, seen = kept.fairness(0), len(kept.fairness(0).told)
    wider = band(fairness=fairness, ordering=ordering, max_requests=7)
    kept.queue.use(flow_settings(default_band=wider), 4.0)
    assert kept.fairness(0) is before
    assert (told_since(kept, seen), kept.queue.band_for(0).settings) == ([], wider)
    kept.queue.check_integrity()
    kept.queue.use(flow_settings(default_band=band(fairness=fairness, ordering=Backwards())), 5.0)
    assert kept.fairness(0) is before
    gone, came = told_since(kept, seen)[:2], told_since(kept, seen)[2:]
    assert sorted(gone) == [("head", "a", None), ("head", "b", None)]
    assert came == [("head", "a", 0), ("head", "a", 1), ("head", "b", 2)]
    kept.queue.check_integrity()


def test_who_waits_moves_to_a_new_band_out_of_one_that_stays() -> None:
    """Its policy is told that they have gone."""
    fairness, ordering = GlobalStrict(), Fcfs()
    same = band(fairness=fairness, ordering=ordering)
    kept = Kept(default_band=same)
    for sequence, priority in enumerate((0, 5, 5)):
        kept.push(item(sequence, f"p{priority}", priority))
    kept.queue.use(flow_settings(default_band=same, bands={5: band()}), 4.0)
    kept.queue.check_integrity()
    assert [(one.priority, one.num_requests) for one in kept.queue] == [(5, 2), (0, 1)]
    assert kept.fairness(0).heads.keys() == {"p0"}
    assert kept.queue.band_for(0).idle == {"p5": 4.0}


def test_debts_outlive_a_reload() -> None:
    """Whoever was served much waits for the others, as without it."""
    shares = DeficitRoundRobinFairnessPolicy(DeficitRoundRobinFairnessPolicyParameters())
    ordering = Fcfs()
    kept = Kept(default_band=band(fairness=shares, ordering=ordering))
    for sequence, flow in enumerate("ab"):
        kept.queue.pass_by(item(sequence, flow), kept.queue.band_for(0), 1.0)
    kept.queue.completed(item(0, "a"), 0, Usage(50_000, 50_000, 100_000), 2.0)
    changed = band(fairness=shares, ordering=ordering, max_requests=100)
    kept.queue.use(flow_settings(default_band=changed), 3.0)
    for sequence, flow in enumerate("aabb", 2):
        kept.push(item(sequence, flow))
    order = []
    while (first := kept.queue.band_for(0).next(4.0)) is not None:
        order.append(first.flow)
        kept.queue.take(first, 4.0)
    assert "".join(order) == "bbaa"
