"""Drafts: sources, verification, room, failures and counts; they change no answer."""

import copy
import itertools
import logging
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.guesses import Raises, Says, asked, by, scheduled, share_of, take_in
from tests.support.worker.paged_executor import VOCABULARY, PagedExecutor, next_token
from tests.support.worker.step_driver import advance, drawn, make_request, scheduler
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine import policies
from worker.engine.drafters.interface import DraftContext
from worker.engine.features.interface import Feature
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, SpeculationFigures
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.sequence import Sequence as Answer
from worker.errors import IntegrityError
from worker.types import (
    Drafts,
    Draw,
    FinishReason,
    ModelOutput,
    RepetitionDetection,
    SampleSpec,
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


MANNERS = ("right", "right", "mixed", "mixed", "wrong", "raising", "garbage", "silent")


@dataclass(frozen=True)
class Manner:
    """The quality of a drafter: a pure function of the context and of the true continuation."""

    name: str
    salt: int

    def guess(self, context: Sequence[int], sample: SampleSpec, most: int) -> list[Any]:
        number = zlib.crc32(bytes(context), self.salt)
        if self.name == "silent" or (self.name == "raising" and number % 5 == 0):
            return []
        tokens: list[Any] = []
        for _ in range(most if self.name == "right" else 1 + number % (most + 2)):
            drawn = next_token(
                [*context, *tokens], sample.params.seed, sample.after(tokens).banned_ids
            )
            is_wrong = self.name == "wrong" or (self.name != "right" and number >> 4 & 3 == 0)
            tokens.append((drawn + 1) % VOCABULARY if is_wrong else drawn)
            number = zlib.crc32(bytes(tokens), number)
        if self.name == "garbage":
            tokens.insert(number % 3, (VOCABULARY, -1, 2.5, True, "x")[number % 5])
        return tokens


class ScriptedDrafter:
    """Implements `Drafter`; `answer_of` gives the true continuation."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self.answer_of: Callable[[int], Answer] | None = None
        self.ended: list[tuple[int, tuple[int, ...]]] = []  # sequence, its outputs

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        assert num_tokens >= 1
        tokens, position = list(context.token_ids), len(context.token_ids)
        number = zlib.crc32(bytes(tokens), self.manner.salt)
        if self.manner.name == "raising" and number % 5 == 0:
            raise RuntimeError("the drafter is at its wits' end")
        if self.manner.name == "garbage" and number % 7 == 0:
            return Drafts(position - 1, (1,), (0.5,))
        answer = self.answer_of(context.seq_id)
        assert (answer.token_ids, answer.num_prompt) == (tokens, context.num_prompt)
        assert context.group == (answer.request.tenant, answer.request.cache_salt or "")
        sample = answer.sample_specs(position)[0]
        guess = tuple(self.manner.guess(tokens, sample, num_tokens))
        return Drafts(position, guess, (0.5,) * len(guess)) if guess else None

    def end(self, context: DraftContext, learns: bool) -> None:
        self.ended.append((context.seq_id, tuple(context.token_ids[context.num_prompt :])))
        if self.manner.name == "raising" and context.seq_id % 2:
            raise RuntimeError("the drafter cannot let go")

    def learn(self, num_tokens: int) -> None:
        if self.manner.name == "raising":
            raise RuntimeError("the drafter learns nothing")


@st.composite
def speculative(draw: st.DrawFn) -> SpeculativeConfig:
    return SpeculativeConfig(
        draw(st.sampled_from(["ngram", "eagle"])),
        draw(st.integers(1, 6)),
        enable_adaptive_verification=draw(st.sampled_from([False, False, True])),
        num_speculative_tokens_per_batch_size=draw(
            st.sampled_from([(), (), ((1, 2, 4), (3, 3, 0), (4, 9, 1))])
        ),
    )


# Answers long enough for runs of drafts, and limits that let most of them through.
long_answers = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 40),
    seed=st.sampled_from([0, 1, 2, 3, walks.CORRUPT + 9]),
    min_tokens=st.sampled_from([0, 4, 9]),
    ignore_eos=st.sampled_from([True, True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (), (6,)]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
    repetition_detection=st.sampled_from([None, None, RepetitionDetection(3, 1, 3)]),
)
loads = st.lists(
    walks.arrivals(long_answers), min_size=2, max_size=7, unique_by=lambda a: a.request.request_id
)
caches = st.builds(
    CacheConfig,
    num_blocks=st.integers(8, 40),
    block_size=st.sampled_from([2, 4, 8]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    enable_partial_hits=st.booleans(),
)
limits_of_a_step = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(4, 48),
    max_num_seqs=st.integers(2, 6),
    max_model_len=st.integers(32, 96),
    long_prefill_token_threshold=st.sampled_from([0, 0, 5]),
    enable_chunked_prefill=st.sampled_from([True, True, True, False]),
    waiting_order=st.sampled_from(policies.WAITING_ORDERS),
    in_batch_prefix_tokens=st.sampled_from([None, 4]),
    reserve_full_prompt=st.sampled_from([True, True, False]),
)
scenes = st.builds(walks.Scene, caches, limits_of_a_step, loads, walks.commands)


class Bench:
    def __init__(
        self,
        scene: walks.Scene,
        config: SpeculativeConfig,
        manner: Manner,
        kind: type[Scheduler] = Scheduler,
        follows: bool = False,
    ) -> None:
        """With `follows` the device makes no more drafts than it is asked for."""
        self.on_device = config.method == "eagle"
        self.drafter = None if self.on_device else ScriptedDrafter(manner)
        self._follows = follows
        speculation = Speculation(config, self.drafter, self.on_device, VOCABULARY)
        self.scheduler = kind(scene.cache, scene.limits, (walks.END,), [speculation])
        self.executor = PagedExecutor(scene.cache.block_size)
        self.executor.truth = self._truth
        self.executor.make_drafts = self._make_drafts
        self.executor.may_be_followed = follows
        self._manner = manner
        if self.drafter is not None:
            self.drafter.answer_of = self._answer

    def _answer(self, seq_id: int) -> Answer:
        return next(answer for answer in self.scheduler._live if answer.seq_id == seq_id)

    def _truth(self, seq_id: int) -> Sequence[int]:
        live = (answer for answer in self.scheduler._live if answer.seq_id == seq_id)
        return next((answer.token_ids for answer in live), [])

    def _make_drafts(
        self, context: list[int], sample: SampleSpec, most: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        guess = tuple(self._manner.guess(context, sample, most))
        if self._follows:
            guess = guess[:most]
        return guess, (0.5,) * len(guess)


manners = st.builds(Manner, st.sampled_from(MANNERS), st.integers(0, 99))


@pytest.mark.parametrize("pipe", walks.PIPES)
@examples(150)
@given(scene=scenes, config=speculative(), manner=manners, seconds=st.sampled_from([0.0, 0.01]))
def test_drafts_change_no_answer(
    pipe: str, scene: walks.Scene, config: SpeculativeConfig, manner: Manner, seconds: float
) -> None:
    bench = Bench(scene, config, manner)
    ticks = itertools.count()
    walk = scene.run(bench.scheduler, bench.executor, pipe, lambda: next(ticks) * seconds)
    stats = bench.scheduler.stats()
    assert stats.speculation.num_accepted_tokens == sum(stats.speculation.num_accepted_by_position)
    assert stats.speculation.num_accepted_tokens <= stats.speculation.num_draft_tokens
    if manner.name in ("right", "wrong", "mixed"):
        assert stats.speculation.num_drafter_failures == 0
    reported = [r.endings[0].speculation for r in walk.received.values() if r.endings]
    assert (stats.speculation.num_drafts, stats.speculation.num_draft_tokens) == (
        sum(figures.num_steps for figures in reported if figures),
        sum(figures.num_draft_tokens for figures in reported if figures),
    )
    for sequence in (s for step in bench.executor.steps for s in step.sequences):
        assert not (sequence.takes_pending and (sequence.num_drafts or sequence.num_to_draft))
    if bench.drafter is not None:
        ended = bench.drafter.ended
        assert max(Counter(seq_id for seq_id, _ in ended).values(), default=1) == 1
        outputs = Counter(output for _, output in ended if output)
        assert outputs == Counter(tuple(r.tokens) for r in walk.received.values() if r.tokens)


class Compared(Scheduler):
    """A scheduler that plans every step a second time, as it would be without drafts."""

    def schedule(self, now: float) -> SchedulerOutput | None:
        if self._in_flight:
            return super().schedule(now)
        twin = copy.deepcopy(self, {id(feature): Feature() for feature in self.features})
        step, plain = super().schedule(now), Scheduler.schedule(twin, now)
        assert (step is None) == (plain is None)
        assert self.stats().scheduler.num_preemptions == twin.stats().scheduler.num_preemptions
        assert (self.num_running, self.num_waiting) == (twin.num_running, twin.num_waiting)
        if step is not None and plain is not None:
            assert step.block_copies == plain.block_copies
            for share, alone in zip(step.sequences, plain.sequences, strict=True):
                num_known = len(share.token_ids) - share.num_drafts
                table = tuple(share.block_table)[: len(alone.block_table)]
                assert (share.seq_id, share.start, share.samples, table) == (
                    (alone.seq_id, alone.start, alone.samples, alone.block_table)
                )
                assert list(share.token_ids[:num_known]) == list(alone.token_ids)
        return step


@examples(60)
@given(scene=scenes, config=speculative(), salt=st.integers(0, 99))
def test_drafts_displace_nothing(scene: walks.Scene, config: SpeculativeConfig, salt: int) -> None:
    bench = Bench(scene, config, Manner("mixed", salt), Compared)
    scene.run(bench.scheduler, bench.executor, "eager")
