"""Scheduler rules one at a time: budget, chunks, admission, preemption, rank, stop, refusal."""

from collections.abc import Callable

import pytest

from tests.support.worker.step_driver import advance, drawn, result_of, scheduler
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError, IntegrityError
from worker.types import FinishReason, ModelOutput, TokenLogprobs

Make = Callable[..., AddRequest]


def test_a_long_prompt_runs_in_chunks_beside_decodes(make_request: Make) -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(make_request("a", range(1, 5)))
    assert advance(engine)[0] == {0: 4}
    engine.add(make_request("b", range(10, 30)))
    outputs = []
    for expected in ({0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}):
        planned, outputs = advance(engine)
        assert planned == expected
    assert [o.request_id for o in outputs] == ["a", "b"]


def test_watermark_keeps_blocks_free_while_others_run(make_request: Make) -> None:
    """A sequence that runs alone may take everything."""
    engine = Scheduler(CacheConfig(8, 4, watermark=0.5), SchedulerConfig())
    engine.add(make_request("a", [1] * 12))
    engine.add(make_request("b", [2] * 8))
    assert advance(engine)[0] == {0: 12}
    engine.abort("a")
    assert advance(engine)[0] == {1: 8}


def test_a_preempted_sequence_is_ahead_of_later_arrivals(make_request: Make) -> None:
    engine = scheduler(num_blocks=4, block_size=1)
    engine.add(make_request("a", [1], max_tokens=3))
    engine.add(make_request("b", [2], max_tokens=3))
    advance(engine)
    advance(engine)
    engine.add(make_request("c", [3], max_tokens=1))
    assert advance(engine)[0] == {0: 1}  # b lost its blocks, a ends
    assert list(advance(engine)[0]) == [1, 2]


def test_lower_priority_values_go_first(make_request: Make) -> None:
    engine = scheduler(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -1)):
        engine.add(make_request(name, [1], priority=priority, max_tokens=1))
    order = [advance(engine)[1][0].request_id for _ in range(4)]
    assert order == ["d", "b", "c", "a"]


def test_prefix_hits_skip_work_and_are_counted_once(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 13), max_tokens=2))
    advance(engine, now=1.0)
    engine.add(make_request("b", range(1, 13), max_tokens=2))
    planned, outputs = advance(engine, now=2.0)
    assert planned == {0: 1, 1: 4}
    last = outputs[-1]
    assert (last.num_cached_tokens, last.scheduled_seconds) == (8, 2.0)
    stats = engine.stats()
    assert (stats.scheduler.prefix_cache_queries, stats.scheduler.prefix_cache_hits) == (24, 8)
    assert (stats.scheduler.prompt_tokens, stats.scheduler.generation_tokens) == (24, 3)


def test_outputs_become_part_of_the_prefix_cache(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    for _ in range(6):
        advance(engine)
    engine.add(make_request("b", [1, 2, 3, 1, 1, 1, 1, 1, 1, 7], max_tokens=1))
    assert advance(engine)[0] == {1: 2}


def test_nothing_can_end_a_sequence_before_its_minimum(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2], max_tokens=9, min_tokens=2, stop_token_ids=(5,)))
    banned = []
    for token in (3, 4, 5):
        step = engine.schedule(0.0)
        assert step is not None
        (planned,) = step.sequences
        (sample,) = planned.samples
        banned.append(set(sample.banned_ids))
        engine.update(step, drawn({planned.seq_id: token}), 0.0)
    assert banned == [{0, 5}, {0, 5}, set()]
    assert not engine.has_unfinished


def test_a_sequence_ends_where_the_pool_or_the_model_does(make_request: Make) -> None:
    engine = scheduler(num_blocks=2, block_size=4, max_model_len=100)
    assert engine.max_model_len == 8
    engine.add(make_request("a", [1] * 6, max_tokens=50))
    assert advance(engine)[1][0].finish_reason is None
    assert advance(engine)[1][0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([1] * 8, "8 tokens")])
