"""Several answers to one prompt: run once, drawn for each, then each for itself."""

from collections.abc import Callable

import pytest

from tests.support.worker.step_driver import advance, drawn, plan, scheduler
from worker.engine.messages import AddRequest
from worker.types import FinishReason

Make = Callable[..., AddRequest]


def test_the_prompt_runs_once_and_is_drawn_from_for_every_answer(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), seed=10, branches=["a1", "a2"]))
    assert (engine.num_waiting, engine.num_running) == (3, 0)
    step = engine.schedule(0.0)
    assert step is not None
    (parent,) = step.sequences
    assert [sample.params.seed for sample in parent.samples] == [10, 11, 12]
    assert [sample.position for sample in parent.samples] == [6, 6, 6]
    outputs = engine.update(step, drawn({0: (1, 2, 3)}), 0.0)
    assert [(o.request_id, o.token_ids) for o in outputs] == [("a", [1]), ("a1", [2]), ("a2", [3])]
    engine.check_integrity()
    assert (engine.num_waiting, engine.num_running) == (0, 3)
    assert engine.blocks.num_free == 62
    assert engine.stats().scheduler.prompt_tokens == 6


def test_only_the_shared_partial_tail_is_copied(make_request: Make) -> None:
    """Two of three write into a copy of it, the last keeps it; a full tail is not copied at all."""
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), branches=["a1", "a2"]))
    advance(engine, {0: (1, 2, 3)})
    step = engine.schedule(0.0)
    assert step is not None
    assert plan(step) == {0: 1, 1: 1, 2: 1}
    assert len(step.block_copies) == 2
    assert len({source for source, _ in step.block_copies}) == 1
    full = scheduler()
    full.add(make_request("a", range(1, 9), branches=["a1", "a2"]))
    advance(full, {0: (1, 2, 3)})
    step = full.schedule(0.0)
    assert step is not None
    assert step.block_copies == ()
    tables = [tuple(s.block_table[:2]) for s in step.sequences]
    assert len(set(tables)) == 1


def test_all_answers_count_against_the_seats(make_request: Make) -> None:
    engine = scheduler(max_num_seqs=3, max_bypasses=0)
    engine.add(make_request("a", [1], max_tokens=2))
    engine.add(make_request("b", [2], branches=["b1", "b2"]))
    engine.add(make_request("c", [3]))
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {1: 1}
    assert engine.num_running == 3


def test_more_answers_than_seats_are_refused(make_request: Make) -> None:
    engine = scheduler(max_num_seqs=2)
    outputs = engine.add(make_request("a", [1], branches=["a1", "a2"]))
    assert [o.request_id for o in outputs] == ["a", "a1", "a2"]
    assert all("at most 2" in (o.error or "") for o in outputs)
    assert not engine.has_unfinished


@pytest.mark.parametrize("branches", [["b", "b"], ["a"], ["used"]])
def test_ids_of_answers_are_unique(make_request: Make, branches: list[str]) -> None:
    engine = scheduler()
    engine.add(make_request("used", [1]))
    outputs = engine.add(make_request("a", [1], branches=branches))
    assert all("is in use" in (o.error or "") for o in outputs)
    assert engine.num_waiting == 1


@pytest.mark.parametrize(
    ("gone", "left"), [("a", {"a1": 11, "a2": 12}), ("a1", {"a": 10, "a2": 12})]
)
def test_an_answer_can_be_given_up_before_the_prompt_has_run(
    make_request: Make, gone: str, left: dict[str, int]
) -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), seed=10, branches=["a1", "a2"]))
    output = engine.abort(gone)
    assert output is not None
    assert (output.request_id, output.finish_reason) == (gone, FinishReason.ABORT)
    engine.check_integrity()
    step = engine.schedule(0.0)
    assert step is not None
    assert [s.params.seed for s in step.sequences[0].samples] == list(left.values())
    outputs = engine.update(step, drawn({0: (1, 2)}), 0.0)
    assert [o.request_id for o in outputs] == list(left)
    assert engine.num_running == 2
