"""The whole engine against an independent implementation of the same model, in float32.

The oracle is Hugging Face transformers, which reads and dequantizes the GGUF file by itself.
Prompts are random token ids, so that neither tokenizers nor memorised texts matter.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.depth import by_depth
from tests.support.worker.step_driver import steps
from worker.config import CacheConfig, EngineConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import Executor
from worker.types import EngineStats, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
Requests = dict[str, tuple[list[int], SamplingParams]]
NUM_TOKENS = by_depth(8, 32)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Iterator[Any]:
    from worker.executor.start import build_executor

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
    """Return the argmax of transformers after the prompt and after each token of `answer` but the
    last.

    It equals `answer` exactly when transformers' own greedy decoding gives `answer`: by induction,
    each token is its argmax after the same tokens.
    """
    import torch

    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(dim=-1)]


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 512
    budget: int = 2048
    batch: int = 64
    caching: bool = True
    overlap: bool = False
    rounds: int = 1  # of the same requests; later rounds hit the prefix cache
    num_answers: int = 1


ROOMY = Setup()


def run(
    executor: Any, requests: Requests, setup: Setup = ROOMY
) -> tuple[dict[str, list[int]], EngineStats]:
    """Return the tokens of every answer in the last round; further answers of a request have the
    names "name/1", "name/2".
    """
    limits = SchedulerConfig(
        max_num_batched_tokens=setup.budget, max_num_seqs=setup.batch, max_model_len=2048
    )
    cache = CacheConfig(setup.num_blocks, BLOCK_SIZE, setup.caching)
    scheduler = Scheduler(cache, limits, eos_token_ids=(2,))
    core = EngineCore(scheduler, SharedExecutor(executor), time.monotonic, setup.overlap)
    answers: dict[str, list[int]] = {}
    for _ in range(setup.rounds):
        answers = {}
        for name, (prompt, params) in requests.items():
            branches = [f"{name}/{index}" for index in range(1, setup.num_answers)]
            core.add(AddRequest(name, prompt, params, 0.0, branch_ids=branches))
        for step in steps(core):
            scheduler.check_integrity()
            for output in step.outputs:
                answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert scheduler.blocks.num_free == setup.num_blocks
    core.shutdown()
    return answers, scheduler.stats()


class SharedExecutor(Executor):
    def __init__(self, executor: Any) -> None:
        self.submit = executor.submit


def prompts_with_shared_prefixes(rng: Random, count: int) -> list[list[int]]:
    shared = [rng.randrange(17, 49152) for _ in range(70)]
    prompts = []
    for index in range(count):
        tail = [rng.randrange(17, 49152) for _ in range(rng.randrange(5, 50))]
        prompts.append(shared + tail if index % 2 else tail)
    return prompts


@pytest.fixture(scope="module")
def requests() -> Requests:
    prompts = prompts_with_shared_prefixes(Random(20261121), by_depth(4, 10))
    return {f"r{index}": (prompt, GREEDY) for index, prompt in enumerate(prompts)}


@pytest.fixture(scope="module")
def together(executor: Any, requests: Requests) -> dict[str, list[int]]:
    answers, stats = run(executor, requests)
    assert stats.scheduler.num_preemptions == 0
    return answers


@pytest.mark.full
def test_answers_of_a_batch_match_transformers(
    oracle: Any, requests: Requests, together: dict[str, list[int]]
) -> None:
    for name, (prompt, _) in requests.items():
        assert len(together[name]) == NUM_TOKENS
        assert together[name] == follow_up_by_oracle(oracle, prompt, together[name]), name


def test_a_seed_gives_the_same_tokens_in_any_batch(executor: Any, requests: Requests) -> None:
    sampled = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True
    )
    drawn = {
        name: (prompt, replace(sampled, seed=index))
        for index, (name, (prompt, _)) in enumerate(requests.items())
    }
    roomy, _ = run(executor, drawn)
    squeezed, stats = run(executor, drawn, Setup(num_blocks=by_depth(16, 48), budget=64))
    assert stats.scheduler.num_preemptions > 0
    assert squeezed == roomy
    for name in by_depth(("r0", "r3"), ("r0", "r3", "r9")):
        alone, _ = run(executor, {name: drawn[name]})
        assert alone[name] == roomy[name]


# ---- many answers in every set-up ---------------------------------------------------------------


@pytest.fixture(scope="module")
def many() -> Requests:
    rng = Random(20261122)
    stems = [[rng.randrange(17, 49152) for _ in range(length)] for length in (16, 23, 32, 41)]
    greedy = replace(GREEDY, max_tokens=6)
    requests = {}
    for index in range(by_depth(16, 48)):
        stem = rng.choice(stems) if rng.random() < 0.5 else []
        length = rng.randrange(max(10, len(stem) + 1), 61)
        own = [rng.randrange(17, 49152) for _ in range(length - len(stem))]
        requests[f"q{index}"] = (stem + own, greedy)
    return requests


@pytest.fixture(scope="module")
def alone(executor: Any, many: Requests) -> dict[str, list[int]]:
    answers, stats = run(executor, many, Setup(batch=1, caching=False))
    assert stats.scheduler.prefix_cache_hits == stats.scheduler.num_preemptions == 0
    return answers


SETUPS = {
    "batch 64, cold, then all prefix hits": Setup(rounds=2),
    "chunked": Setup(budget=40),
    "preempted": Setup(num_blocks=30),
    "overlapped, chunked and preempted": Setup(num_blocks=12, budget=40, overlap=True),
    "n=3 forked": Setup(overlap=True, num_answers=3),
}


@pytest.mark.parametrize("name", by_depth(["overlapped, chunked and preempted"], list(SETUPS)))
def test_answers_are_the_same_in_every_setup(
    executor: Any, many: Requests, alone: dict[str, list[int]], name: str
) -> None:
    setup = SETUPS[name]
    answers, stats = run(executor, many, setup)
    assert len(answers) == len(many) * setup.num_answers
    for answered, tokens in answers.items():
        assert tokens == alone[answered.partition("/")[0]], answered
    assert (stats.scheduler.num_preemptions > 0) == (setup.num_blocks < ROOMY.num_blocks)
    assert stats.scheduler.prefix_cache_hits > 0
    if setup.rounds == 2:
        assert stats.scheduler.prefix_cache_hits > sum(len(p) - 1 for p, _ in many.values()) * 0.9
