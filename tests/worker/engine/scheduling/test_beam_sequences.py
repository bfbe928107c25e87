"""Beams in sequences: forks of block tables, seats, preemption, aborts and failures."""

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker.engine_walk import PIPELINES, PIPES, caches, commands, limits_of_a_step
from tests.support.worker.paged_executor import PagedExecutor, next_token
from tests.support.worker.step_driver import plan, scheduler
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, Command, Pause, RequestOutput, Resume, Sleep, WakeUp
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.beams import BeamRules, Beams, advance
from worker.types import (
    BeamParams,
    Draw,
    FinishReason,
    ModelOutput,
    SampleSpec,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)

END, SIZE = 0, 9
BAD = 5_000  # the seed of a context whose numbers are not numbers


def likeliest(context: Sequence[int], count: int) -> TokenLogprobs:
    scores = {t: zlib.crc32(bytes([*context, t])) / 2**32 for t in range(SIZE)}
    order = sorted(scores, key=lambda t: (-scores[t], t))[:count]
    ids = (order[0], *order)
    return TokenLogprobs(ids, tuple(scores[t] - 1.5 for t in ids), 1)


class BeamExecutor(PagedExecutor):
    @staticmethod
    def _draw(context: list[int], sample: SampleSpec) -> Draw:
        assert sample.position == len(context)
        if sample.params.beam is None:
            return Draw(next_token(context, sample.params.seed))
        found = likeliest(context, sample.params.logprobs or 0)
        return Draw(found.token_ids[0], found)


def answers(request: AddRequest, limit: int) -> list[tuple[tuple[int, ...], int | None]]:
    """Return the answers by the pure search alone: tokens, and the token that ended them."""
    beam, prompt = request.params.beam, request.prompt_token_ids
    assert beam is not None
    most = min(request.params.max_tokens, limit - len(prompt))
    ends = frozenset[int]() if request.params.ignore_eos else frozenset({END})
    rules, beams = BeamRules(beam, len(prompt), most, ends), Beams()
    while not beams.is_over:
        found = [likeliest([*prompt, *b.token_ids], rules.num_candidates) for b in beams.live]
        beams = advance(beams, found, rules)
    return [(beam.token_ids, beam.end_token) for beam in beams.ended]


def searching(name: str, prompt: Sequence[int], num_answers: int = 1, **fields: Any) -> AddRequest:
    ignore_eos = fields.pop("ignore_eos", False)
    params = SamplingParams(
        fields.pop("max_tokens", 6), 0.0, ignore_eos=ignore_eos, beam=BeamParams(**fields)
    )
    names = [f"{name}/{index}" for index in range(1, num_answers)]
    return AddRequest(name, list(prompt), params, 0.0, branch_ids=names)