def test_prompts_that_can_never_run_are_refused(
    make_request: Make, prompt: list[int], words: str
) -> None:
    engine = scheduler(num_blocks=2, block_size=4)
    (output,) = engine.add(make_request("a", prompt))
    assert output.finish_reason is FinishReason.ERROR
    assert words in (output.error or "")
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused_without_harm_to_its_owner(make_request: Make) -> None:
    engine = scheduler()
    assert not engine.add(make_request("a", [1], max_tokens=1))
    (second,) = engine.add(make_request("a", [2]))
    assert second.finish_reason is FinishReason.ERROR
    assert advance(engine)[1][0].finish_reason is FinishReason.LENGTH
    assert not engine.add(make_request("a", [2]))


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"policy": "random"}, "--scheduling-policy"),
        ({"waiting_order": "random"}, "--waiting-order"),
        ({"victim": "random"}, "--preemption-victim"),
    ],
)
def test_unknown_policies_are_refused_by_name(limits: dict[str, str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        scheduler(**limits)


def test_results_come_in_the_order_of_steps(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", [1]))
    first = engine.schedule(0.0)
    second = engine.schedule(0.0)
    assert first is not None
    assert second is not None
    with pytest.raises(IntegrityError, match="oldest"):
        engine.update(second, drawn({0: 1}), 0.0)


def test_fcfs_ignores_priorities(make_request: Make) -> None:
    engine = scheduler(max_num_seqs=1, policy="fcfs")
    for name, priority in (("a", 5), ("b", 0), ("c", -1)):
        engine.add(make_request(name, [1], priority=priority, max_tokens=1))
    assert [advance(engine)[1][0].request_id for _ in range(3)] == ["a", "b", "c"]


def test_without_chunks_a_prompt_runs_whole_or_not_at_all(make_request: Make) -> None:
    engine = scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    (refused,) = engine.add(make_request("large", [9] * 8))
    assert "8 tokens" in (refused.error or "")
    engine.add(make_request("a", [1] * 5))
    engine.add(make_request("b", [2] * 6))
    assert advance(engine)[0] == {0: 5}
    assert advance(engine)[0] == {0: 1, 1: 6}


def test_a_failed_draw_ends_the_answer_and_forgets_its_blocks(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", range(1, 10)))
    step = engine.schedule(0.0)
    assert step is not None
    (output,) = engine.update(step, ModelOutput({}, failed={0: "not a number"}), 0.0)
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "not a number")
    assert engine.stats().scheduler.num_corrupted_requests == 1
    engine.add(make_request("b", range(1, 10)))
    assert advance(engine)[0] == {1: 9}


def test_prompt_logprobs_are_asked_for_by_the_chunk_and_reported_once(make_request: Make) -> None:
    engine = scheduler(max_num_batched_tokens=4)
    for name in ("a", "b"):
        engine.add(make_request(name, range(1, 7), max_tokens=1, prompt_logprobs=2))
        asked = []
        while engine.has_unfinished:
            step = engine.schedule(0.0)
            assert step is not None
            (chunk,) = step.sequences
            asked.append((chunk.start, list(chunk.prompt_targets), chunk.num_prompt_logprobs))
            rows = tuple(TokenLogprobs((t,), (-1.0,), 1) for t in chunk.prompt_targets)
            result = result_of(step, {})
            result.prompt_logprobs[chunk.seq_id] = rows
            (output,) = engine.update(step, result, 0.0)
            assert [row.token_ids[0] for row in output.prompt_logprobs] == asked[-1][1]
        assert asked == [(0, [2, 3, 4, 5], 2), (4, [6], 2)]
    assert engine.stats().scheduler.prefix_cache_queries == 0
    engine.add(make_request("c", range(1, 7), max_tokens=1))
    assert advance(engine)[0] == {2: 2}


def test_the_next_turn_finds_the_partly_filled_block_too(make_request: Make) -> None:
    engine = Scheduler(CacheConfig(16, 4), SchedulerConfig())
    engine.add(make_request("a", range(1, 7), max_tokens=1))
    advance(engine)
    engine.add(make_request("b", [*range(1, 7), 1, 9], max_tokens=1))
    step = engine.schedule(0.0)
    assert step is not None
    assert (step.sequences[0].start, len(step.block_copies)) == (6, 1)


def test_a_draw_that_looks_back_gets_every_token_before_it(make_request: Make) -> None:
    engine = scheduler()
    engine.add(make_request("a", [1, 2], presence_penalty=0.5))
    engine.add(make_request("b", [3]))
    advance(engine)
    step = engine.schedule(0.0)
    assert step is not None
    seen = [(list(s.samples[0].history), s.samples[0].num_prompt) for s in step.sequences]
    assert seen == [([1, 2, 1], 2), ([], 1)]
