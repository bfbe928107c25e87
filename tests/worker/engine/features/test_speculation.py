"""Drafts in a step: sources, verification, room, failures, counts, and unchanged answers."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.support.worker.guesses import Raises, Says, asked, by, scheduled, share_of, take_in
from tests.support.worker.step_driver import advance, drawn, make_request, scheduler
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.drafters.interface import DraftContext
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, SpeculationFigures
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import IntegrityError
from worker.types import (
    Drafts,
    Draw,
    FinishReason,
    ModelOutput,
    SamplingParams,
    SchedulerOutput,
)


def test_drafts_follow_the_last_known_token() -> None:
    engine = asked(scheduler(speculation=by(Says(5, 6, 7))))
    first = scheduled(engine)
    assert (share_of(first).num_drafts, first.num_tokens) == (0, 3)
    take_in(engine, first, {0: 4})
    second = scheduled(engine)
    share = share_of(second)
    assert (list(share.token_ids), share.start, list(share.drafts)) == ([4, 5, 6, 7], 3, [5, 6, 7])
    assert [sample.position for sample in share.samples] == [4]
    assert second.num_tokens == 4


def test_the_room_for_what_fell_is_given_back() -> None:
    engine = asked(scheduler(speculation=by(Says(*range(5, 13)))), max_tokens=40)
    advance(engine, {0: 4})
    step = scheduled(engine)
    assert len(share_of(step).block_table) == 3
    take_in(engine, step, {0: 9})
    assert engine.blocks.num_free == 63
    step = scheduled(engine)
    take_in(engine, step, {0: tuple(range(5, 13))})
    assert engine.blocks.num_free == 61


def test_drafts_get_what_is_left_of_the_budget() -> None:
    engine = asked(scheduler(speculation=by(Says(5, 6, 7)), max_num_batched_tokens=8), "a", [1, 2])
    engine.add(make_request("b", [1, 3], max_tokens=20))
    advance(engine, {0: 4, 1: 4})
    engine.add(make_request("c", [2, 2], max_tokens=20))
    step = scheduled(engine)
    assert [(s.seq_id, len(s.token_ids), s.num_drafts) for s in step.sequences] == [
        (0, 4, 3),
        (1, 2, 1),
        (2, 2, 0),
    ]


def test_drafts_leave_a_block_for_every_sequence() -> None:
    drafter = Says(5, 6, 7, 8)
    engine = asked(scheduler(num_blocks=4, speculation=by(drafter)), prompt=[1, 2], max_tokens=14)
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
def test_nothing_is_verified_beyond_the_last_token(max_tokens: int) -> None:
    engine = asked(scheduler(speculation=by(Says(5, 6, 7))), max_tokens=max_tokens)
    outputs = advance(engine, {0: 4})[1]
    if max_tokens > 1:
        step = scheduled(engine)
        num_drafts = min(3, max_tokens - 2)
        assert share_of(step).num_drafts == num_drafts
        outputs = take_in(engine, step, {0: (5, 6, 7, 9)[: num_drafts + 1]})
    expected = FinishReason.LENGTH if max_tokens <= 5 else None
    assert outputs[0].finish_reason is expected


def test_draws_that_are_no_run_are_refused() -> None:
    """An executor that accepts what it did not draw would leave the KV of other tokens."""
    engine = asked(scheduler(speculation=by(Says(5, 6))))
    advance(engine, {0: 4})
    step = scheduled(engine)
    with pytest.raises(IntegrityError, match="cannot have been accepted"):
        engine.update(step, drawn({0: (8, 6, 9)}), 0.0)


def with_drafts(*token_ids: int, position: int = 4) -> ModelOutput:
    result = drawn({0: 4})
    result.drafts[0] = Drafts(position, token_ids, (0.9,) * len(token_ids))
    return result


def scheduled_and_taken(engine: Scheduler) -> SchedulerOutput:
    step = scheduled(engine)
    take_in(engine, step, {share.seq_id: 4 for share in step.sequences})
    return step


def test_nothing_is_scheduled_ahead_of_drafts() -> None:
    engine = asked(scheduler(speculation=by(Says(5, 6))))
    first = scheduled(engine)
    assert engine.schedule(0.0) is None
    take_in(engine, first, {0: 4})
    second = scheduled(engine)
    assert engine.schedule(0.0) is None
    take_in(engine, second, {0: (5, 9)})


def test_steps_overlap_where_drafts_do_not_pay() -> None:
    drafter = Says(5, 6)
    engine = asked(scheduler(speculation=by(drafter, by_batch=((1, 1, 2), (2, 9, 0)))), "ab")
    first = scheduled(engine)
    second = scheduled(engine)
    assert [s.takes_pending for s in second.sequences] == [True, True]
    take_in(engine, first, {0: 4, 1: 0})
    assert drafter.asked == []
    assert engine.schedule(0.0) is None  # one is left, and may have drafts after this step
    take_in(engine, second, {0: 5})
    assert share_of(scheduled(engine)).num_drafts == 2


def test_a_prompt_in_chunks_overlaps_until_its_last_one() -> None:
    """No sequence decodes before that, so there is nothing to wait for."""
    engine = scheduler(speculation=by(Says(5, 6)), max_num_batched_tokens=4)
    asked(engine, prompt=range(1, 12))
    first = scheduled(engine)
    second = scheduled(engine)
    take_in(engine, first, {})
    third = scheduled(engine)
    take_in(engine, second, {})
    assert engine.schedule(0.0) is None
    take_in(engine, third, {0: 4})
    assert share_of(scheduled(engine)).num_drafts == 2


def test_the_device_drafts_from_the_first_token_on() -> None:
    engine = asked(scheduler(speculation=by(None, most=3)))
    first = scheduled(engine)
    assert (share_of(first).num_to_draft, len(share_of(first).block_table)) == (3, 2)
    engine.update(first, with_drafts(5, 6, 7), 0.0)
    engine.check_integrity()
    assert engine.blocks.num_free == 63
    second = scheduled(engine)
    share = share_of(second)
    assert (list(share.drafts), share.num_to_draft) == ([5, 6, 7], 3)
    assert len(share.block_table) * 4 >= 4 + 3 + 1 + 3
    assert engine.schedule(0.0) is None


@pytest.mark.parametrize("position", [3, 5])
def test_drafts_of_another_place_are_dropped(position: int) -> None:
    engine = asked(scheduler(speculation=by(None, most=3)))
    engine.update(scheduled(engine), with_drafts(5, 6, 7, position=position), 0.0)
    assert share_of(scheduled(engine)).num_drafts == 0


def test_drafts_beyond_the_budget_grow_stale() -> None:
    engine = asked(scheduler(speculation=by(None, most=3), max_num_batched_tokens=4))
    engine.update(scheduled(engine), with_drafts(5, 6, 7), 0.0)
    engine.add(make_request("b", [2, 2, 2], max_tokens=1))
    assert [s.num_drafts for s in scheduled_and_taken(engine).sequences] == [0, 0]
    assert share_of(scheduled(engine)).num_drafts == 0


def test_the_device_drafts_no_further_than_an_answer_goes() -> None:
    """If all drafts are accepted, what is drafted then must still fit, with a token after it."""
    engine = asked(scheduler(speculation=by(None, most=8)), max_tokens=6)
    first = scheduled(engine)
    assert share_of(first).num_to_draft == 4
    engine.update(first, with_drafts(5, 6, 7, 8, 8, 8), 0.0)
    share = share_of(scheduled(engine))
    assert (list(share.drafts), share.num_to_draft) == ([5, 6, 7, 8], 0)


def test_the_device_drafts_in_the_room_there_is() -> None:
    engine = asked(scheduler(3, speculation=by(None, most=8)), "ab", [1, 2], max_tokens=8)
    assert [s.num_to_draft for s in scheduled(engine).sequences] == [1, 1]


def test_several_answers_draft_each_for_itself() -> None:
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


def test_a_drafter_that_raises_is_done_with_the_sequence(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Raises(0, 5, 6)
    engine = asked(scheduler(speculation=by(drafter)), "ab")
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


def test_a_drafter_that_cannot_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged once but counted each time. One that cannot learn is not asked again."""

    class Clumsy(Says):
        def end(self, context: DraftContext, learns: bool) -> None:
            super().end(context, learns)
            raise RuntimeError("cannot let go")

        def learn(self, num_tokens: int) -> None:
            assert num_tokens > 0
            raise RuntimeError("cannot learn")

    engine = asked(scheduler(speculation=by(Clumsy(5))), "abcd", max_tokens=2)
    advance(engine)
    advance(engine)
    assert not engine.has_unfinished
    assert engine.stats().speculation.num_drafter_failures == 4 + 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_outputs_are_learnt_from_unless_they_failed() -> None:
    """A cut answer is what the model said; one with nan is not."""
    drafter = Says(5)
    engine = asked(scheduler(speculation=by(drafter)), "abc", max_tokens=9)
    advance(engine)
    engine.abort("a")
    engine.update(scheduled(engine), ModelOutput({1: (Draw(0),)}, failed={2: "nan"}), 0.0)
    assert [context.seq_id for context in drafter.ended] == [0, 1, 2]
    assert drafter.learning == [0, 1]


