"""Sources of drafts, steps that wait for them, failures, and counts."""

import logging
from collections.abc import Callable, Sequence

import pytest

from tests.support.worker.guesses import Raises, Says, by, scheduled, share_of, take_in
from tests.support.worker.step_driver import advance, drawn, scheduler
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.drafters.interface import DraftContext
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, SpeculationFigures
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import (
    Drafts,
    Draw,
    FinishReason,
    ModelOutput,
    SamplingParams,
    SchedulerOutput,
)

Make = Callable[..., AddRequest]


def scheduled_and_taken(engine: Scheduler) -> SchedulerOutput:
    step = scheduled(engine)
    take_in(engine, step, {share.seq_id: 4 for share in step.sequences})
    return step


def test_nothing_is_scheduled_ahead_of_drafts(make_request: Make) -> None:
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    first = scheduled(engine)
    assert engine.schedule(0.0) is None
    take_in(engine, first, {0: 4})
    second = scheduled(engine)
    assert engine.schedule(0.0) is None
    take_in(engine, second, {0: (5, 9)})


def test_steps_overlap_where_drafts_do_not_pay(make_request: Make) -> None:
    drafter = Says(5, 6)
    engine = scheduler(speculation=by(drafter, by_batch=((1, 1, 2), (2, 9, 0))))
    for name in ("a", "b"):
        engine.add(make_request(name, [1, 2, 3], max_tokens=20))
    first = scheduled(engine)
    second = scheduled(engine)
    assert [s.takes_pending for s in second.sequences] == [True, True]
    take_in(engine, first, {0: 4, 1: 0})
    assert drafter.asked == []
    assert engine.schedule(0.0) is None  # one is left, and may have drafts after this step
    take_in(engine, second, {0: 5})
    assert share_of(scheduled(engine)).num_drafts == 2


def test_a_prompt_in_chunks_overlaps_until_its_last_one(make_request: Make) -> None:
    """No sequence decodes before that, so there is nothing to wait for."""
    engine = scheduler(speculation=by(Says(5, 6)), max_num_batched_tokens=4)
    engine.add(make_request("a", range(1, 12), max_tokens=20))
    first = scheduled(engine)
    second = scheduled(engine)
    take_in(engine, first, {})
    third = scheduled(engine)
    take_in(engine, second, {})
    assert engine.schedule(0.0) is None
    take_in(engine, third, {0: 4})
    assert share_of(scheduled(engine)).num_drafts == 2


def test_the_device_drafts_from_the_first_token_on(make_request: Make) -> None:
    engine = scheduler(speculation=by(None, most=3))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    first = scheduled(engine)
    assert (share_of(first).num_to_draft, len(share_of(first).block_table)) == (3, 2)
    result = drawn({0: 4})
    result.drafts[0] = Drafts(4, (5, 6, 7), (0.9, 0.8, 0.7))
    engine.update(first, result, 0.0)
    engine.check_integrity()
    assert engine.blocks.num_free == 63
    second = scheduled(engine)
    share = share_of(second)
    assert (list(share.drafts), share.num_to_draft) == ([5, 6, 7], 3)
    assert len(share.block_table) * 4 >= 4 + 3 + 1 + 3
    assert engine.schedule(0.0) is None


@pytest.mark.parametrize("position", [3, 5])
def test_drafts_of_another_place_are_dropped(make_request: Make, position: int) -> None:
    engine = scheduler(speculation=by(None, most=3))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    result = drawn({0: 4})
    result.drafts[0] = Drafts(position, (5, 6, 7), (0.9, 0.8, 0.7))
    engine.update(scheduled(engine), result, 0.0)
    assert share_of(scheduled(engine)).num_drafts == 0


def test_drafts_beyond_the_budget_grow_stale(make_request: Make) -> None:
    engine = scheduler(speculation=by(None, most=3), max_num_batched_tokens=4)
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    result = drawn({0: 4})
    result.drafts[0] = Drafts(4, (5, 6, 7), (0.9, 0.8, 0.7))
    engine.update(scheduled(engine), result, 0.0)
    engine.add(make_request("b", [2, 2, 2], max_tokens=1))
    assert [s.num_drafts for s in scheduled_and_taken(engine).sequences] == [0, 0]
    assert share_of(scheduled(engine)).num_drafts == 0


def test_the_device_drafts_no_further_than_an_answer_goes(make_request: Make) -> None:
    """If all drafts are accepted, what is drafted then must still fit, with a token after it."""
    engine = scheduler(speculation=by(None, most=8))
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    first = scheduled(engine)
    assert share_of(first).num_to_draft == 4
    result = drawn({0: 4})
    result.drafts[0] = Drafts(4, (5, 6, 7, 8, 8, 8), (0.9,) * 6)
    engine.update(first, result, 0.0)
    share = share_of(scheduled(engine))
    assert (list(share.drafts), share.num_to_draft) == ([5, 6, 7, 8], 0)


