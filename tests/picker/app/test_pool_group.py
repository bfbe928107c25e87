"""When the pools of a picker are known well enough for requests to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from picker.app.pool_group import PATIENCE_SECONDS, PoolGroup
from picker.app.served_pool import ServedPool
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.types import Endpoint


class Pool:
    """What a group asks of a pool about its state."""

    def __init__(self) -> None:
        self.datastore, self.absent = Datastore(), False
        self.unfinished = self.waiting = self.decisions = 0
        self.refusals = 0

    def is_known(self) -> bool:
        """Whether its endpoints are."""
        return self.datastore.synced

    def is_absent(self) -> bool:
        """Whether there is none."""
        return self.absent

    def refuse_waiting(self) -> bool:
        """Whether any waited."""
        self.refusals += 1
        return self.waiting > 0

    def learn(self, *names: str) -> None:
        """Its endpoints become known."""
        self.absent = False
        self.datastore.set_endpoints([Endpoint(name, "10.0.0.1", 1) for name in names])

    def vanish(self) -> None:
        """It is deleted."""
        self.datastore.forget_pool()
        self.absent = True


class Scene:
    """Three pools of which nothing was heard, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.a, self.b, self.c = Pool(), Pool(), Pool()
        pools = {"a": self.a, "b": self.b, "c": self.c}
        given = cast("Mapping[str, ServedPool]", pools)
        self.group = PoolGroup(given, PickerMetrics(), lambda: self.now)


def test_all_pools_are_waited_for() -> None:
    """Those without endpoints are known, too."""
    scene = Scene()
    assert not scene.group.is_known()
    scene.a.learn("x")
    assert not scene.group.is_known()
    scene.b.learn()
    assert not scene.group.is_known()
    scene.c.learn("y")
    assert scene.group.is_known()


def test_a_pool_that_is_not_there_is_not_waited_for() -> None:
    """But one at least has to be."""
    scene = Scene()
    scene.a.absent = scene.b.absent = scene.c.absent = True
    scene.now += 100 * PATIENCE_SECONDS
    assert not scene.group.is_known()
    scene.a.learn("x")
    assert scene.group.is_known()


def test_a_pool_that_nothing_is_heard_of_is_waited_for_for_a_while() -> None:
    """As when its namespace's Role is missing; then the others are served without it."""
    scene = Scene()
    scene.a.learn("x")
    scene.b.absent = True
    scene.now += PATIENCE_SECONDS - 0.001
    assert not scene.group.is_known()
    scene.now += 0.001
    assert scene.group.is_known()


def test_patience_begins_with_what_is_known_first() -> None:
    """A replica that may know nothing until it leads, or whose API server was away, has waited
    long before; the others have to be waited for still.
    """
    scene = Scene()
    scene.now += 100 * PATIENCE_SECONDS
    assert not scene.group.is_known()
    scene.b.learn("x")
    scene.now += PATIENCE_SECONDS / 2
    scene.b.learn("x", "y")
    assert not scene.group.is_known()
    scene.now += PATIENCE_SECONDS / 2
    assert scene.group.is_known()


def test_who_was_ready_stays_so_whatever_becomes_of_a_pool() -> None:
    """One that is created is heard of a moment before its endpoints are known."""
    scene = Scene()
    scene.a.learn("x")
    scene.b.absent = scene.c.absent = True
    assert scene.group.is_known()
    scene.b.absent = False
    assert scene.group.is_known()
    scene.b.learn("y")
    scene.a.vanish()
    assert scene.group.is_known()
    scene.b.vanish()
    assert not scene.group.is_known()
    scene.c.learn("z")
    assert scene.group.is_known()


def test_what_goes_on_in_all_pools_is_added_up() -> None:
    """And all of them let nobody in any more, also behind one where somebody waits."""
    scene = Scene()
    for number, pool in enumerate((scene.a, scene.b, scene.c), 1):
        pool.unfinished, pool.waiting, pool.decisions = number, 10 * number, 100 * number
    group = scene.group
    assert (group.unfinished, group.waiting, group.decisions) == (6, 60, 600)
    assert group.refuse_waiting()
    assert [pool.refusals for pool in (scene.a, scene.b, scene.c)] == [1, 1, 1]
    for pool in (scene.a, scene.b, scene.c):
        pool.waiting = 0
    assert not group.refuse_waiting()
