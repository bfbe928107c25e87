"""What a step answers: hidden states turned into draws and log probabilities.

Logits are made for a bounded number of rows at a time, so that memory does not grow with the
prompts whose log probabilities are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from worker.executor.input_batch import InputBatch
from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.ops.sample import NOT_NUMBERS, Undrawable, sample
from worker.types import Draw, ModelOutput, ScheduledSequence, TokenLogprobs

# Rows of logits that exist at once: 50 MB of a vocabulary of 49,152 in float32.
TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Target:
    """One prompt token whose log probabilities are wanted, and whose it is."""

    seq_id: int
    token_id: int
    num_top: int


def answer(
    batch: InputBatch,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    tile_rows: int = TILE_ROWS,
) -> ModelOutput:
    """The output of a step from hidden [R, hidden_size], the rows of `batch`'s `sample_rows`.

    `logits_of` turns hidden rows into float32 logits, each row on its own. A sequence has failed if
    one of its rows is not all finite numbers, or if no token may be drawn from it.
    """
    failed = _failed_silent(batch, hidden)
    sampled: dict[int, tuple[Draw, ...]] = {}
    for first in range(0, len(batch.sampled), tile_rows):
        members = batch.sampled[first : first + tile_rows]
        logits = logits_of(hidden[first : first + len(members)])
        _draw(logits, members, sampled, failed)
    scored: dict[int, list[TokenLogprobs]] = {}
    targets = _targets(batch.scored)
    first = len(batch.sampled)
    while tile := list(islice(targets, tile_rows)):
        logits = logits_of(hidden[first : first + len(tile)])
        _score(logits, tile, scored, failed)
        first += len(tile)
    return ModelOutput(
        {seq_id: draws for seq_id, draws in sampled.items() if seq_id not in failed},
        {seq_id: tuple(rows) for seq_id, rows in scored.items() if seq_id not in failed},
        failed,
    )


def _failed_silent(batch: InputBatch, hidden: Tensor) -> dict[int, str]:
    """Those that draw nothing and whose last row is not finite: all keys and values of a sequence
    go into that row, so that it is finite only if they are.
    """
    if not batch.silent:
        return {}
    finite = hidden[batch.num_logits :].isfinite().all(dim=-1).tolist()
    rows = zip(batch.silent, finite, strict=True)
    return {sequence.seq_id: NOT_NUMBERS for sequence, good in rows if not good}


def _draw(
    logits: Tensor,
    members: list[ScheduledSequence],
    sampled: dict[int, tuple[Draw, ...]],
    failed: dict[int, str],
) -> None:
    """All draws of each of `members`, whose rows `logits` are, into `sampled` or `failed`."""
    specs = [spec for sequence in members for spec in sequence.samples]
    rows = [row for row, sequence in enumerate(members) for _ in sequence.samples]
    outcomes = iter(sample(logits, specs, rows))
    for sequence in members:
        draws: list[Draw] = []
        for outcome in islice(outcomes, len(sequence.samples)):
            if isinstance(outcome, Undrawable):
                failed[sequence.seq_id] = outcome.reason
            else:
                draws.append(outcome)
        sampled[sequence.seq_id] = tuple(draws)


def _targets(scored: list[ScheduledSequence]) -> Iterator[_Target]:
    for sequence in scored:
        for token_id in sequence.prompt_targets:
            yield _Target(sequence.seq_id, token_id, sequence.num_prompt_logprobs)


def _score(
    logits: Tensor,
    targets: list[_Target],
    scored: dict[int, list[TokenLogprobs]],
    failed: dict[int, str],
) -> None:
    """The log probabilities of `targets`, whose rows `logits` are, into `scored` or `failed`."""
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    queries = []
    for row, (target, good) in enumerate(zip(targets, finite, strict=True)):
        if good:
            queries.append(LogprobQuery(row, target.token_id, target.num_top))
        else:
            failed[target.seq_id] = NOT_NUMBERS
    for query, found in zip(queries, token_logprobs(logits, queries), strict=True):
        scored.setdefault(targets[query.row].seq_id, []).append(found)
