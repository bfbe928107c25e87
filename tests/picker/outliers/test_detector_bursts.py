"""A crowd arrives at a pool that has long been idle: few requests are risked before an answer."""

import pytest

from picker.outliers.breaker import Answer, EndpointState
from picker.outliers.detector import OutlierDetector
from picker.pool.datastore import EndpointChanges
from picker.types import FinishCause
from tests.support.picker.health_scene import Scene


@pytest.fixture
def scene() -> Scene:
    scene = Scene(2)
    for number in range(2):
        scene.answers(number, 200)
    scene.now = 3.0
    return scene


def fill(scene: Scene, *numbers: int) -> None:
    for number in numbers:
        for _ in range(3):
            scene.send(number)


def test_an_idle_endpoint_has_to_prove_itself_again(scene: Scene) -> None:
    first = scene.send(0)
    scene.send(0)
    assert scene.usable() == [0, 1]
    scene.send(0)
    assert scene.usable() == [1]
    assert not scene.memory.is_unsure(scene.now)
    first.responded(Answer(200), scene.now)
    assert scene.usable() == [0, 1]
    fill(scene, 0, 0)
    assert scene.usable() == [0, 1]
    scene.memory.check_integrity()


def test_an_endpoint_is_idle_when_its_success_is_older_than_that(scene: Scene) -> None:
    scene.now = 2.0
    fill(scene, 0)
    assert scene.usable() == [0, 1]
    scene.now = 2.01
    fill(scene, 1)
    assert scene.usable() == [0]


def test_one_that_works_on_something_is_not_idle(scene: Scene) -> None:
    scene.now = 1.0
    fill(scene, 0)
    scene.now = 30.0
    fill(scene, 0)
    assert scene.usable() == [0, 1]


def test_silence_proves_an_endpoint_that_has_answered_before(scene: Scene) -> None:
    fill(scene, 0)
    assert scene.usable() == [1]
    scene.now = 3.3
    assert not scene.memory.is_unsure(scene.now)
    assert scene.usable() == [0, 1]
    scene.memory.check_integrity()


def test_a_full_pool_without_an_answer_is_worth_a_wait(scene: Scene) -> None:
    woken: list[float] = []
    scene.memory._settled = lambda: woken.append(scene.now)
    good, bad = scene.send(0), scene.send(1)
    fill(scene, 0, 1)
    assert scene.memory.is_unsure(scene.now)
    scene.now = 3.05
    good.responded(Answer(200), scene.now)
    assert scene.memory.is_unsure(scene.now)
    scene.now = 3.06
    bad.responded(Answer(500), scene.now)
    assert not scene.memory.is_unsure(scene.now)
    assert woken == [3.06]
    assert scene.usable() == [0]
    scene.memory.check_integrity()


def test_the_wait_is_short(scene: Scene) -> None:
    fill(scene, 0, 1)
    scene.now = 3.19
    assert scene.memory.is_unsure(scene.now)
    scene.now = 3.21
    assert not scene.memory.is_unsure(scene.now)
    assert scene.usable() == [0, 1]
    strangers = Scene(2)
    fill(strangers, 0, 1)
    assert strangers.memory.is_unsure(0.1)
    fill(strangers, 0, 1)
    assert not strangers.memory.is_unsure(0.2)
    strangers.memory.check_integrity()


def test_no_request_waits_for_the_only_endpoint() -> None:
    scene = Scene(1)
    fill(scene, 0, 0)
    assert not scene.memory.is_unsure(0.0)


def test_a_wait_ends_with_its_endpoints(scene: Scene) -> None:
    woken: list[float] = []
    scene.memory._settled = lambda: woken.append(scene.now)
    attempts = [scene.send(number) for number in (0, 1) * 3]
    scene.memory.pool_changed(EndpointChanges(restarted=(scene.pool[0].key,)))
    assert scene.memory.is_unsure(scene.now)
    scene.memory.pool_changed(EndpointChanges((), (scene.pool[1],)))
    assert woken == [3.0]
    assert not scene.memory.is_unsure(scene.now)
    for attempt in attempts:
        attempt.ended(FinishCause.CLIENT_GONE, Answer(None), scene.now)
    scene.memory.check_integrity()


def test_a_broken_one_of_an_idle_pool_is_ejected_for_three(scene: Scene) -> None:
    attempts = [scene.send(1) for _ in range(3)]
    fill(scene, 0)
    for attempt in attempts:
        attempt.responded(Answer(500), scene.now)
    assert scene.state(1) is EndpointState.EJECTED
    assert scene.memory.is_unsure(scene.now)
    scene.now = 3.3
    assert not scene.memory.is_unsure(scene.now)
    assert scene.usable() == [0]


def test_a_detector_without_waiting_requests_does_not_wake_any() -> None:
    scene = Scene(2)
    assert isinstance(scene.memory, OutlierDetector)
    fill(scene, 0, 1)
    scene.answers(0, 200)
    scene.answers(1, 200)
    assert not scene.memory.is_unsure(scene.now)
