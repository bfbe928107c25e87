"""Embeddings are transformers' hidden states after the final norm, pooled, whatever else runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model.whole_engine import outputs_of
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import Executor
from worker.types import FinishReason, Pooling, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LENGTHS = (1, 16, 17, 75, 75, 80)  # the later ones begin alike: they hit the prefix cache


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    texts = [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return [*texts[:4], *(texts[3][:64] + text[64:] for text in texts[4:])]


def pooled(states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    return states.mean(dim=0) if pooling is Pooling.MEAN else states[-1]


def check(executor: Executor, model: Any, texts: list[list[int]], *, overlap: bool) -> None:
    """Both poolings run beside generation, twice: the second time the cache knows every prompt."""
    cache = CacheConfig(num_blocks=32, block_size=16)
    limits = SchedulerConfig(max_num_batched_tokens=29, max_model_len=256)
    core = EngineCore(Scheduler(cache, limits, ()), executor, lambda: 0.0, overlap)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0].float() for ids in texts]
    for turn in range(2):
        requests = [
            AddRequest(f"{turn}-{pooling.name}-{n}", ids, GREEDY, 0.0, pooling=pooling)
            for pooling in Pooling
            for n, ids in enumerate(texts)
        ]
        requests.insert(3, AddRequest(f"{turn}-generated", texts[2], GREEDY, 0.0))
        ended = {name: outputs[-1] for name, outputs in outputs_of(core, requests).items()}
        assert len(ended.pop(f"{turn}-generated").token_ids) > 0
        for request_id, output in ended.items():
            _, name, n = request_id.split("-")
            assert output.finish_reason is FinishReason.STOP
            wanted = pooled(expected[int(n)], Pooling[name])
            found = torch.tensor(output.pooled)
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
            unit = torch.nn.functional.normalize
            assert float((unit(found, dim=0) - unit(wanted, dim=0)).abs().max()) < 1e-4
        if turn:
            assert ended["1-LAST-5"].num_cached_tokens >= 64
        assert all(ended[f"{turn}-MEAN-{n}"].num_cached_tokens == 0 for n in range(len(texts)))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tiny_models_embeddings(
    tiny_executor: Executor, tiny_checkpoint: Path, overlap: bool
) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    check(tiny_executor, model.model, prompts(96), overlap=overlap)


@pytest.mark.full
@pytest.mark.model
def test_the_default_models_embeddings(float32_executor: Executor, transformers_model: Any) -> None:
    check(float32_executor, transformers_model.model, prompts(49_152), overlap=True)
