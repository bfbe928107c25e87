"""Drafts, of any source and at any time, change no answer."""

import copy
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.paged_executor import VOCABULARY, PagedExecutor, next_token
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine import policies
from worker.engine.drafters.interface import DraftContext
from worker.engine.features.interface import Feature
from worker.engine.features.speculation import Speculation
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.sequence import Sequence as Answer
from worker.types import Drafts, RepetitionDetection, SampleSpec, SamplingParams, SchedulerOutput

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
    ) -> None:
        self.on_device = config.method == "eagle"
        self.drafter = None if self.on_device else ScriptedDrafter(manner)
        speculation = Speculation(config, self.drafter, self.on_device, VOCABULARY)
        self.scheduler = kind(scene.cache, scene.limits, (walks.END,), [speculation])
        self.executor = PagedExecutor(scene.cache.block_size)
        self.executor.truth = self._truth
        self.executor.make_drafts = self._make_drafts
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
