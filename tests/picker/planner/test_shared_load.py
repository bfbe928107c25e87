"""The totals that replicas report to one another for the planner."""

from picker.framework.attributes import EndpointLoad
from picker.peers.wire import MAX_COUNT, MAX_NAME
from picker.planner.load_window import LoadWindow
from picker.planner.planner import Sums
from picker.planner.shared_load import SharedLoad

NOTHING = LoadWindow()
SEEN = LoadWindow(
    3, Sums(2, 7.0, 25.0), Sums(2, 1.0, 1.0), Sums(1, 300.0, 9e4), Sums(2, 0.03, 5e-4)
)


def look(here: SharedLoad, own: LoadWindow, *there: SharedLoad, leads: bool = True) -> LoadWindow:
    loads: dict[str, EndpointLoad] = {}
    for one in there:
        loads.update(one.own_loads)
    here.set_loads_elsewhere(loads)
    return here.exchange(own, 0, leads)


def test_each_request_of_another_replica_counts_once() -> None:
    here, there = SharedLoad("1"), SharedLoad("2")
    there.exchange(SEEN, 4, True)
    assert look(here, SEEN, there) == SEEN  # those before the first report do not count
    there.exchange(SEEN, 5, True)
    assert look(here, NOTHING, there) == SEEN
    assert look(here, SEEN, there) == SEEN
    assert here.waiting_elsewhere == 5


def test_a_return_after_silence_adds_nothing() -> None:
    here, there = SharedLoad("1"), SharedLoad("2")
    there.exchange(SEEN, 0, True)
    look(here, NOTHING, there)
    look(here, NOTHING)
    assert here.num_others == here.waiting_elsewhere == 0
    there.exchange(SEEN, 0, True)
    assert look(here, NOTHING, there) == NOTHING
    assert here.num_others == 1


def test_totals_are_exact_beyond_what_a_load_may_hold() -> None:
    here, there = SharedLoad("1"), SharedLoad("2")
    large = LoadWindow(1, Sums(1, 2.0**45 + 1, 2.0**60))
    there.exchange(large, 0, True)
    look(here, NOTHING, there)
    there.exchange(large, 0, True)
    assert look(here, NOTHING, there) == large
    loads = there.own_loads
    assert max(max(one.requests, one.tokens) for one in loads.values()) < MAX_COUNT
    assert max(map(len, loads)) < MAX_NAME


def test_the_first_replica_that_leads_writes() -> None:
    first, second = SharedLoad("1"), SharedLoad("2")
    look(second, NOTHING, first)
    assert second.is_first
    look(first, NOTHING, leads=False)
    look(second, NOTHING, first)
    assert second.is_first
    assert second.num_others == 1
    look(first, NOTHING, second)
    look(second, NOTHING, first)
    assert (first.is_first, second.is_first) == (True, False)


def test_a_report_that_is_none_counts_for_nothing() -> None:
    here = SharedLoad("1")
    for load in ({"0": EndpointLoad(1)}, {"0/arrivals": EndpointLoad(9)}, {"": EndpointLoad(1)}):
        here.set_loads_elsewhere(load)
        assert here.exchange(NOTHING, 0, True) == NOTHING
        assert (here.is_first, here.num_others) == (True, 0)
