"""Several answers to one prompt: run once, drawn for each, then each for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from step_driver import advance, drawn, plan, scheduler

from worker.engine.messages import AddRequest
from worker.types import FinishReason, ModelOutput

Make = Callable[..., AddRequest]


def test_the_prompt_runs_once_and_is_drawn_from_for_every_answer(make_request: Make) -> None:
    """One draw each, with a seed each; then as many sequences, on shared blocks."""
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
    assert engine.stats().prompt_tokens == 6


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
    """A request for three waits until three seats are free."""
    engine = scheduler(max_num_seqs=3, max_bypasses=0)
    engine.add(make_request("a", [1], max_tokens=2))
    engine.add(make_request("b", [2], branches=["b1", "b2"]))
    engine.add(make_request("c", [3]))
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {0: 1}
    assert advance(engine)[0] == {1: 1}
    assert engine.num_running == 3


def test_more_answers_than_seats_are_refused(make_request: Make) -> None:
    """With an error for each of them that says what the limit is."""
    engine = scheduler(max_num_seqs=2)
    outputs = engine.add(make_request("a", [1], branches=["a1", "a2"]))
    assert [o.request_id for o in outputs] == ["a", "a1", "a2"]
    assert all("at most 2" in (o.error or "") for o in outputs)
    assert not engine.has_unfinished


@pytest.mark.parametrize("branches", [["b", "b"], ["a"], ["used"]])
def test_ids_of_answers_are_unique(make_request: Make, branches: list[str]) -> None:
    """Among themselves and among all that live."""
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
    """The others keep their seeds, whoever of them runs the prompt."""
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


@pytest.mark.parametrize("gone", ["a", "a1", "a2"])
def test_an_answer_can_be_given_up_while_its_first_token_is_drawn(
    make_request: Make, gone: str
) -> None:
    """Each of the others gets the token that was drawn for it; nothing runs ahead meanwhile."""
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), branches=["a1", "a2"]))
    step = engine.schedule(0.0)
    assert step is not None
    assert engine.abort(gone) is not None
    assert engine.schedule(0.0) is None
    outputs = engine.update(step, drawn({0: (1, 2, 3)}), 0.0)
    engine.check_integrity()
    tokens = {"a": [1], "a1": [2], "a2": [3]}
    del tokens[gone]
    assert {o.request_id: o.token_ids for o in outputs} == tokens


def test_all_answers_given_up_leave_nothing(make_request: Make) -> None:
    """Before the fork and after it."""
    engine = scheduler()
    for run in (False, True):
        engine.add(make_request("a", range(1, 7), branches=["a1", "a2"]))
        if run:
            advance(engine)
        assert all(engine.abort(name) is not None for name in ("a1", "a", "a2"))
        engine.check_integrity()
        assert not engine.has_unfinished
        assert engine.blocks.num_free == 64


def test_one_that_ends_with_its_first_token_leaves_the_others_their_blocks(
    make_request: Make,
) -> None:
    """Even when it is the one that ran the prompt."""
    engine = scheduler()
    engine.add(make_request("a", range(1, 7), branches=["a1", "a2"]))
    _, outputs = advance(engine, {0: (0, 2, 3)})
    assert [o.finish_reason for o in outputs] == [FinishReason.STOP, None, None]
    assert advance(engine)[0] == {1: 1, 2: 1}


def test_preempted_while_the_first_tokens_are_drawn(make_request: Make) -> None:
    """Every answer gets its token, waits, and comes back as a sequence of its own."""
    engine = scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=8)
    engine.add(make_request("first", [9], max_tokens=6, ignore_eos=True))
    advance(engine)
    engine.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=2, branches=["a1"]))
    step = engine.schedule(0.0)
    assert step is not None
    assert plan(step) == {0: 1, 1: 5}
    ahead = engine.schedule(0.0)
    assert plan(ahead) == {0: 1}
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    outputs = engine.update(step, drawn({0: 1, 1: (6, 7)}), 0.0)
    assert {o.request_id: o.token_ids for o in outputs} == {"first": [1], "a": [6], "a1": [7]}
    engine.check_integrity()
    assert ahead is not None
    engine.update(ahead, drawn({0: 1}), 0.0)
    answered = {}
    for _ in range(20):
        if not engine.has_unfinished:
            break
        for output in advance(engine)[1]:
            answered[output.request_id] = output.finish_reason
    assert answered["a"] is answered["a1"] is FinishReason.LENGTH


def test_a_prompt_that_fails_fails_for_every_answer(make_request: Make) -> None:
    """Each client is told."""
    engine = scheduler()
    engine.add(make_request("a", [1, 2], branches=["a1"]))
    step = engine.schedule(0.0)
    assert step is not None
    outputs = engine.update(step, ModelOutput({}, failed={0: "not a number"}), 0.0)
    assert [(o.request_id, o.error) for o in outputs] == [
        ("a", "not a number"),
        ("a1", "not a number"),
    ]
    assert engine.stats().num_corrupted_requests == 2
    assert not engine.has_unfinished
