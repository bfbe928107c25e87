"""Answers move an endpoint: suspect, ejected, probed, on trial, and healthy again."""

from random import Random

import pytest

from picker.outliers.breaker import Answer, EndpointState, OutlierSettings
from picker.outliers.detector import UNSEEN_ATTEMPTS, ProbeResult
from picker.pool.datastore import EndpointChanges
from picker.types import Candidate, FinishCause
from tests.support.picker.health_scene import Scene, endpoint

EJECTED, HEALTHY = EndpointState.EJECTED, EndpointState.HEALTHY
ON_TRIAL, SUSPECT = EndpointState.ON_TRIAL, EndpointState.SUSPECT


@pytest.fixture
def scene() -> Scene:
    scene = Scene(3)
    for number in range(3):
        scene.answers(number, 200)
    return scene


def ejected(scene: Scene, number: int = 0) -> Scene:
    for _ in range(3):
        scene.answers(number, 500)
    assert scene.state(number) is EJECTED
    return scene


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_failures_in_a_row_eject(scene: Scene, status: int) -> None:
    scene.answers(0, status)
    scene.answers(0, status)
    assert scene.state(0) is SUSPECT
    scene.answers(0, status)
    assert scene.state(0) is EJECTED
    assert scene.usable() == [1, 2]
    assert scene.watcher.ejections == [("default/pod-0", 3)]
    assert scene.watcher.num_ejected == 1


def test_a_success_in_between_begins_the_count_anew(scene: Scene) -> None:
    for status in (500, 500, 200, 500, 500):
        scene.answers(0, status)
    assert scene.state(0) is SUSPECT
    scene.answers(0, 204)
    assert scene.state(0) is HEALTHY


@pytest.mark.parametrize("status", [400, 404, 422, 429, 501, 505])
def test_an_answer_about_the_request_neither_blames_nor_clears(scene: Scene, status: int) -> None:
    """A server whose engine is broken still reads requests and refuses bad ones."""
    for _ in range(10):
        scene.answers(0, status)
    assert scene.state(0) is HEALTHY
    for answer in (500, status, 500, status, 500):
        scene.answers(0, answer)
    assert scene.state(0) is EJECTED


@pytest.mark.parametrize("cause", [FinishCause.CLIENT_GONE, FinishCause.RESET, FinishCause.SKIPPED])
def test_an_end_without_an_answer_is_no_evidence(scene: Scene, cause: FinishCause) -> None:
    """Neither a client that leaves nor a stream that breaks is the endpoint's fault."""
    for _ in range(10):
        scene.send(0).ended(cause, Answer(None), scene.now)
    assert scene.memory.views(0) == {}


@pytest.mark.parametrize("cause", [FinishCause.EVICTED, FinishCause.REFUSED])
def test_the_pickers_own_status_is_not_the_endpoints(scene: Scene, cause: FinishCause) -> None:
    """The picker itself answers an evicted request."""
    for _ in range(5):
        scene.send(0).ended(cause, Answer(503), scene.now)
    assert scene.memory.views(0) == {}


def test_the_status_at_the_end_counts_where_no_response_was_watched(scene: Scene) -> None:
    for _ in range(3):
        scene.send(0).ended(FinishCause.COMPLETED, Answer(500), scene.now)
    assert scene.state(0) is EJECTED


def test_the_end_of_a_response_changes_nothing(scene: Scene) -> None:
    attempt = scene.send(0)
    attempt.responded(Answer(500), scene.now)
    attempt.responded(Answer(500), scene.now)
    attempt.ended(FinishCause.COMPLETED, Answer(500), scene.now)
    assert scene.view(0).consecutive_failures == 1


def test_an_endpoint_is_sent_no_more_than_would_eject_it(scene: Scene) -> None:
    scene.answers(0, 500)
    first = scene.send(0)
    assert scene.usable() == [0, 1, 2]
    second = scene.send(0)
    assert scene.usable() == [1, 2]
    first.ended(FinishCause.COMPLETED, Answer(500), scene.now)
    assert scene.usable() == [1, 2]
    second.ended(FinishCause.COMPLETED, Answer(200), scene.now)
    assert scene.usable() == [0, 1, 2]


def test_a_stranger_gets_few_requests_until_it_has_answered_one() -> None:
    scene = Scene(2)
    scene.answers(1, 200)
    attempts = [scene.send(0) for _ in range(3)]
    assert scene.usable() == [1]
    attempts[0].responded(Answer(200), scene.now)
    assert scene.usable() == [0, 1]
    for _ in range(20):
        scene.send(0)
    assert scene.usable() == [0, 1]


