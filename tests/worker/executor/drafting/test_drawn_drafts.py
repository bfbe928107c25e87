"""Drawn drafts, from the configuration to the tokens: each step is what `rejection.verify` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import states_of
from torch import Tensor

from worker.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.executor.model_runner import build_executor
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.rejection import METHODS, verify
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

CPU = torch.device("cpu")
PROMPT = [5, 17, 80, 3, 9]
NUM_DRAFTS = 4
SEEDS = range(12)


def rows_after(model: LlamaModel, token_ids: list[int], count: int, temperature: float) -> Tensor:
    """The last `count` rows [count, V] of scores, from a run of the model over everything."""
    with torch.inference_mode():
        return model.logits(states_of(model, token_ids)[-count:]) / temperature


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_kept", [NUM_DRAFTS, 2], ids=["all", "trimmed"])
def test_a_step_judges_drawn_drafts_by_their_own_distribution(
    tiny_checkpoint: Path, make_checkpoint: Callable[..., Path], method: str, num_kept: int
) -> None:
    """With q from the draft model's own rows and p from the target's, by the configured method."""
    draft_path = make_checkpoint(seed=3)
    chosen = SpeculativeConfig(
        "draft_model",
        NUM_DRAFTS,
        model=str(draft_path),
        draft_sample_method="probabilistic",
        rejection_sample_method=method,
    )
    limits = SchedulerConfig(max_model_len=256)
    config = EngineConfig(
        "torch",
        str(tiny_checkpoint),
        "float32",
        num_blocks_override=32,
        scheduler=limits,
        speculative=chosen,
    )
    executor = build_executor(config)[0]
    target, draft = (load_model(p, torch.float32, CPU) for p in (tiny_checkpoint, draft_path))
    accepted, other = 0, 0
    for seed in SEEDS:
        params = SamplingParams(max_tokens=1, temperature=6.0, seed=seed)
        spec = SampleSpec(params, len(PROMPT))
        share = ScheduledSequence(seed, PROMPT, 0, [4, 2], (spec,), num_to_draft=NUM_DRAFTS)
        output = executor.execute(SchedulerOutput(0, (share,)))
        drafts = list(output.drafts[seed].token_ids[:num_kept])
        assert len(drafts) == num_kept
        first = output.sampled[seed][0].token_id
        run = replace(
            share,
            token_ids=[first, *drafts],
            start=len(PROMPT),
            samples=(SampleSpec(params, len(PROMPT) + 1),),
            num_drafts=num_kept,
            num_to_draft=0,
        )
        draws = executor.execute(SchedulerOutput(1, (run,))).sampled[seed]
        known = [*PROMPT, first]
        p = rows_after(target, [*known, *drafts], num_kept + 1, 6.0)
        q = rows_after(draft, [*known, *drafts[:-1]], num_kept, 6.0).softmax(-1)
        verdict = verify(drafts, p, q, seed, len(known), method)
        assert tuple(draw.token_id for draw in draws) == verdict.token_ids
        accepted += verdict.num_accepted
        other += verdict != verify(drafts, p, q, seed, len(known), _other(method))
    assert 0 < accepted < len(SEEDS) * num_kept
    assert other > 0 or num_kept < NUM_DRAFTS, "the two methods would have decided the same"


def _other(method: str) -> str:
    [other] = {*METHODS} - {method}
    return other
