"""Adapters of one batch against checkpoints they are merged into, and files that are refused."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_files import merge, weight_shapes, write_adapter

from worker.config import EngineConfig, LoraConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, LoadAdapter
from worker.engine.process import build_core
from worker.errors import ModelError
from worker.models.adapters import read_adapter
from worker.models.checkpoints import open_checkpoint
from worker.types import Adapter, SamplingParams

NUM_ADAPTERS = 5
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    """Adapters of different ranks, targets and scales."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), weight_shapes(tiny_checkpoint)
    changes: list[dict[str, Any]] = [
        {},
        {"rank": 8, "use_rslora": True},
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("o_proj", "up_proj", "down_proj"), "rank": 1},
        {"targets": ("gate_proj", "k_proj"), "rank": 16, "lora_alpha": 4},
    ]
    return [
        Adapter(f"a{n}", str(write_adapter(folder / f"a{n}", shapes, n, **change)), n + 1)
        for n, change in enumerate(changes)
    ]


def make_core(checkpoint: Path, max_loras: int = NUM_ADAPTERS, **changes: Any) -> EngineCore:
    config = EngineConfig(
        "torch",
        str(checkpoint),
        "float32",
        num_blocks_override=64,
        scheduler=SchedulerConfig(max_model_len=256),
        lora=LoraConfig(max_loras, max(max_loras, NUM_ADAPTERS)),
    )
    return build_core(replace(config, **changes))[0]


def answers(
    core: EngineCore,
    requests: Sequence[tuple[Sequence[int], Adapter | None]],
    params: SamplingParams = GREEDY,
) -> list[list[int]]:
    """The tokens of requests that come together."""
    for number, (prompt, adapter) in enumerate(requests):
        core.add(AddRequest(str(number), list(prompt), params, 0.0, adapter=adapter))
    tokens: list[list[int]] = [[] for _ in requests]
    while core.has_work:
        outputs = core.step()
        for output in outputs.outputs if outputs is not None else ():
            assert output.error is None
            tokens[int(output.request_id)] += output.token_ids
        if outputs is None:
            time.sleep(0)  # an adapter is being read by a thread
    return tokens


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 60) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "torch"},
        {"scheduler": SchedulerConfig(max_model_len=256, max_num_batched_tokens=16)},
        {"speculative": SpeculativeConfig("ngram", 4)},
    ],
    ids=["native", "torch", "chunks", "drafts"],
)
def test_adapters_in_one_batch_are_their_merged_checkpoints(
    changes: dict[str, Any], tiny_checkpoint: Path, adapters: list[Adapter], tmp_path: Path
) -> None:
    """Token for token: five adapters and the model alone, run by the step together."""
    chosen: list[Adapter | None] = [*adapters, None]
    texts = prompts(2 * len(chosen))
    core = make_core(tiny_checkpoint, **changes)
    found = answers(core, list(zip(texts, [*chosen, *chosen], strict=True)))
    core.shutdown()
    merged: list[list[int]] = [[] for _ in texts]
    for place, adapter in enumerate(chosen):
        checkpoint = tiny_checkpoint
        if adapter is not None:
            checkpoint = merge(checkpoint, Path(adapter.path), tmp_path / adapter.name)
        alone = make_core(checkpoint, **changes)
        own = [place, place + len(chosen)]
        for number, tokens in zip(own, answers(alone, [(texts[n], None) for n in own]), strict=True):
            merged[number] = tokens
        alone.shutdown()
    assert found == merged
    assert len({tuple(tokens) for tokens in found}) == len(found)


def test_an_answer_does_not_depend_on_its_batch(
    tiny_checkpoint: Path, adapters: list[Adapter]
) -> None:
    """With log probabilities to the last bit, whether alone, beside others or with fewer slots than
    adapters; the model alone as in a worker without adapters.
    """
    params = dataclasses.replace(GREEDY, logprobs=3)
    texts, chosen = prompts(6, seed=1), [*adapters, None]
    requests = list(zip(texts, chosen, strict=True))

    def run(core: EngineCore, some: Sequence[tuple[list[int], Adapter | None]]) -> list[Any]:
        core.add_log = None if False else None  # type: ignore[attr-defined]
        return answers(core, some, params)

    together = run(make_core(tiny_checkpoint), requests)
    assert run(make_core(tiny_checkpoint, max_loras=1), requests) == together
    for request, wanted in zip(requests, together, strict=True):
        assert run(make_core(tiny_checkpoint), [request]) == [wanted]
