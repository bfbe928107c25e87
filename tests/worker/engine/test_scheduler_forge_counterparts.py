"""The scheduler and engine tests of forge-infer, by their names and with their numbers.

There a sequence is given the slot of its next token in the step that runs it; here when that token
is run, one step later. Where a row counts blocks, the number is reached one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.worker.step_driver import advance, plan, scheduler
from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SimConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.policies import VICTIM_POLICIES, VictimCandidate
from worker.engine.scheduler import Scheduler
from worker.executor.sim.runner import build_sim_executor
from worker.tokenizer.sim import WORDS, SimTokenizer
from worker.types import FinishReason, SamplingParams

Make = Callable[..., AddRequest]


def run_to_completion(
    executor: Any, requests: Sequence[AddRequest], num_blocks: int, block_size: int, batch: int
) -> dict[str, list[int]]:
    limits = SchedulerConfig(max_num_seqs=batch, victim="fewest-outputs")
    core = EngineCore(Scheduler(CacheConfig(num_blocks, block_size), limits), executor, lambda: 0.0)
    for request in requests:
        core.add(request)
    answers: dict[str, list[int]] = {}
    for _ in range(10_000):
        if not core.has_work:
            return answers
        told = core.step()
        for output in told.outputs if told is not None else []:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("it never ends")


def test_eviction_picks_the_largest_sequence() -> None:
    """Of sequences with 1, 3 and 2 blocks the one with 3 is chosen."""
    sizes = {1: 1, 2: 3, 3: 2}
    candidates = [VictimCandidate(i, 0, 4, 0, 4, 0, blocks) for i, blocks in sizes.items()]
    assert min(candidates, key=VICTIM_POLICIES["largest"]).seq_id == 2


def test_admits_up_to_batch_size(make_request: Make) -> None:
    """Batch 2, 5 submitted: 2 admitted, 3 waiting."""
    engine = scheduler(max_num_seqs=2)
    for index in range(5):
        engine.add(make_request(str(index), [index + 1]))
    assert len(advance(engine)[0]) == 2
    assert engine.num_waiting == 3


def test_batches_decode_across_sequences(make_request: Make) -> None:
    """Three sequences decode in one batch of 3."""
    engine = scheduler()
    for index in range(3):
        engine.add(make_request(str(index), [index + 1, 9]))
    advance(engine)
    assert advance(engine)[0] == {0: 1, 1: 1, 2: 1}


def test_finished_sequences_retire_and_free_blocks(make_request: Make) -> None:
    """The one that reached its limit is told as finished, and no block is used."""
    engine = scheduler()
    engine.add(make_request("1", [1, 2], max_tokens=1))
    _, outputs = advance(engine)
    assert [o.request_id for o in outputs if o.finish_reason is not None] == ["1"]
    assert engine.blocks.usage == 0.0


def test_eos_retires_a_sequence_early(make_request: Make) -> None:
    """With a limit of 100 the end token is enough."""
    engine = scheduler()
    engine.add(make_request("1", [1, 2], max_tokens=100))
    _, outputs = advance(engine, {0: 0})
    assert outputs[0].finish_reason is FinishReason.STOP
    assert not engine.has_unfinished


def test_idle_when_no_work() -> None:
    """Nothing to plan."""
    assert scheduler().schedule(0.0) is None


def test_preempts_when_blocks_run_out(make_request: Make) -> None:
    """Six blocks of one token, two prompts of two: both decode (6 used), then exactly the second
    is preempted.
    """
    engine = scheduler(num_blocks=6, block_size=1, victim="fewest-outputs")
    engine.add(make_request("1", [1, 2], max_tokens=10))
    engine.add(make_request("2", [3, 4], max_tokens=10))
    advance(engine)
    assert advance(engine)[0] == {0: 1, 1: 1}
    assert engine.blocks.num_free == 0
    assert plan(engine.schedule(0.0)) == {0: 1}
    assert engine.stats().num_preemptions == 1
    assert (engine.num_running, engine.num_waiting) == (1, 1)


def test_preempted_sequence_resumes_later(make_request: Make) -> None:
    """When the first has its two more outputs it retires, and the second is admitted again."""
    engine = scheduler(num_blocks=6, block_size=1, victim="fewest-outputs")
    engine.add(make_request("1", [1, 2], max_tokens=4))
    engine.add(make_request("2", [3, 4], max_tokens=10))
    for _ in range(3):
        advance(engine)
    _, outputs = advance(engine)
    assert (outputs[0].request_id, outputs[0].finish_reason) == ("1", FinishReason.LENGTH)
    assert set(advance(engine)[0]) == {1}


def test_admission_blocks_when_prompt_does_not_fit(make_request: Make) -> None:
    """A prompt of 5 in two blocks of one: none admitted, none used; and, unlike there, its client
    is told instead of waiting for ever.
    """
    engine = scheduler(num_blocks=2, block_size=1)
    (output,) = engine.add(make_request("1", [1] * 5))
    assert output.finish_reason is FinishReason.ERROR
    assert engine.schedule(0.0) is None
    assert engine.blocks.usage == 0.0


def test_many_requests_all_complete_under_pressure(
    paged_executor: Callable[[int], Any], make_request: Make
) -> None:
    """32 blocks of 8, batch 2, 10 requests of 6 tokens: all finish."""
    requests = [
        make_request(str(i), [i % 7, 1, 2, 3], max_tokens=6, ignore_eos=True) for i in range(10)
    ]
    answers = run_to_completion(paged_executor(8), requests, 32, 8, batch=2)
    assert {name: len(tokens) for name, tokens in answers.items()} == {str(i): 6 for i in range(10)}


@pytest.mark.parametrize("limit", [1, 5])
def test_single_request_produces_requested_tokens(
    paged_executor: Callable[[int], Any], make_request: Make, limit: int
) -> None:
    """As many as it asked for."""
    requests = [make_request("1", [1, 2, 3], max_tokens=limit, ignore_eos=True)]
    assert len(run_to_completion(paged_executor(16), requests, 512, 16, batch=8)["1"]) == limit


def test_output_is_deterministic(paged_executor: Callable[[int], Any], make_request: Make) -> None:
    """Twice the same request, twice the same answer."""
    runs = [
        run_to_completion(paged_executor(16), [make_request("1", [5, 6])], 512, 16, batch=8)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_run_prompt_produces_text() -> None:
    """From text to text: the answer is as many words as tokens were asked for."""
    tokenizer = SimTokenizer()
    config = EngineConfig("sim", None, sim=SimConfig(time_scale=0.0))
    executor, num_blocks = build_sim_executor(config)
    params = SamplingParams(max_tokens=8)
    prompt = tokenizer.encode("hello, engine", add_special_tokens=False)
    request = AddRequest("1", prompt, params, 0.0)
    tokens = run_to_completion(executor, [request], num_blocks, 16, batch=8)["1"]
    words = tokenizer.decode(tokens, skip_special_tokens=True).split()
    assert len(words) == 8
    assert set(words) <= set(WORDS)