def test_a_pool_of_unproven_endpoints_is_used_as_a_whole() -> None:
    """Limits are preferences: the request must go to some endpoint."""
    scene = Scene(2)
    for number in (0, 0, 0, 1, 1, 1):
        scene.send(number)
    assert scene.usable() == [0, 1]


def test_when_all_are_held_back_the_blameless_go_first(scene: Scene) -> None:
    stranger = Scene(3)
    attempts = [stranger.send(number) for number in (0, 0, 0, 1, 1, 1)]
    ejected(stranger, 2)
    assert stranger.usable() == [0, 1]
    attempts[0].ended(FinishCause.COMPLETED, Answer(500), stranger.now)
    stranger.send(0)
    assert stranger.usable() == [1]
    for number in (0, 1, 2):
        ejected(scene, number)
    assert scene.usable() == [0, 1, 2]
    assert scene.usable(1, 2) == [1, 2]


def test_the_proxy_may_have_tried_another_endpoint(scene: Scene) -> None:
    for _ in range(3):
        scene.answers(0, 200, served_by=endpoint(1).host_port)
    assert scene.state(0) is EJECTED
    assert scene.state(1) is HEALTHY
    scene.answers(2, 503, served_by=endpoint(1).host_port)
    assert scene.state(1) is SUSPECT
    assert scene.state(2) is SUSPECT


def test_an_unknown_address_is_no_evidence(scene: Scene) -> None:
    """A proxy between may serve for all of them; the status counts then."""
    scene.answers(0, 500)
    scene.answers(0, 200, served_by="10.9.9.9:1")
    assert scene.state(0) is HEALTHY


def test_an_answer_of_the_proxy_itself_blames_no_endpoint(scene: Scene) -> None:
    """The proxy answers 503 itself when it has no endpoint to ask."""
    for _ in range(5):
        scene.send(0).responded(Answer(503, reached_no_endpoint=True), scene.now)
    assert scene.memory.views(0) == {}


def test_a_busy_server_that_turns_requests_away_is_not_ejected(scene: Scene) -> None:
    working = [scene.send(0) for _ in range(10)]
    for _ in range(4):
        scene.answers(0, 503)
    assert scene.state(0) is SUSPECT
    assert scene.usable() == [1, 2]
    for attempt in working[:7]:
        attempt.ended(FinishCause.CLIENT_GONE, Answer(None), scene.now)
    assert scene.state(0) is EJECTED
    busy = Scene(2)
    working = [busy.send(0) for _ in range(10)]
    for _ in range(4):
        busy.answers(0, 503)
    working[0].responded(Answer(200), busy.now)
    assert busy.state(0) is HEALTHY


def test_a_probe_is_one_request_when_it_is_due(scene: Scene) -> None:
    ejected(scene)
    waits = []
    for _ in range(5):
        begun = scene.now
        while (due := scene.probe()) is None:
            scene.now += 0.25
        assert due == 0
        waits.append(scene.now - begun)
        attempt = scene.send(0)
        scene.now += 0.5
        assert scene.probe() is None
        attempt.responded(Answer(500), scene.now)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert scene.watcher.probes == [ProbeResult.FAILURE] * 5


def test_a_probe_without_an_answer_keeps_the_next_one_waiting_for_a_while(scene: Scene) -> None:
    """A new probe follows eventually: the endpoint may answer it."""
    ejected(scene)
    scene.now = 2.0
    hanging = scene.send(0)
    scene.now = 11.9
    assert scene.probe() is None
    scene.now = 12.0
    assert scene.probe() == 0
    hanging.ended(FinishCause.CLIENT_GONE, Answer(None), scene.now)
    assert scene.watcher.probes == [ProbeResult.UNKNOWN]
    assert scene.state(0) is EJECTED


def test_a_probe_that_goes_well_begins_a_trial(scene: Scene) -> None:
    ejected(scene)
    scene.now = 1.0
    scene.answers(0, 200)
    assert scene.state(0) is ON_TRIAL
    assert scene.watcher.num_ejected == 0
    assert scene.probe() is None
    attempts = [scene.send(0), scene.send(0)]
    assert scene.usable() == [1, 2]
    for attempt in attempts:
        attempt.ended(FinishCause.COMPLETED, Answer(200), scene.now)
    assert scene.usable() == [0, 1, 2]
    assert scene.state(0) is ON_TRIAL
    scene.now = 3.0
    scene.answers(0, 200)
    assert scene.state(0) is HEALTHY
    assert scene.watcher.returned_keys == ["default/pod-0"]
    assert scene.view(0).ejections == 1


