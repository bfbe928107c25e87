"""Successes that clear a suspect under load, and those that do not."""

import pytest

from picker.outliers.breaker import Answer, EndpointState
from tests.support.picker.health_scene import Scene

EJECTED, HEALTHY, SUSPECT = EndpointState.EJECTED, EndpointState.HEALTHY, EndpointState.SUSPECT


@pytest.fixture
def scene() -> Scene:
    scene = Scene(3)
    for number in range(3):
        scene.answers(number, 200)
    return scene


def test_successes_from_before_the_failures_do_not_clear_a_suspect(scene: Scene) -> None:
    """It may complete long answers and fail all new requests."""
    before = [scene.send(0) for _ in range(10)]
    for attempt in before:
        scene.now += 0.01
        if scene.usable() != [1, 2]:
            scene.answers(0, 500)
        attempt.responded(Answer(200), scene.now)
    assert scene.state(0) is EJECTED
    assert scene.watcher.ejections == [("default/pod-0", 3)]


def test_one_failure_among_long_answers_costs_a_busy_server_little(scene: Scene) -> None:
    before = [scene.send(0) for _ in range(10)]
    before[0].responded(Answer(500), scene.now)
    assert scene.usable() == [0, 1, 2]
    scene.send(0)
    scene.send(0)
    assert scene.usable() == [1, 2]
    scene.now = 0.05
    before[1].responded(Answer(200), scene.now)
    assert scene.state(0) is SUSPECT
    scene.now = 0.15
    before[2].responded(Answer(200), scene.now)
    assert scene.state(0) is HEALTHY
    assert scene.usable() == [0, 1, 2]


def test_a_slow_failure_is_waited_for(scene: Scene) -> None:
    before = [scene.send(0) for _ in range(10)]
    scene.now = 1.0
    before[0].responded(Answer(500), scene.now)
    late = scene.send(0)
    scene.now = 1.9
    before[1].responded(Answer(200), scene.now)
    assert scene.state(0) is SUSPECT
    late.responded(Answer(200), scene.now)
    assert scene.state(0) is HEALTHY
