"""What sequences with drafts draw in a step: the drafts that stand, and one token more.

A row from which nothing can be drawn ends a run before it: what was drawn up to there stands, as it
does in plain decoding, which comes to the bad row one token later. The next step then starts at
that row and fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from worker.ops.drafted import DraftBatch
from worker.ops.rejection import Sums, verify_batch, verify_coupled
from worker.ops.sample import RowSampler, Undrawable
from worker.types import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that a sequence draws from its rows in turn; without one, `fault` says why."""

    token_ids: list[int]
    fault: Undrawable | None


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """A sequence with drafts, and the first of its 1 + `num_drafts` rows."""

    sequence: ScheduledSequence
    first: int


def verify_runs(
    sampler: RowSampler,
    members: Sequence[DraftedRows],
    proposals: Mapping[int, Tensor],
    method: str,
    sums: Sums | None = None,
) -> list[Run]:
    """The run of each of `members`: judged by `method` if `proposals` have the q [k, V] that its
    drafts were drawn from and it samples, else coupled to plain sampling. `sums` as `rejection`
    takes them.
    """
    judged = [
        index
        for index, member in enumerate(members)
        if member.sequence.seq_id in proposals and member.sequence.samples[0].params.temperature > 0
    ]
    verdicts = _judge(
        sampler,
        [(members[i], proposals[members[i].sequence.seq_id]) for i in judged],
        method,
        sums,
    )
    runs = dict(zip(judged, verdicts, strict=True))
    return [runs.get(i) or _couple(sampler, member) for i, member in enumerate(members)]


def _couple(sampler: RowSampler, member: DraftedRows) -> Run:
    [spec] = member.sequence.samples
    drafts = member.sequence.drafts

    def draw(index: int) -> int | Undrawable:
        return sampler.choose(member.first + index, spec.after(drafts[:index]))

    return Run(*verify_coupled(drafts, draw))


@dataclass(frozen=True, slots=True)
class _Usable:
    """The drafts of a sequence as far as they can be judged.

    `scores` has one row more than `drafts`: if it is `padded` that is no real row, and its token
    does not count.
    """

    drafts: list[int]
    scores: Tensor
    proposals: Tensor
    padded: bool


def _judge(
    sampler: RowSampler,
    members: Sequence[tuple[DraftedRows, Tensor]],
    method: str,
    sums: Sums | None,
) -> list[Run]:
    """Runs by rejection, all at once."""
    parts = [_usable(sampler, member, q) for member, q in members]
    usable = [part for part in parts if not isinstance(part, Undrawable)]
    if not usable:
        return [Run([], part) for part in parts if isinstance(part, Undrawable)]
    specs = [
        member.sequence.samples[0]
        for (member, _), part in zip(members, parts, strict=True)
        if not isinstance(part, Undrawable)
    ]
    verdicts = verify_batch(
        _batch(usable),
        [spec.params.seed for spec in specs],
        [spec.position for spec in specs],
        method,
        sums,
    )
    tokens = iter(
        verdict.token_ids[:-1]
        if part.padded and verdict.num_accepted == len(part.drafts)
        else verdict.token_ids
        for part, verdict in zip(usable, verdicts, strict=True)
    )
    return [
        Run([], part) if isinstance(part, Undrawable) else Run(list(next(tokens)), None)
        for part in parts
    ]


def _usable(sampler: RowSampler, member: DraftedRows, proposals: Tensor) -> _Usable | Undrawable:
    """The rows before the first one from which nothing can be drawn; why, if that is the first."""
    [spec] = member.sequence.samples
    drafts = list(member.sequence.drafts)
    if len(proposals) != len(drafts):
        raise ValueError(f"{len(proposals)} proposals cannot be those of {len(drafts)} drafts")
    rows: list[Tensor] = []
    for index in range(len(drafts) + 1):
        scores = sampler.scores(member.first + index, spec.after(drafts[:index]))
        if isinstance(scores, Undrawable):
            if not rows:
                return scores
            # Whether a draft can be judged depends on those before it, never on itself.
            kept = torch.stack([*rows, torch.zeros_like(rows[0])])
            return _Usable(drafts[:index], kept, proposals[:index], padded=True)
        rows.append(scores)
    return _Usable(drafts, torch.stack(rows), proposals, padded=False)


def _batch(parts: Sequence[_Usable]) -> DraftBatch:
    device = parts[0].scores.device
    drafts = [torch.tensor(part.drafts, dtype=torch.int64, device=device) for part in parts]
    return DraftBatch(
        pad_sequence(drafts, batch_first=True),
        pad_sequence([part.scores for part in parts], batch_first=True),
        pad_sequence([part.proposals for part in parts], batch_first=True),
        torch.tensor([len(part.drafts) for part in parts], device=device),
    )