def test_the_length_of_drafts_is_none_while_nothing_decodes() -> None:
    engine = asked(scheduler(speculation=by(Says(5, 6))))
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
def test_drafts_take_at_most_the_next_block_from_the_cache(lengths: tuple[int, ...]) -> None:
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
def test_drafts_are_cut_at_what_is_no_token(guess: Sequence[object], accepted: list[int]) -> None:
    engine = asked(scheduler(speculation=by(Says(*guess))))
    advance(engine, {0: 4})
    assert list(share_of(scheduled(engine)).drafts) == accepted
    assert engine.stats().speculation.num_drafter_failures == (len(accepted) < 8)


def test_a_guess_for_another_place_is_a_fault() -> None:
    engine = asked(scheduler(speculation=by(Says(5, shift=1))))
    advance(engine, {0: 4})
    for _ in range(3):
        assert advance(engine, {0: 4})[0] == {0: 1}
    assert engine.stats().speculation.num_drafter_failures == 3


def test_figures_are_reported_by_answer_and_in_all() -> None:
    """Every output has the client's counts, since a stop string may make any of them the last."""
    engine = asked(scheduler(speculation=by(Says(5, 6, 7), most=3)), max_tokens=9)
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


def test_the_time_of_steps_is_learned_from() -> None:
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
    engine.update(first, drawn({0: 4}), 5.0)
    engine.update(second, drawn({0: 4}), 7.0)
    third = engine.schedule(10.0)
    engine.update(third, drawn({0: 4}), 11.0)
    assert seen == [(3, 4.0), (1, 2.0), (1, 1.0)]


