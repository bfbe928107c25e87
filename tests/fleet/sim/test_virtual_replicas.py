"""Several pickers over one pool in virtual time: what they lose against one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shared_prefixes import WORKER, Seen, SharedPrefixes, run

from fleet.sim.virtual_replicas import ReplicasSettings, VirtualReplicas

LOAD = SharedPrefixes()
ONE = ReplicasSettings(replicas=1, worker=WORKER, scrape_seconds=0.2)
TWO = replace(ONE, replicas=2)
POINTS = 0.05


@pytest.fixture(scope="module")
def one() -> Seen:
    """The load with one picker."""
    return run(ONE, LOAD)


def cut(fleet: VirtualReplicas) -> None:
    """No replica hears another."""
    fleet.is_cut = True


def mend(fleet: VirtualReplicas) -> None:
    """They hear each other again."""
    fleet.is_cut = False


def restart_one(fleet: VirtualReplicas) -> None:
    """One of them is killed and begins anew."""
    fleet.restart(1)


def test_two_replicas_find_as_much_cached_as_one(one: Seen) -> None:
    """Although one message in twenty is lost; those that tell each other nothing do not."""
    lossy = run(replace(TWO, loss=0.05), LOAD)
    silent = run(replace(TWO, shares=False), LOAD)
    assert lossy.hit_rate() == pytest.approx(one.hit_rate(), abs=POINTS)
    assert silent.hit_rate() < one.hit_rate() - POINTS
    assert lossy.left == [{}, {}]


def test_a_replica_that_begins_anew_knows_soon_what_the_other_one_does(one: Seen) -> None:
    """It is told what was sent where lately; and nothing that the killed one had under way stands
    anywhere for ever.
    """
    seen = run(TWO, LOAD, {15.0: restart_one})
    assert seen.hit_rate(15.0) == pytest.approx(one.hit_rate(15.0), abs=POINTS)
    assert seen.left == [{}, {}]


def test_replicas_that_do_not_hear_each_other_for_a_while_catch_up() -> None:
    """After half a minute of it, everything is as with one."""
    load = replace(LOAD, seconds=60.0, rate=10.0)
    seen = run(TWO, load, {10.0: cut, 40.0: mend})
    alone = run(ONE, load)
    assert seen.hit_rate(40.0) == pytest.approx(alone.hit_rate(40.0), abs=POINTS)
    assert seen.left == [{}, {}]


def test_the_same_seed_gives_the_same_outcome() -> None:
    """To the last request and instant."""
    load = replace(LOAD, seconds=4.0)
    settings = replace(TWO, loss=0.05)
    assert run(settings, load) == run(settings, load)
