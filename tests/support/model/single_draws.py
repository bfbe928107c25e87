"""One sequence or one step at a time: what serving does for whole batches."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.ops.drafted import DraftBatch
from worker.ops.noise import gumbel_noise
from worker.ops.rejection import STANDARD, DraftVerdict, certain, verify_batch
from worker.ops.sample import (
    ALL_MASKED,
    NOT_NUMBERS,
    TORCH_SAMPLER,
    ChosenToken,
    Sampler,
    Undrawable,
    adjust,
    draws,
)
from worker.ops.truncate import surviving
from worker.types import Draw, SampleSpec, ScheduledSequence


def verify(
    drafts: Sequence[int],
    scores: Tensor,
    proposals: Tensor | None,
    seed: int,
    position: int,
    method: str = STANDARD,
) -> DraftVerdict:
    """scores [k + 1, V] and proposals [k, V] are float32; no proposals: the drafter is certain."""
    rows = torch.tensor(drafts, dtype=torch.int64, device=scores.device)
    if proposals is None:
        proposals = certain(rows, scores.shape[-1])
    num_drafts = torch.tensor([len(drafts)], device=scores.device)
    batch = DraftBatch(rows[None], scores[None], proposals[None], num_drafts)
    return verify_batch(batch, [seed], [position], method)[0]


def sample(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    rows: Sequence[int] | None = None,
    sampler: Sampler = TORCH_SAMPLER,
) -> list[Draw | Undrawable]:
    """`rows[i]` is the row that `specs[i]` draws from, by default row i."""
    rows = range(len(specs)) if rows is None else rows
    tokens = sampler.launch(logits, rows, specs).collect()
    chosen = [
        ChosenToken(row, spec.params, token)
        for spec, row, token in zip(specs, rows, tokens, strict=True)
        if not isinstance(token, Undrawable)
    ]
    drawn = iter(draws(logits, chosen))
    return [token if isinstance(token, Undrawable) else next(drawn) for token in tokens]


def draw(logits: Tensor, spec: SampleSpec) -> int | Undrawable:
    """Draw from one row by float64 noise alone, without the shortcuts of `choose`."""
    params, row = spec.params, adjust(logits, spec)
    if params.temperature > 0:
        row = row / params.temperature
    peak = float(row.amax())
    if not math.isfinite(float(logits.amax())) or (not math.isfinite(peak) and peak != -math.inf):
        return Undrawable(NOT_NUMBERS)
    if peak == -math.inf:
        return Undrawable(ALL_MASKED)
    if params.temperature == 0:
        return int(row.argmax())
    ids = surviving(row, params).sort().values
    noise = gumbel_noise(params.seed, spec.position, len(row), ids=ids, exact=True)
    return int(ids[(row[ids].double() + noise).argmax()])


class AnsweredRows:
    """The fields of a `StepBatch` that `PendingAnswers` reads."""

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.sampled = [s for s in sequences if s.samples]
        self.scored = [s for s in sequences if s.prompt_targets]
        self.silent = [s for s in sequences if not s.samples]
        self.pooled: list[ScheduledSequence] = []
        self.sampled_slots = np.arange(len(self.sampled), dtype=np.int32)
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)

    def __len__(self) -> int:
        return self.num_logits + len(self.silent)
