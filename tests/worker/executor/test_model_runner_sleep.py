"""Sleep frees memory, and after wake the answers are the same, from an empty cache."""

from pathlib import Path

import pytest
import torch

from worker.errors import ModelError
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner, OffloadedWeights
from worker.models.loader import load_model
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, logprobs=4)
BOTH = frozenset({"weights", "kv_cache"})
PROMPT = [5, 17, 80, 3, 9, 33, 21]


def run(executor: ModelRunner, tokens: list[int], start: int = 0) -> ModelOutput:
    spec = SampleSpec(GREEDY, start + len(tokens))
    sequence = ScheduledSequence(1, tokens, start, [4, 2], (spec,))
    return execute(executor, SchedulerOutput(0, (sequence,)))


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_runner_runs_no_step_and_wakes_unchanged(
    tiny_executor: ModelRunner, level: int
) -> None:
    before = run(tiny_executor, PROMPT)
    tiny_executor.sleep(level)
    with pytest.raises(RuntimeError, match="sleeps"):
        run(tiny_executor, PROMPT)
    tiny_executor.wake(BOTH)
    assert run(tiny_executor, PROMPT) == before


def test_the_cache_comes_back_empty(tiny_executor: ModelRunner) -> None:
    run(tiny_executor, PROMPT)
    remembered = run(tiny_executor, [7], len(PROMPT))
    tiny_executor.sleep(1)
    tiny_executor.wake(BOTH)
    forgotten = run(tiny_executor, [7], len(PROMPT))
    assert forgotten.sampled[1][0].logprobs != remembered.sampled[1][0].logprobs


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_waking_in_parts_is_complete_with_both(tiny_executor: ModelRunner, first: str) -> None:
    before = run(tiny_executor, PROMPT)
    tiny_executor.sleep(2)
    tiny_executor.wake(frozenset({first}))
    with pytest.raises(RuntimeError, match="sleeps"):
        run(tiny_executor, PROMPT)
    tiny_executor.wake(BOTH - {first})
    assert run(tiny_executor, PROMPT) == before


def test_sleep_deepens_and_repeats(tiny_executor: ModelRunner) -> None:
    before = run(tiny_executor, PROMPT)
    tiny_executor.sleep(0)
    assert run(tiny_executor, PROMPT) == before
    for level in (1, 2, 2, 1):
        tiny_executor.sleep(level)
    for _ in range(2):
        tiny_executor.wake(BOTH)
    assert run(tiny_executor, PROMPT) == before


def test_weights_of_level_2_are_read_again(
    tiny_executor: ModelRunner, tiny_checkpoint: Path
) -> None:
    before = run(tiny_executor, PROMPT)
    tiny_executor.sleep(2)
    away = tiny_checkpoint.with_name("away")
    tiny_checkpoint.rename(away)
    try:
        with pytest.raises(ModelError, match="no such file"):
            tiny_executor.wake(BOTH)
    finally:
        away.rename(tiny_checkpoint)
    tiny_executor.wake(BOTH)
    assert run(tiny_executor, PROMPT) == before


def test_a_runner_that_is_shut_down_does_not_wake(tiny_executor: ModelRunner) -> None:
    tiny_executor.sleep(1)
    tiny_executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        tiny_executor.wake(BOTH)


@torch.inference_mode()
def test_weights_come_back_to_the_bit(tiny_checkpoint: Path) -> None:
    model, twin = (
        load_model(tiny_checkpoint, torch.float16, torch.device("cpu")) for _ in range(2)
    )
    away = OffloadedWeights(model)
    storage = model.embedding.weight.untyped_storage()
    assert storage.nbytes() == 0
    num_weights = 96 * 64 + 64 + 2 * (64 * (64 + 32 + 32 + 64 + 80 + 80 + 80) + 2 * 64)
    rope_bytes = 2 * 512 * 16 * 4
    assert away.num_bytes == 2 * num_weights + rope_bytes
    away.restore()
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(model.embedding.weight, twin.embedding.weight)
    assert torch.equal(model.logits(hidden), twin.logits(hidden))
    assert model.embedding.weight.untyped_storage().data_ptr() == storage.data_ptr()
