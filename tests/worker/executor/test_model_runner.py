"""The model runner: exact against transformers, and blind to batch, chunks and block tables.

Prompts are random token ids: their continuations are far from certain, so a small error shows.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.model import reference_ops as reference
from worker.config import EngineConfig, SchedulerConfig
from worker.errors import ConfigError, ModelError
from worker.executor.interface import Executor, execute
from worker.executor.start import build_executor, choose_dtype
from worker.types import (
    Draw,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Generation:
    prompt: list[int]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.output) == self.num_tokens


def generate(
    executor: Executor,
    requests: list[Generation],
    *,
    budget: int = 10_000,
    num_blocks: int = 1000,
    shuffle: int | None = None,
) -> list[list[int]]:
    """Blocks come from a shuffled pool, so that tables are scattered and interleaved."""
    pool = list(range(num_blocks))
    if shuffle is not None:
        random.Random(shuffle).shuffle(pool)
    for request in requests:
        request.tokens = list(request.prompt)
        need = -(-(len(request.prompt) + request.num_tokens) // BLOCK_SIZE)
        request.blocks = [pool.pop() for _ in range(need)]
    step = 0
    while not all(request.done for request in requests):
        scheduled = _schedule(requests, budget)
        sampled = execute(executor, SchedulerOutput(step, tuple(scheduled))).sampled
        assert sampled.keys() == {s.seq_id for s in scheduled if s.samples}
        for sequence in scheduled:
            requests[sequence.seq_id].computed += len(sequence.token_ids)
        for index, draws in sampled.items():
            requests[index].tokens.append(draws[0].token_id)
        step += 1
    return [request.output for request in requests]


def _schedule(requests: list[Generation], budget: int) -> list[ScheduledSequence]:
    scheduled = []
    waiting = sorted(
        (index for index, request in enumerate(requests) if not request.done),
        key=lambda index: requests[index].computed == 0,
    )
    for index in waiting:
        request = requests[index]
        start = request.computed
        token_ids = request.tokens[start : start + budget]
        if not token_ids:
            break
        budget -= len(token_ids)
        end = start + len(token_ids)
        samples = (SampleSpec(GREEDY, end),) if end == len(request.tokens) else ()
        scheduled.append(ScheduledSequence(index, token_ids, start, request.blocks, samples))
    return scheduled


@torch.inference_mode()
def greedy_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    logits = model(torch.tensor([prompt + output])).logits[0]
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    return choices


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(17, 49152) for _ in range(draw.randint(1, 300))] for _ in range(count)]


# <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
CAPITAL = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30]  # The capital of France is Paris.


@pytest.mark.model
def test_answers_a_question(float32_executor: Executor) -> None:
    """The answer shows that weights are read in the right order."""
    assert generate(float32_executor, [Generation(CAPITAL, 7)])[0] == PARIS


@pytest.mark.full
@pytest.mark.model
def test_a_mixed_batch_in_chunks_is_token_identical_to_transformers(
    float32_executor: Executor, transformers_model: Any
) -> None:
    asked = prompts(16, seed=12)
    outputs = generate(float32_executor, [Generation(p, 64) for p in asked], budget=100, shuffle=1)
    for prompt, output in list(zip(asked, outputs, strict=True))[::4]:
        assert output == greedy_choices(transformers_model, prompt, output)


@pytest.mark.model
def test_copied_blocks_carry_their_keys(auto_executor: Executor) -> None:
    [prompt] = prompts(1, seed=14)
    blocks = list(range(40))
    samples = (SampleSpec(GREEDY, len(prompt)),)
    first = ScheduledSequence(0, prompt, 0, blocks, samples)
    token = execute(auto_executor, SchedulerOutput(0, (first,))).sampled[0][0].token_id
    samples = (SampleSpec(GREEDY, len(prompt) + 1),)
    copies = tuple((block, block + 100) for block in blocks)
    results = []
    for table, copied in ((blocks, ()), ([b + 100 for b in blocks], copies)):
        after = ScheduledSequence(0, [token], len(prompt), table, samples)
        results.append(execute(auto_executor, SchedulerOutput(1, (after,), copied)).sampled)
    assert results[0] == results[1]


@pytest.mark.model
def test_a_step_may_sample_nothing(auto_executor: Executor) -> None:
    chunk = ScheduledSequence(0, [5, 6, 7], 0, [0])
    assert execute(auto_executor, SchedulerOutput(0, (chunk,))).sampled == {}
    assert execute(auto_executor, SchedulerOutput(1, ())).sampled == {}


def continuation(executor: Executor, prompt: list[int], **changes: Any) -> Draw:
    params = replace(GREEDY, **changes)
    sequence = ScheduledSequence(
        0, prompt, 0, range(40), (SampleSpec(params, len(prompt), (), prompt, len(prompt)),)
    )
    return execute(executor, SchedulerOutput(0, (sequence,))).sampled[0][0]


@pytest.mark.model
def test_forward_is_deterministic(auto_executor: Executor) -> None:
    [prompt] = prompts(1, seed=15)
    first, second = (continuation(auto_executor, prompt, logprobs=-1) for _ in range(2))
    assert first == second
    assert first.logprobs is not None
    assert first.logprobs.token_ids[0] == first.token_id


@pytest.mark.model
def test_probabilities_sum_to_one(auto_executor: Executor) -> None:
    for prompt in [CAPITAL, *prompts(2, seed=16)]:
        logprobs = continuation(auto_executor, prompt, logprobs=-1).logprobs
        assert logprobs is not None
        assert sorted(logprobs.token_ids[1:]) == list(range(49152))
        assert math.fsum(map(math.exp, logprobs.logprobs[1:])) == pytest.approx(1, abs=1e-4)


@pytest.mark.model
def test_prompt_logprobs_are_transformers_in_any_chunks(
    float32_executor: Executor, transformers_model: Any
) -> None:
    [prompt] = prompts(1, seed=17)
    with torch.inference_mode():
        logits = transformers_model(torch.tensor([prompt])).logits[0]
    expected = [
        reference.token_logprobs(row, target, 3)
        for row, target in zip(logits[:10], prompt[1:11], strict=True)
    ]
    answers: list[list[TokenLogprobs]] = []
    for cuts in ([0, len(prompt)], [0, 1, 30, 64, len(prompt)]):
        found: list[TokenLogprobs] = []
        for start, end in itertools.pairwise(cuts):
            targets = prompt[start + 1 : end + 1]
            asked = {"prompt_targets": targets, "num_prompt_logprobs": 3}
            chunk = ScheduledSequence(0, prompt[start:end], start, range(40), **asked)
            found += execute(float32_executor, SchedulerOutput(0, (chunk,))).prompt_logprobs[0]
        assert len(found) == len(prompt) - 1
        answers.append(found)
    assert answers[0] == answers[1]
    for mine, theirs in zip(answers[0], expected, strict=False):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-3)
        assert mine.rank == pytest.approx(theirs.rank, abs=2, rel=1e-3)


@pytest.mark.model
def test_branches_of_a_prompt_draw_as_if_alone(auto_executor: Executor) -> None:
    specs = [
        SampleSpec(SamplingParams(max_tokens=1, seed=seed, temperature=1.2, top_p=0.97), 16)
        for seed in range(5)
    ]
    together = ScheduledSequence(0, CAPITAL, 0, range(2), tuple(specs))
    drawn = execute(auto_executor, SchedulerOutput(0, (together,))).sampled[0]
    for spec, draw in zip(specs, drawn, strict=True):
        alone = ScheduledSequence(0, CAPITAL, 0, range(2), (spec,))
        assert execute(auto_executor, SchedulerOutput(0, (alone,))).sampled[0] == (draw,)


@pytest.mark.model
def test_shutdown_is_idempotent_and_final(model_path: Path) -> None:
    limits = SchedulerConfig(max_model_len=64)
    executor, num_blocks = build_executor(
        EngineConfig("torch", str(model_path), num_blocks_override=4, scheduler=limits)
    )
    assert num_blocks == 4
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        execute(executor, SchedulerOutput(0, ()))


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="--model"):
        build_executor(EngineConfig("torch", None))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        build_executor(EngineConfig("torch", str(tmp_path / "nowhere.gguf")))


def test_a_context_no_memory_holds_is_refused_before_weights_are_read(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The weights here cannot be read, and the rotary table would fit nowhere."""
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 20
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    integers = {name: tensor.to(torch.int64) for name, tensor in tensors.items()}
    save_file(integers, tmp_path / "model.safetensors")
    limits = SchedulerConfig(max_model_len=1 << 20)
    asked = EngineConfig("torch", str(tmp_path), num_blocks_override=32, scheduler=limits)
    with pytest.raises(ConfigError, match="cannot hold --max-model-len 1048576"):
        build_executor(asked)


def test_bfloat16_is_served_on_any_cpu(tiny_checkpoint: Path) -> None:
    limits = SchedulerConfig(max_model_len=64)
    config = EngineConfig("torch", str(tiny_checkpoint), dtype="bfloat16", scheduler=limits)
    executor, _ = build_executor(config)
    [output] = generate(executor, [Generation([5, 17, 9], num_tokens=4)], num_blocks=4)
    assert len(output) == 4


def test_dtypes_are_chosen_by_name() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float32", cpu, True) is torch.float32
    assert choose_dtype("bfloat16", cpu, True) is torch.bfloat16
    assert choose_dtype("bfloat16", cpu, False) is torch.float32
    assert choose_dtype("auto", cpu, True) is torch.float32
    with pytest.raises(ConfigError, match="--dtype int8"):
        choose_dtype("int8", cpu, True)
