"""The readiness of a picker of several pools."""

from collections.abc import Mapping
from typing import cast

from picker.app.cluster import Leadership
from picker.app.picker import GRACE_SECONDS, Serving
from picker.app.served_pool import ServedPool
from picker.cli.options import Options
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.types import Endpoint


class Pool:
    def __init__(self) -> None:
        self.datastore, self.absent = Datastore(), False
        self.known = self

    def is_known(self) -> bool:
        return self.datastore.synced

    def is_absent(self) -> bool:
        return self.absent

    def learn(self, *names: str) -> None:
        self.absent = False
        self.datastore.set_endpoints([Endpoint(name, "10.0.0.1", 1) for name in names])

    def vanish(self) -> None:
        self.datastore.forget_pool()
        self.absent = True


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.a, self.b, self.c = Pool(), Pool(), Pool()
        pools = {"a": self.a, "b": self.b, "c": self.c}
        given = cast("Mapping[str, ServedPool]", pools)
        leadership = Leadership(Options(), PickerMetrics())
        self.serving = Serving(given, leadership, lambda: self.now)


def test_a_picker_is_ready_when_all_pools_are_known() -> None:
    scene = Scene()
    assert not scene.serving.is_ready()
    scene.a.learn("x")
    assert not scene.serving.is_ready()
    scene.b.learn()
    assert not scene.serving.is_ready()
    scene.c.learn("y")
    assert scene.serving.is_ready()


def test_readiness_does_not_wait_for_an_absent_pool() -> None:
    scene = Scene()
    scene.a.absent = scene.b.absent = scene.c.absent = True
    scene.now += 100 * GRACE_SECONDS
    assert not scene.serving.is_ready()
    scene.a.learn("x")
    assert scene.serving.is_ready()


def test_readiness_waits_for_an_undiscoverable_pool_only_for_the_grace() -> None:
    """The Role of its namespace may be missing, for instance."""
    scene = Scene()
    scene.a.learn("x")
    scene.b.absent = True
    scene.now += GRACE_SECONDS - 0.001
    assert not scene.serving.is_ready()
    scene.now += 0.001
    assert scene.serving.is_ready()


def test_the_grace_begins_with_the_first_known_pool() -> None:
    """A replica may wait long before it may follow any pool."""
    scene = Scene()
    scene.now += 100 * GRACE_SECONDS
    assert not scene.serving.is_ready()
    scene.b.learn("x")
    scene.now += GRACE_SECONDS / 2
    scene.b.learn("x", "y")
    assert not scene.serving.is_ready()
    scene.now += GRACE_SECONDS / 2
    assert scene.serving.is_ready()


def test_a_ready_picker_remains_ready_while_any_pool_is_known() -> None:
    """A new pool exists for a moment before its endpoints are known."""
    scene = Scene()
    scene.a.learn("x")
    scene.b.absent = scene.c.absent = True
    assert scene.serving.is_ready()
    scene.b.absent = False
    assert scene.serving.is_ready()
    scene.b.learn("y")
    scene.a.vanish()
    assert scene.serving.is_ready()
    scene.b.vanish()
    assert not scene.serving.is_ready()
    scene.c.learn("z")
    assert scene.serving.is_ready()


def test_a_draining_picker_is_not_ready() -> None:
    scene = Scene()
    for pool in (scene.a, scene.b, scene.c):
        pool.learn("x")
    of_a = scene.serving.of_pool(cast("ServedPool", scene.a))
    assert scene.serving.is_ready()
    assert of_a()
    scene.serving.is_draining = True
    assert not scene.serving.is_ready()
    assert not of_a()