def test_one_failure_on_trial_ejects_and_the_waits_go_on(scene: Scene) -> None:
    ejected(scene)
    scene.now = 1.0
    scene.answers(0, 200)
    scene.answers(0, 500)
    assert scene.state(0) is EJECTED
    assert scene.view(0).next_probe_seconds == 2.0
    scene.now = 3.0
    for _ in range(3):
        scene.answers(0, 200)
        scene.now += 2.0
    assert scene.state(0) is HEALTHY
    ejected(scene)
    assert scene.view(0).next_probe_seconds == 4.0
    scene.now += 4.0
    for _ in range(3):
        scene.answers(0, 200)
        scene.now += 2.0
    scene.now += 60.0
    ejected(scene)
    assert scene.view(0).next_probe_seconds == 1.0


def test_answers_to_requests_from_before_the_ejection_are_ignored(scene: Scene) -> None:
    late = [scene.send(0) for _ in range(2)]
    ejected(scene)
    late[0].ended(FinishCause.COMPLETED, Answer(200), scene.now)
    assert scene.state(0) is EJECTED
    late[1].ended(FinishCause.COMPLETED, Answer(500), scene.now)
    assert scene.view(0).next_probe_seconds == 1.0


def test_in_need_any_success_brings_an_endpoint_back(scene: Scene) -> None:
    for number in range(3):
        ejected(scene, number)
    scene.answers(1, 200)
    assert scene.state(1) is ON_TRIAL
    assert scene.watcher.probes == []
    assert scene.usable() == [1]


def test_bodyless_requests_clear_no_endpoint(scene: Scene) -> None:
    """A broken worker still lists its models; but if even that fails, it counts."""
    for status in (500, 200, 500, 200, 500):
        scene.answers(0, status, is_bodyless=status == 200)
    assert scene.state(0) is EJECTED
    scene.now = 1.0
    scene.answers(0, 200, is_bodyless=True)
    assert scene.state(0) is EJECTED
    assert scene.probe() == 0
    for _ in range(3):
        scene.answers(1, 500, is_bodyless=True)
    assert scene.state(1) is EJECTED


def test_an_endpoint_that_left_or_restarted_is_a_stranger(scene: Scene) -> None:
    late = scene.send(0)
    ejected(scene)
    scene.memory.pool_changed(EndpointChanges(restarted=("default/pod-0",)))
    assert scene.watcher.num_ejected == 0
    assert scene.usable() == [0, 1, 2]
    late.ended(FinishCause.COMPLETED, Answer(500), scene.now)
    assert scene.memory.views(0) == {}
    ejected(scene)
    gone = scene.send(0)
    scene.memory.pool_changed(EndpointChanges((), (endpoint(0),)))
    gone.ended(FinishCause.COMPLETED, Answer(500), scene.now)
    scene.answers(0, 500)
    assert scene.memory.views(0) == {}
    scene.memory.check_integrity()


def test_without_any_response_no_endpoint_is_held_back(scene: Scene) -> None:
    ejected(scene)
    for _ in range(UNSEEN_ATTEMPTS):
        scene.send(1).ended(FinishCause.SKIPPED, Answer(None), scene.now)
    assert scene.usable() == [0, 1, 2]
    for _ in range(10):
        scene.send(0)
    assert scene.usable() == [0, 1, 2]
    scene.answers(1, 200)
    assert scene.usable() == [1, 2]
    scene.memory.check_integrity()


def test_waits_are_drawn_a_little_longer() -> None:
    """Probes of endpoints that failed together are spread."""
    drawn = set()
    for seed in range(20):
        scene = Scene(1, rng=Random(seed))
        ejected(scene)
        wait = scene.view(0).next_probe_seconds
        assert 1.0 <= wait <= 1.25
        drawn.add(wait)
    assert len(drawn) == 20


def test_the_one_that_waits_longest_is_tried_out_first(scene: Scene) -> None:
    ejected(scene, 1)
    scene.now = 0.5
    ejected(scene, 0)
    scene.now = 5.0
    assert scene.probe() == 1
    assert scene.probe(0, 2) == 0
    assert scene.probe(2) is None


def test_the_threshold_is_a_setting() -> None:
    scene = Scene(2, OutlierSettings(failures=1))
    scene.answers(0, 500)
    assert scene.state(0) is EJECTED


def test_nothing_is_made_of_candidates_while_all_is_well(scene: Scene) -> None:
    """Returning the same sequence makes large pools cost nothing."""
    candidates = [Candidate(endpoint(number)) for number in range(3)]
    assert scene.memory.usable(candidates, 0.0) is candidates
    assert scene.memory.probe(candidates, 0.0) is None


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
