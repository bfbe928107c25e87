"""One step ahead: what is scheduled before a result is known, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

from step_driver import drawn, plan, scheduler

from worker.engine.messages import AddRequest
from worker.engine.scheduler import Scheduler
from worker.types import FinishReason, SchedulerOutput

Make = Callable[..., AddRequest]


def scheduled(engine: Scheduler) -> SchedulerOutput:
    """The next step, which there is."""
    step = engine.schedule(0.0)
    assert step is not None
    engine.check_integrity()
    return step


def test_a_token_that_is_being_drawn_is_run_next(make_request: Make) -> None:
    """The step after takes it as pending and draws the one after it."""
    engine = scheduler()
    engine.add(make_request("a", [1, 2, 3], max_tokens=3))
    first = scheduled(engine)
    second = scheduled(engine)
    (sequence,) = second.sequences
    assert (list(sequence.token_ids), sequence.takes_pending, sequence.start) == ([], True, 3)
    assert [sample.position for sample in sequence.samples] == [4]
    (output,) = engine.update(first, drawn({0: 5}), 0.0)
    assert output.token_ids == [5]
    engine.check_integrity()
    third = scheduled(engine)
    assert [sample.position for sample in third.sequences[0].samples] == [5]


def test_nothing_is_scheduled_beyond_a_limit_that_is_certain(make_request: Make) -> None:
    """The token in flight is the last one, whatever it is."""
    engine = scheduler()
    engine.add(make_request("a", [1, 2, 3], max_tokens=1))
    first = scheduled(engine)
    assert engine.schedule(0.0) is None
    assert engine.has_unfinished
    (output,) = engine.update(first, drawn({0: 5}), 0.0)
    assert output.finish_reason is FinishReason.LENGTH


def test_a_late_stop_discards_the_token_that_was_under_way(make_request: Make) -> None:
    """Its blocks are free at once; the step in flight tells nothing about it any more."""
    engine = scheduler(num_blocks=2)
    engine.add(make_request("a", [1, 2, 3], max_tokens=9))
    engine.add(make_request("b", [4, 5, 6, 7], max_tokens=9))
    first = scheduled(engine)
    second = scheduled(engine)
    assert plan(second) == {0: 1}
    (ended, other) = engine.update(first, drawn({0: 0, 1: 3}), 0.0)
    assert ended.finish_reason is FinishReason.STOP
    assert other.token_ids == [3]
    engine.check_integrity()
    third = scheduled(engine)
    assert plan(third) == {1: 5}
    assert engine.update(second, drawn({0: 6}), 0.0) == []
    engine.check_integrity()


def test_an_abort_in_flight_frees_the_blocks_at_once(make_request: Make) -> None:
    """A step that still runs for it is overtaken by nobody: the next step comes after it."""
    engine = scheduler(num_blocks=2)
    engine.add(make_request("a", [1] * 7))
    first = scheduled(engine)
    assert engine.abort("a") is not None
    engine.check_integrity()
    assert engine.blocks.num_free == 2
    engine.add(make_request("b", [2] * 7))
    second = scheduled(engine)
    assert plan(second) == {1: 7}
    assert engine.update(first, drawn({0: 1}), 0.0) == []
    assert len(engine.update(second, drawn({1: 1}), 0.0)) == 1


def test_what_is_preempted_in_flight_still_gets_its_token(make_request: Make) -> None:
    """It is delivered, and run again with the rest when the sequence is back."""
    engine = scheduler(num_blocks=4, block_size=1)
    engine.add(make_request("a", [1], max_tokens=3))
    engine.add(make_request("b", [2], max_tokens=3))
    first = scheduled(engine)
    engine.update(first, drawn({0: 5, 1: 6}), 0.0)
    second = scheduled(engine)  # both grow to two blocks
    third = scheduled(engine)  # a needs a third one
    assert plan(third) == {0: 1}
    assert engine.num_waiting == 1
    tokens = {o.request_id: o.token_ids for o in engine.update(second, drawn({0: 5, 1: 6}), 0.0)}
    assert tokens == {"a": [5], "b": [6]}
    engine.check_integrity()
    engine.update(third, drawn({0: 5}), 0.0)
    fourth = scheduled(engine)
    (back,) = fourth.sequences
    assert [*[2, 6, 6][: back.start], *back.token_ids] == [2, 6, 6]


def test_a_preempted_sequence_is_not_sealed_by_what_was_in_flight(make_request: Make) -> None:
    """Its blocks are somebody else's by then."""
    engine = scheduler(num_blocks=4, block_size=1)
    engine.add(make_request("a", [1], max_tokens=4))
    engine.add(make_request("b", [2], max_tokens=4))
    first = scheduled(engine)
    second = scheduled(engine)
    engine.update(first, drawn({0: 5, 1: 6}), 0.0)
    third = scheduled(engine)
    assert plan(third) == {0: 1}
    engine.update(second, drawn({0: 5, 1: 6}), 0.0)
    engine.check_integrity()
    cached = {tuple(block.token_ids) for block in engine.blocks.cached_blocks()}
    assert (6,) not in cached


def test_full_blocks_are_hits_when_their_step_has_ended(make_request: Make) -> None:
    """Not while it is in flight."""
    engine = scheduler(in_batch_prefix_tokens=None)
    engine.add(make_request("a", [1] * 9))
    first = scheduled(engine)
    engine.add(make_request("b", [1] * 9))
    second = scheduled(engine)
    assert plan(second) == {0: 1, 1: 9}
    engine.update(first, drawn({0: 1}), 0.0)
    engine.add(make_request("c", [1] * 9))
    assert plan(scheduled(engine)) == {0: 1, 1: 1, 2: 1}