requests = st.lists(
    st.builds(
        lambda prompt, width, few, stop, penalty, most, ignores: searching(
            "",
            prompt,
            max(1, width - few),
            width=width,
            early_stopping=stop,
            length_penalty=penalty,
            max_tokens=most,
            ignore_eos=ignores,
        ),
        st.builds(
            lambda stem, tail: stem + tail,
            st.sampled_from([[], [1] * 5, [1, 2, 1, 2, 1, 2, 1, 2, 1]]),
            st.lists(st.integers(1, 2), min_size=1, max_size=6),
        ),
        st.integers(1, 4),
        st.integers(0, 3),
        st.sampled_from([None, False, True, "never"]),
        st.sampled_from([0.0, 1.0, -1.0]),
        st.integers(1, 10),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("pipe", PIPES)
@examples(120)
@given(
    cache=caches,
    limits=limits_of_a_step,
    load=requests,
    drawn=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), max_size=3),
    orders=commands,
    aborts=st.dictionaries(st.integers(0, 25), st.integers(0, 9), max_size=2),
)
def test_any_batch_finds_what_each_search_finds_alone(
    pipe: str,
    cache: CacheConfig,
    limits: SchedulerConfig,
    load: list[AddRequest],
    drawn: list[tuple[int, int]],
    orders: list[tuple[int, Command]],
    aborts: dict[int, int],
) -> None:
    engine = Scheduler(cache, limits, (END,))
    executor = BeamExecutor(cache.block_size)
    core = EngineCore(engine, executor, lambda: 0.0, pipeline=PIPELINES[pipe](executor))
    named: dict[str, tuple[AddRequest, int]] = {}
    for number, request in enumerate(load):
        own = [f"s{number}/{index}" for index in range(1 + len(request.branch_ids))]
        asked = AddRequest(
            own[0], request.prompt_token_ids, request.params, 0.0, branch_ids=own[1:]
        )
        named |= {name: (asked, index) for index, name in enumerate(own)}
    for number, (most, _) in enumerate(drawn):
        plain = SamplingParams(most, 0.0, seed=number)
        named[f"d{number}"] = (AddRequest(f"d{number}", [1, 2, 1], plain, 0.0), 0)
    at = {f"d{number}": step for number, (_, step) in enumerate(drawn)}
    outputs = _run(core, engine, named, at, orders, aborts)
    gone = {list(named)[place % len(named)] for place in aborts.values()}
    may_abort = any(isinstance(c, Pause | Sleep) and c.mode == "abort" for _, c in orders)
    for name, (request, index) in named.items():
        if request.params.beam is not None:
            _check(
                request,
                index,
                outputs[name],
                engine.max_model_len,
                limits,
                name in gone or may_abort,
            )


def _run(
    core: EngineCore,
    engine: Scheduler,
    named: dict[str, tuple[AddRequest, int]],
    at: dict[str, int],
    orders: list[tuple[int, Command]],
    aborts: dict[int, int],
) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in named}

    def step() -> None:
        reported = core.step()
        engine.check_integrity()
        core.take_replies()
        for output in [] if reported is None else reported.outputs:
            assert all(one.finish_reason is None for one in outputs[output.request_id])
            outputs[output.request_id].append(output)

    for turn in range(26):
        for name, (request, index) in named.items():
            if index == 0 and at.get(name, 0) == turn:
                core.add(request)
        if turn in aborts:
            core.abort([list(named)[aborts[turn] % len(named)]])
        for _, command in [order for order in orders if order[0] == turn]:
            core.command(command)
        step()
    core.command(WakeUp(0))
    core.command(Resume(0))
    for _ in range(5000):
        if not core.has_work:
            break
        step()
    assert not core.has_work
    assert engine.blocks.usage == 0.0
    return outputs


def _check(
    request: AddRequest,
    index: int,
    outputs: list[RequestOutput],
    limit: int,
    limits: SchedulerConfig,
    may_abort: bool,
) -> None:
    [output] = outputs
    width = request.params.beam.width
    if output.finish_reason is FinishReason.ABORT:
        assert may_abort
    elif len(request.prompt_token_ids) + 1 > limit or width > limits.max_num_seqs:
        assert output.finish_reason is FinishReason.ERROR
    else:
        tokens, end_token = answers(request, limit)[index]
        ends = FinishReason.LENGTH if end_token is None else FinishReason.STOP
        assert (output.token_ids, output.finish_reason) == (list(tokens), ends)
        assert output.stop_token_id == end_token


def found(step: SchedulerOutput, candidates: dict[int, dict[int, float]]) -> ModelOutput:
    draws = {}
    for seq_id, each in candidates.items():
        ids = (next(iter(each)), *each)
        draws[seq_id] = (Draw(ids[0], TokenLogprobs(ids, tuple(each[t] for t in ids), 1)),)
    assert draws.keys() == {s.seq_id for s in step.sequences if s.samples}
    return ModelOutput(draws)


