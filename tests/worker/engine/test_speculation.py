"""Drafts in a step: what is verified, what room there is for it, and what becomes of the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from guesses import Says, by, scheduled, share_of, take_in
from step_driver import advance, drawn, scheduler

from worker.engine.messages import AddRequest
from worker.errors import IntegrityError
from worker.types import FinishReason, ModelOutput

Make = Callable[..., AddRequest]


def test_drafts_follow_the_last_known_token(make_request: Make) -> None:
    """Of the prompt nothing is drafted; then one spec stands for all rows."""
    engine = scheduler(speculation=by(Says(5, 6, 7)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    first = scheduled(engine)
    assert (share_of(first).num_drafts, first.num_tokens) == (0, 3)
    take_in(engine, first, {0: 4})
    second = scheduled(engine)
    share = share_of(second)
    assert (list(share.token_ids), share.start, list(share.drafts)) == ([4, 5, 6, 7], 3, [5, 6, 7])
    assert [sample.position for sample in share.samples] == [4]
    assert second.num_tokens == 4


@pytest.mark.parametrize(
    ("run", "start"), [((9,), 4), ((5, 9), 5), ((5, 6, 9), 6), ((5, 6, 7, 9), 7)]
)
def test_what_stood_is_known_and_computed(
    make_request: Make, run: tuple[int, ...], start: int
) -> None:
    """All draws come in one output; the next step runs the last of them, behind their KV."""
    engine = scheduler(speculation=by(Says(5, 6, 7)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    (output,) = take_in(engine, scheduled(engine), {0: run})
    assert output.token_ids == list(run)
    share = share_of(scheduled(engine))
    assert (share.start, share.token_ids[0]) == (start, 9)


def test_the_room_for_what_fell_is_given_back(make_request: Make) -> None:
    """Between steps a sequence holds no more blocks than without drafts."""
    engine = scheduler(speculation=by(Says(*range(5, 13))))
    engine.add(make_request("a", [1, 2, 3], max_tokens=40))
    advance(engine, {0: 4})
    step = scheduled(engine)
    assert len(share_of(step).block_table) == 3
    take_in(engine, step, {0: 9})
    assert engine.blocks.num_free == 63
    step = scheduled(engine)
    take_in(engine, step, {0: tuple(range(5, 13))})
    assert engine.blocks.num_free == 61


def test_blocks_that_filled_up_with_drafts_are_hits(make_request: Make) -> None:
    """They are named by the tokens that stood."""
    engine = scheduler(speculation=by(Says(5, 6, 7)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    take_in(engine, scheduled(engine), {0: (5, 6, 7, 9)})
    cached = {tuple(block.token_ids) for block in engine.blocks.cached_blocks()}
    assert cached == {(1, 2, 3, 4)}
    take_in(engine, scheduled(engine), {0: (5, 8)})
    cached = {tuple(block.token_ids) for block in engine.blocks.cached_blocks()}
    assert cached == {(1, 2, 3, 4), (5, 6, 7, 9)}


def test_drafts_get_what_is_left_of_the_budget(make_request: Make) -> None:
    """First everybody who runs, then who is admitted, then drafts in order of rank."""
    engine = scheduler(speculation=by(Says(5, 6, 7)), max_num_batched_tokens=8)
    engine.add(make_request("a", [1, 2], max_tokens=20))
    engine.add(make_request("b", [1, 3], max_tokens=20))
    advance(engine, {0: 4, 1: 4})
    engine.add(make_request("c", [2, 2], max_tokens=20))
    step = scheduled(engine)
    assert [(s.seq_id, len(s.token_ids), s.num_drafts) for s in step.sequences] == [
        (0, 4, 3),
        (1, 2, 1),
        (2, 2, 0),
    ]


def test_drafts_leave_a_block_for_everybody(make_request: Make) -> None:
    """Without a spare one they get the slots that the sequence has anyway."""
    drafter = Says(5, 6, 7, 8)
    engine = scheduler(num_blocks=4, speculation=by(drafter))
    engine.add(make_request("a", [1, 2], max_tokens=14))
    advance(engine, {0: 4})
    step = scheduled(engine)
    assert share_of(step).num_drafts == 4  # 1 of 4 blocks is full, 2 are spare
    take_in(engine, step, {0: (5, 6, 7, 8, 9)})
    step = scheduled(engine)  # two full blocks hold positions up to 8, one more is spare
    assert share_of(step).num_drafts == 4
    take_in(engine, step, {0: (5, 6, 7, 8, 9)})
    step = scheduled(engine)  # position 12 takes the last block
    assert len(share_of(step).block_table) == 4
    assert share_of(step).num_drafts == 2  # 16 tokens at most, and one more is drawn
    (output,) = take_in(engine, step, {0: (5, 6, 9)})
    assert output.finish_reason is FinishReason.LENGTH


def test_drafts_preempt_nobody(make_request: Make) -> None:
    """With every block taken both go on without drafts."""
    engine = scheduler(num_blocks=2, speculation=by(Says(5, 6, 7, 8)))
    engine.add(make_request("a", [1, 2], max_tokens=6))
    engine.add(make_request("b", [2, 2], max_tokens=2))
    advance(engine, {0: 4, 1: 4})
    step = scheduled(engine)
    assert [(s.seq_id, s.num_drafts, len(s.block_table)) for s in step.sequences] == [
        (0, 1, 1),
        (1, 0, 1),
    ]
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_nothing_is_verified_beyond_the_last_token(make_request: Make, max_tokens: int) -> None:
    """One token more than the drafts always comes; there are never more than may be."""
    engine = scheduler(speculation=by(Says(5, 6, 7)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=max_tokens))
    outputs = advance(engine, {0: 4})[1]
    if max_tokens > 1:
        step = scheduled(engine)
        num_drafts = min(3, max_tokens - 2)
        assert share_of(step).num_drafts == num_drafts
        outputs = take_in(engine, step, {0: (5, 6, 7, 9)[: num_drafts + 1]})
    expected = FinishReason.LENGTH if max_tokens <= 5 else None
    assert outputs[0].finish_reason is expected


@pytest.mark.parametrize(
    ("params", "run", "kept", "stop"),
    [
        ({}, (5, 0, 7, 9), [5, 0], 0),
        ({"stop_token_ids": (6,)}, (5, 6, 7, 9), [5, 6], 6),
        ({"stop_token_ids": (9,)}, (5, 6, 7, 9), [5, 6, 7, 9], 9),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, (5, 0, 7, 9), [5], 5),
    ],
)
def test_a_stop_within_a_run_cuts_off_the_rest(
    make_request: Make,
    params: dict[str, object],
    run: tuple[int, ...],
    kept: list[int],
    stop: int,
) -> None:
    """What was drawn behind it is neither told nor counted; its KV is a hit up to the stop."""
    engine = scheduler(speculation=by(Says(*run[:3])))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20, **params))
    advance(engine, {0: 4})
    (output,) = take_in(engine, scheduled(engine), {0: run})
    assert (output.token_ids, output.stop_token_id) == (kept, stop)
    assert output.finish_reason is FinishReason.STOP
    assert engine.stats().generation_tokens == 1 + len(kept)
    assert engine.blocks.num_free == 64
    assert not engine.has_unfinished


def test_no_stop_counts_before_min_tokens(make_request: Make) -> None:
    """Each draw of a run is judged at its own place."""
    engine = scheduler(speculation=by(Says(6, 6, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20, min_tokens=3, stop_token_ids=(6,)))
    advance(engine, {0: 4})
    (output,) = take_in(engine, scheduled(engine), {0: (6, 6, 6, 9)})
    assert output.token_ids == [6, 6]


def test_draws_that_are_no_run_are_refused(make_request: Make) -> None:
    """An executor that lets stand what it did not draw would leave the KV of other tokens."""
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    step = scheduled(engine)
    with pytest.raises(IntegrityError, match="cannot have stood"):
        engine.update(step, drawn({0: (8, 6, 9)}), 0.0)


def test_an_abort_in_flight_takes_nothing(make_request: Make) -> None:
    """The step's draws are discarded, the blocks free at once."""
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    step = scheduled(engine)
    assert engine.abort("a") is not None
    assert engine.blocks.num_free == 64
    assert take_in(engine, step, {0: (5, 6, 9)}) == []
    assert engine.stats().num_drafts == 0


def test_one_that_lost_its_blocks_in_flight_keeps_its_tokens(make_request: Make) -> None:
    """They are run again with the rest when it is back."""
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    step = scheduled(engine)
    engine.preempt_all()
    (output,) = take_in(engine, step, {0: (5, 6, 9)})
    assert output.token_ids == [5, 6, 9]
    share = share_of(scheduled(engine))
    assert [*[1, 2, 3, 4, 5, 6, 9][: share.start], *share.token_ids] == [1, 2, 3, 4, 5, 6, 9]


def test_a_failed_sequence_ends_as_ever(make_request: Make) -> None:
    """And is told to the drafter."""
    drafter = Says(5, 6)
    engine = scheduler(speculation=by(drafter))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    (output,) = engine.update(scheduled(engine), ModelOutput({}, failed={0: "not a number"}), 0.0)
    assert output.finish_reason is FinishReason.ERROR
    engine.check_integrity()
    assert [context.seq_id for context in drafter.ended] == [0]
