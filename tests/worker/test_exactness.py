"""The whole engine against an independent implementation of the same model, in float32.

The oracle is Hugging Face transformers, which reads and dequantizes the GGUF file by itself.
Prompts are random token ids, so that no tokenizer and no remembered text stands between the two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from worker.config import CacheConfig, EngineConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, EngineStats
from worker.engine.scheduler import Scheduler
from worker.types import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
Requests = dict[str, tuple[list[int], SamplingParams]]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    """Transformers' model on the weights of the same file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Iterator[Any]:
    """Our executor with room for every pool size used here."""
    from worker.executor.model_runner import build_executor

    config = EngineConfig(
        engine="torch",
        model_path=str(model_path),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks_override=512,
        scheduler=SchedulerConfig(max_model_len=2048),
    )
    built, _ = build_executor(config)
    yield built
    built.shutdown()


def follow_up_by_oracle(oracle: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers puts after the prompt and after each token of `answer` but the last.

    Equal to `answer` exactly when transformers' own greedy decoding gives `answer`: by induction,
    each token is its argmax after the same tokens.
    """
    import torch

    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(dim=-1)]


def run(
    executor: Any,
    requests: Requests,
    *,
    num_blocks: int = 512,
    budget: int = 2048,
    rounds: int = 1,
) -> tuple[dict[str, list[int]], EngineStats]:
    """Every request's tokens when all run together in a fresh pool; later rounds find its cache."""
    limits = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=2048)
    scheduler = Scheduler(CacheConfig(num_blocks, BLOCK_SIZE), limits, eos_token_ids=(2,))
    core = EngineCore(scheduler, executor, time.monotonic)
    answers: dict[str, list[int]] = {}
    for _ in range(rounds):
        answers = {name: [] for name in requests}
        for name, (prompt, params) in requests.items():
            core.add(AddRequest(name, prompt, params, 0.0))
        while core.has_work:
            step = core.step()
            assert step is not None
            scheduler.check_integrity()
            for output in step.outputs:
                answers[output.request_id] += output.token_ids
    assert scheduler.blocks.usage == 0.0
    return answers, scheduler.stats()


def prompts_with_shared_prefixes(rng: Random, count: int) -> list[list[int]]:
    """Prompts of 5 to 120 tokens; every other one starts like another."""
    shared = [rng.randrange(17, 49152) for _ in range(70)]
    prompts = []
    for index in range(count):
        tail = [rng.randrange(17, 49152) for _ in range(rng.randrange(5, 50))]
        prompts.append(shared + tail if index % 2 else tail)
    return prompts


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Sixteen greedy requests of 64 tokens."""
    prompts = prompts_with_shared_prefixes(Random(20261121), 16)
    return {f"r{index}": (prompt, GREEDY) for index, prompt in enumerate(prompts)}


@pytest.fixture(scope="module")
def together(executor: Any, requests: Requests) -> dict[str, list[int]]:
    """Their answers from one mixed batch with a cold cache and room for all."""
    answers, stats = run(executor, requests)
    assert stats.num_preemptions == 0
    return answers


def test_sixteen_together_are_continued_as_transformers_does(
    oracle: Any, requests: Requests, together: dict[str, list[int]]
) -> None:
    """Every token is the one an independent implementation puts there."""
    for name, (prompt, _) in requests.items():
        assert len(together[name]) == 64
        assert together[name] == follow_up_by_oracle(oracle, prompt, together[name]), name


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
def test_alone_a_request_gets_the_same_tokens(
    executor: Any, requests: Requests, together: dict[str, list[int]], name: str
) -> None:
    """Batch of one, whole prompt in one step."""
    answers, _ = run(executor, {name: requests[name]})
    assert answers[name] == together[name]


def test_chunks_and_prefix_hits_change_no_token(
    executor: Any, requests: Requests, together: dict[str, list[int]]
) -> None:
    """A budget of 48 tokens a step, and a second round that finds the first one's blocks."""
    answers, stats = run(executor, requests, budget=48, rounds=2)
    assert stats.prefix_cache_hits > 1000
    assert answers == together


def test_preemption_changes_no_token(
    executor: Any, requests: Requests, together: dict[str, list[int]]
) -> None:
    """A pool too small for all of them at once."""
    answers, stats = run(executor, requests, num_blocks=64, budget=64)
    assert stats.num_preemptions > 0
    assert answers == together


def test_a_seeded_request_gets_the_same_tokens_in_any_company(
    executor: Any, requests: Requests
) -> None:
    """Same request, same seed: alone, among sixteen, chunked, and after preemption."""
    sampled = SamplingParams(
        max_tokens=48, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True
    )
    drawn = {
        name: (prompt, replace(sampled, seed=index))
        for index, (name, (prompt, _)) in enumerate(requests.items())
    }
    roomy, _ = run(executor, drawn)
    squeezed, stats = run(executor, drawn, num_blocks=64, budget=64)
    assert stats.num_preemptions > 0
    assert squeezed == roomy
    for name in ("r0", "r3", "r9"):
        alone, _ = run(executor, {name: drawn[name]})
        assert alone[name] == roomy[name]