def test_beams_share_blocks_and_copy_the_last_one_to_write() -> None:
    """The prompt runs once and is drawn from once; of three beams two copy its partial block."""
    engine = scheduler()
    engine.add(searching("a", range(1, 7), 2, width=3, early_stopping=False))
    assert engine.num_waiting == 3
    step = engine.schedule(0.0)
    [parent] = step.sequences
    assert [sample.params.logprobs for sample in parent.samples] == [6]
    assert engine.schedule(0.0) is None
    engine.update(step, found(step, {0: {4: -1.0, 5: -2.0, 6: -3.0, 7: -4.0}}), 0.0)
    engine.check_integrity()
    assert (engine.num_running, engine.blocks.num_free) == (3, 62)
    step = engine.schedule(0.0)
    assert plan(step) == {0: 1, 1: 1, 2: 1}
    assert [list(s.token_ids) for s in step.sequences] == [[4], [5], [6]]
    assert len(step.block_copies) == 2
    assert len({source for source, _ in step.block_copies}) == 1
    # One beam is lost and one continues in two: sequence 2 takes over a fork of sequence 1.
    result = {0: {4: -5.0, 5: -5.1}, 1: {4: -0.1, 5: -0.2}, 2: {4: -6.0, 5: -7.0}}
    engine.update(step, found(step, result), 0.0)
    engine.check_integrity()
    step = engine.schedule(0.0)
    tails = {s.seq_id: (s.start, list(s.token_ids)) for s in step.sequences}
    assert tails == {1: (7, [4]), 2: (7, [5]), 0: (7, [4])}
    assert [s.block_table[0] for s in step.sequences].count(step.sequences[0].block_table[0]) == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_beam_that_fails_ends_its_search(failing: int) -> None:
    engine = scheduler()
    engine.add(searching("a", [1, 2], 2, width=2, early_stopping=False))
    engine.add(AddRequest("b", [3], SamplingParams(4), 0.0))
    step = engine.schedule(0.0)
    result = found(step, {0: {4: -1.0, 5: -2.0}, 2: {9: -1.0}})
    engine.update(step, result, 0.0)
    step = engine.schedule(0.0)
    bad = ModelOutput({2: (Draw(9),)}, failed={failing: "not a number"})
    good = found(step, {0: {4: -1.0}, 1: {4: -1.0}, 2: {9: -1.0}}).sampled
    bad.sampled.update({n: draw for n, draw in good.items() if n == 1 - failing})
    outputs = engine.update(step, bad, 0.0)
    engine.check_integrity()
    errors = {o.request_id: o.error for o in outputs if o.finish_reason is FinishReason.ERROR}
    assert errors == {"a": "not a number", "a/1": "not a number"}
    assert engine.num_running == 1


def test_more_beams_than_seats_are_refused() -> None:
    engine = scheduler(max_num_seqs=3)
    [output] = engine.add(searching("a", [1], width=4))
    assert "asks for 4 beams; at most 3" in (output.error or "")
    assert not engine.has_unfinished


def test_an_answer_given_up_midway_has_what_it_is_so_far() -> None:
    engine = scheduler()
    engine.add(searching("a", [1, 2], 2, width=2, early_stopping=False))
    step = engine.schedule(0.0)
    engine.update(step, found(step, {0: {4: -1.0, 5: -2.0}}), 0.0)
    first = engine.abort("a")
    assert (first.token_ids, first.finish_reason) == ([4], FinishReason.ABORT)
    assert engine.abort("a") is None
    engine.check_integrity()
    assert engine.num_running == 2
    last = engine.abort("a/1")
    assert last.token_ids == [5]
    assert (engine.num_running, engine.blocks.num_free) == (0, 64)


def test_a_search_that_lacks_memory_ends_once() -> None:
    """A step of several beams that is taken back alone, again and again, fails each answer once."""
    engine = scheduler(max_num_seqs=2)
    engine.add(searching("a", [1, 2], 2, width=2, early_stopping=False))
    step = engine.schedule(0.0)
    engine.update(step, found(step, {0: {4: -1.0, 5: -2.0}}), 0.0)
    outputs: list[RequestOutput] = []
    for _ in range(9):
        if engine.schedule(0.0) is None:
            break
        outputs += engine.take_back()
        engine.check_integrity()
    assert [o.request_id for o in outputs] == ["a", "a/1"]
    assert not engine.has_unfinished