def test_the_device_drafts_in_the_room_there_is(make_request: Make) -> None:
    engine = scheduler(num_blocks=3, speculation=by(None, most=8))
    for name in ("a", "b"):
        engine.add(make_request(name, [1, 2], max_tokens=8))
    assert [s.num_to_draft for s in scheduled(engine).sequences] == [1, 1]


def test_several_answers_draft_each_for_itself(make_request: Make) -> None:
    drafter = Says(5, 6)
    engine = scheduler(speculation=by(drafter))
    engine.add(make_request("a", [1, 2, 3], max_tokens=4, branches=["a1", "a2"]))
    take_in(engine, scheduled(engine), {0: (4, 4, 0)})
    assert [context.seq_id for context in drafter.ended] == [2]
    step = scheduled(engine)
    assert [(s.seq_id, list(s.drafts)) for s in step.sequences] == [(0, [5, 6]), (1, [5, 6])]
    take_in(engine, step, {0: (5, 6, 9), 1: (9,)})
    engine.abort("a1")
    assert [context.seq_id for context in drafter.ended] == [2, 0, 1]
    assert [list(context.token_ids[3:]) for context in drafter.ended] == [[0], [4, 5, 6, 9], [4, 9]]


def test_a_drafter_that_raises_is_done_with_for_that_sequence(
    make_request: Make, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Raises(0, 5, 6)
    engine = scheduler(speculation=by(drafter))
    for name in ("a", "b"):
        engine.add(make_request(name, [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4, 1: 4})
    for _ in range(2):
        step = scheduled(engine)
        assert [s.num_drafts for s in step.sequences] == [0, 2]
        take_in(engine, step, {0: 4, 1: 4})
    assert drafter.asked == [(0, 8), (1, 8), (1, 8)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert engine.stats().speculation.num_drafter_failures == 1
    engine.abort_all()
    engine.check_integrity()
    assert engine.stats().speculation.num_drafter_failures == 2
    assert [context.seq_id for context in drafter.ended] == [0, 1]


def test_a_drafter_that_cannot_end_is_logged_once(
    make_request: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged once but counted each time. One that cannot learn is not asked again."""

    class Clumsy(Says):
        def end(self, context: DraftContext, learns: bool) -> None:
            super().end(context, learns)
            raise RuntimeError("cannot let go")

        def learn(self, num_tokens: int) -> None:
            assert num_tokens > 0
            raise RuntimeError("cannot learn")

    engine = scheduler(speculation=by(Clumsy(5)))
    for name in "abcd":
        engine.add(make_request(name, [1, 2, 3], max_tokens=2))
    advance(engine)
    advance(engine)
    assert not engine.has_unfinished
    assert engine.stats().speculation.num_drafter_failures == 4 + 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_outputs_are_learnt_from_unless_they_failed(make_request: Make) -> None:
    """A cut answer is what the model said; one with nan is not."""
    drafter = Says(5)
    engine = scheduler(speculation=by(drafter))
    for name in "abc":
        engine.add(make_request(name, [1, 2, 3], max_tokens=9))
    advance(engine)
    engine.abort("a")
    engine.update(scheduled(engine), ModelOutput({1: (Draw(0),)}, failed={2: "nan"}), 0.0)
    assert [context.seq_id for context in drafter.ended] == [0, 1, 2]
    assert drafter.learning == [0, 1]


def test_the_length_of_drafts_is_none_while_nothing_decodes(make_request: Make) -> None:
    engine = scheduler(speculation=by(Says(5, 6)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine)
    take_in(engine, scheduled(engine), {0: (5, 6, 4)})
    assert engine.stats().speculation.num_speculative_tokens == 2.0
    engine.abort("a")
    assert engine.stats().speculation.num_speculative_tokens == 0.0
    engine.add(make_request("b", [1, 2, 3], max_tokens=20))
    advance(engine)
    assert engine.stats().num_running == 1
    assert engine.stats().speculation.num_speculative_tokens == 0.0


def run_full(num_drafts: int, lengths: Sequence[int]) -> list[int]:
    """Return the number of blocks that lost their contents after each token, in a pool full of
    contents; no draft is accepted.
    """
    engine = scheduler(num_blocks=40, speculation=by(Says(*[9] * num_drafts), most=24))
    for number in range(10):
        engine.add(AddRequest(str(number), [number + 10] * 16, SamplingParams(max_tokens=1), 0.0))
        advance(engine)
    assert engine.blocks.num_empty == 0
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.add(AddRequest(f"long-{number}", [number + 1] * 3, params, 0.0))
    evicted = []
    while engine.has_unfinished:
        advance(engine)
        evicted.append(engine.stats().num_evictions)
    return evicted


@pytest.mark.parametrize("lengths", [(40,), (3, 17, 30), (6, 6, 6, 6)])
def test_drafts_take_at_most_the_block_that_comes_next_from_the_cache(
    lengths: tuple[int, ...],
) -> None:
    """Runs of 24 need six more blocks; from a cache without empty blocks each sequence gets one."""
    plain = run_full(0, lengths)
    drafting = run_full(24, lengths)
    assert len(plain) == len(drafting)
    extra = [with_drafts - without for with_drafts, without in zip(drafting, plain, strict=True)]
    assert 0 < max(extra) <= len(lengths)
    assert min(extra) >= 0


@pytest.mark.parametrize(
    ("guess", "accepted"),
    [
        ((1000,), []),
        ((5, -1, 6), [5]),
        ((5, 6, True), [5, 6]),
        ((5, "x", 6), [5]),
        ((5, 2.0), [5]),
        (tuple(range(20)), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_drafts_are_cut_at_what_is_no_token(
    make_request: Make, guess: Sequence[object], accepted: list[int]
) -> None:
    engine = scheduler(speculation=by(Says(*guess)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    assert list(share_of(scheduled(engine)).drafts) == accepted
    assert engine.stats().speculation.num_drafter_failures == (len(accepted) < 8)


def test_a_guess_for_another_place_is_a_fault(make_request: Make) -> None:
    engine = scheduler(speculation=by(Says(5, shift=1)))
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    advance(engine, {0: 4})
    for _ in range(3):
        assert advance(engine, {0: 4})[0] == {0: 1}
    assert engine.stats().speculation.num_drafter_failures == 3


def test_figures_are_reported_by_answer_and_in_all(make_request: Make) -> None:
    """Every output has the client's counts, since a stop string may make any of them the last."""
    engine = scheduler(speculation=by(Says(5, 6, 7), most=3))
    engine.add(make_request("a", [1, 2, 3], max_tokens=9))
    engine.add(make_request("b", [1, 2, 3], max_tokens=1))
    outputs = advance(engine, {0: 4, 1: 4})[1]
    assert [output.speculation for output in outputs] == [None, None]
    take_in(engine, scheduled(engine), {0: (5, 6, 7, 9)})
    assert engine.stats().speculation.num_speculative_tokens == 3.0
    (output,) = take_in(engine, scheduled(engine), {0: (5, 9)})
    assert output.speculation == SpeculationFigures(2, 6, 4, [0, 1, 0, 1])
    (output,) = take_in(engine, scheduled(engine), {0: (5, 0)})
    assert output.finish_reason is FinishReason.STOP
    assert output.speculation == SpeculationFigures(3, 7, 5, [0, 2, 0, 1])
    stats = engine.stats()
    assert (
        stats.speculation.num_drafts,
        stats.speculation.num_draft_tokens,
        stats.speculation.num_accepted_tokens,
    ) == (3, 7, 5)
    assert stats.speculation.num_accepted_by_position == (3, 1, 1)
    assert stats.scheduler.generation_tokens == 1 + 1 + 4 + 2 + 2


def test_the_time_of_steps_is_learned_from(make_request: Make) -> None:
    """A step takes from the later of its planning and the end of the step before, to its end."""
    seen: list[tuple[int, float]] = []

    class Listens(Speculation):
        def observe_step(
            self, known: tuple[int, int], num_drafts: int, seconds: float, result: ModelOutput
        ) -> None:
            super().observe_step(known, num_drafts, seconds, result)
            seen.append((sum(known) + num_drafts, seconds))

    config = SpeculativeConfig("ngram", 2, num_speculative_tokens_per_batch_size=((1, 9, 0),))
    speculation = Listens(config, Says(5), False)
    engine = Scheduler(CacheConfig(16, 4), SchedulerConfig(), (0,), [speculation])
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    first, second = engine.schedule(1.0), engine.schedule(2.0)
    assert first is not None
    assert second is not None
    engine.update(first, drawn({0: 4}), 5.0)
    engine.update(second, drawn({0: 4}), 7.0)
    third = engine.schedule(10.0)
    assert third is not None
    engine.update(third, drawn({0: 4}), 11.0)
    assert seen == [(3, 4.0), (1, 2.0), (1, 1.0)]