STEP, TOKEN, ROUND, ROW = 0.1, 0.001, 0.01, 0.0004  # seconds


@dataclass
class Device:
    """Runs steps in virtual time: drafts are accepted by chance `acceptance`."""

    acceptance: float
    seconds: float = 0.0
    drafted: int = 0
    verified: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    read: dict[int, int] = field(default_factory=dict)

    def run(self, engine: Scheduler) -> None:
        while (step := engine.schedule(self.seconds)) is not None:
            result = self.execute(step)
            spent = STEP + TOKEN * step.num_tokens
            self.seconds += spent + result.drafting_seconds + result.catch_up_seconds
            engine.update(step, result, self.seconds)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        rows_left = max(64, 2 * step.num_tokens)
        sampled: dict[int, tuple[Draw, ...]] = {}
        drafts: dict[int, Drafts] = {}
        rows = 0
        for share in step.sequences:
            self.verified += share.num_drafts
            if not share.samples:
                continue
            stood = 0
            while stood < share.num_drafts and self.rng.random() < self.acceptance:
                stood += 1
            sampled[share.seq_id] = tuple(Draw(t) for t in [*share.drafts[:stood], 7])
            if share.num_to_draft:
                end = share.start + len(share.token_ids) - share.num_drafts + stood + 1
                behind = end - self.read.get(share.seq_id, 0) - share.num_to_draft - 2
                now = min(max(0, behind), rows_left - rows)
                rows += now
                if now < behind:
                    self.read[share.seq_id] = self.read.get(share.seq_id, 0) + now
                    continue
                self.read[share.seq_id] = end
                count = share.num_to_draft
                drafts[share.seq_id] = Drafts(end, (5,) * count, (0.5,) * count)
        rounds = [len(one.token_ids) for one in drafts.values()]
        self.drafted += sum(rounds)
        seconds = ROUND * max(rounds, default=0)
        return ModelOutput(
            sampled, drafts=drafts, drafting_seconds=seconds, catch_up_seconds=ROW * rows
        )


def engine_of(num: int, is_speculating: bool, shape: tuple[int, int], **limits: int) -> Scheduler:
    """Return the steps of `count` requests of `shape` (tokens of the prompt, of the answer)."""
    config = SpeculativeConfig("draft_model", 4)
    speculation = Speculation(config, None, True, 50_000) if is_speculating else None
    cache = CacheConfig(4000, 16, enable_prefix_caching=False)
    engine = Scheduler(cache, SchedulerConfig(**limits), (0,), [speculation])
    num_prompt, num_outputs = shape
    params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    for number in range(num):
        engine.add(AddRequest(str(number), [1 + number] * num_prompt, params, 0.0))
    return engine


@pytest.mark.parametrize(
    ("acceptance", "num_prompt", "least"), [(0.7, 20, 1.5), (0.7, 1500, 1.3), (0.0, 1500, 0.97)]
)
def test_a_prompt_that_is_read_first_does_not_hide_what_drafts_win(
    acceptance: float, num_prompt: int, least: float
) -> None:
    seconds = []
    for is_speculating in (False, True):
        device = Device(acceptance)
        device.run(engine_of(10, is_speculating, (num_prompt, 100), max_num_seqs=1))
        seconds.append(device.seconds)
    assert seconds[0] / seconds[1] >= least


@pytest.mark.parametrize("budget", [8, 9, 11])
def test_no_drafts_are_made_that_the_next_step_cannot_verify(budget: int) -> None:
    device = Device(1.0)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget}
    device.run(engine_of(8, True, (3, 300), **limits))
    assert device.drafted - device.verified <= max(8, 0.05 * device.drafted)
    assert (device.drafted > 0) == (budget > 8)
