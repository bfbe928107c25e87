"""Drafts in a step: their verification, their room, and the answer."""

from collections.abc import Callable

import pytest

from tests.support.worker.guesses import Says, by, scheduled, share_of, take_in
from tests.support.worker.step_driver import advance, drawn, scheduler
from worker.engine.messages import AddRequest
from worker.errors import IntegrityError
from worker.types import FinishReason

Make = Callable[..., AddRequest]


def test_drafts_follow_the_last_known_token(make_request: Make) -> None:
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


def test_the_room_for_what_fell_is_given_back(make_request: Make) -> None:
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


def test_drafts_get_what_is_left_of_the_budget(make_request: Make) -> None:
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


def test_drafts_leave_a_block_for_every_sequence(make_request: Make) -> None:
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


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_nothing_is_verified_beyond_the_last_token(make_request: Make, max_tokens: int) -> None:
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


def test_draws_that_are_no_run_are_refused(make_request: Make) -> None:
    """An executor that accepts what it did not draw would leave the KV of other tokens."""
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    step = scheduled(engine)
    with pytest.raises(IntegrityError, match="cannot have been accepted"):
        engine.update(step, drawn({0: (8, 6, 9)}), 0.0)
