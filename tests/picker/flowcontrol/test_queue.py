"""Bands, flows and caps, without a gate around them."""

from __future__ import annotations

from flow_scene import FirstOfAll, GlobalStrict, band, flow_settings, inference_request

from picker.flowcontrol import queue as queues
from picker.flowcontrol.capacity import Cap
from picker.flowcontrol.queue import FlowQueue
from picker.framework.flow import QueuedRequest


def item(sequence: int, flow: str = "t", priority: int = 0, size_bytes: int = 10) -> QueuedRequest:
    """One that waits."""
    request = inference_request(fairness_id=flow, priority=priority, size_bytes=size_bytes)
    return QueuedRequest(request, sequence, float(sequence), size_bytes)


class Kept:
    """A queue, and which flows it forgot."""

    def __init__(self, **values: object) -> None:
        self.forgotten: list[tuple[int, str]] = []
        self.settings = flow_settings(**values)
        self.queue = FlowQueue(self.settings, lambda *flow: self.forgotten.append(flow))

    def push(self, one: QueuedRequest) -> None:
        """It waits."""
        self.queue.push(one, self.queue.band_for(one.request.priority))
        self.queue.check_integrity()

    def fairness(self, priority: int) -> FirstOfAll:
        """What its policy remembers."""
        found = self.queue.band_for(priority).fairness
        assert isinstance(found, FirstOfAll)
        return found


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


def test_wanted_bands_are_bounded_and_the_next_lower_ones_take_their_place() -> None:
    """However many objectives there are."""
    kept = Kept(bands={1000: band()})
    kept.queue.want(range(500))
    assert len(kept.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 2
    assert kept.queue.band_for(499).priority == queues.MAX_DYNAMIC_BANDS
    assert kept.queue.band_for(2000).priority == 1000
    kept.queue.want(())
    assert kept.queue.priorities == (1000, 0)


def test_bands_made_below_all_others_are_bounded() -> None:
    """The last of them takes the rest."""
    kept = Kept()
    for sequence in range(500):
        kept.push(item(sequence, priority=-sequence))
    assert len(kept.queue.priorities) == queues.MAX_DYNAMIC_BANDS + 1
    lowest = kept.queue.band_for(-(10**6))
    assert lowest.priority == kept.queue.priorities[-1]
    assert sum(one.num_requests for one in kept.queue) == 500


def test_a_band_takes_the_settings_of_its_sign() -> None:
    """Configured ones have their own."""
    kept = Kept(
        default_band=band(max_requests=1),
        default_negative_band=band(max_requests=2),
        bands={7: band(max_requests=3)},
    )
    kept.queue.want([5, -5])
    found = {one.priority: one.settings.max_requests for one in kept.queue}
    assert found == {7: 3, 5: 1, 0: 1, -5: 2}


def test_a_new_policy_is_told_of_all_who_wait() -> None:
    """In their order."""
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


def test_what_exactly_fits_fits() -> None:
    """One more byte does not."""
    kept = Kept(max_bytes=20)
    kept.push(item(1))
    where = kept.queue.band_for(0)
    assert kept.queue.cap_exceeded(item(2), where) is None
    assert kept.queue.cap_exceeded(item(2, size_bytes=11), where) is Cap.BYTES
