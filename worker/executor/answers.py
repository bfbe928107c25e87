# Apart: rows of logits become draws, whatever ran them.
"""The answers of a step: hidden states turned into draws and log probabilities.

Logits are made for a bounded number of rows at a time, so that memory does not grow with the
prompts whose log probabilities are asked for.

What sequences with drafts draw in a step: the drafts that stand, and one token more.

A row from which nothing can be drawn ends a run before it: what was drawn up to there stands, as it
does in plain decoding, which comes to the bad row one token later. The next step then starts at
that row and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from worker.executor.input_batch import InputBatch
from worker.ops.drafted import DraftBatch
from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.ops.rejection import STANDARD, Sums, verify_batch, verify_coupled
from worker.ops.sample import NOT_NUMBERS, ChosenToken, RowSampler, Undrawable, draws
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
    proposals: Mapping[int, Tensor] | None = None,
    method: str = STANDARD,
    sums: Sums | None = None,
    tile_rows: int = TILE_ROWS,
) -> ModelOutput:
    """The output of a step from hidden [R, hidden_size], the rows of `batch`'s `sample_rows`.

    `logits_of` turns hidden rows into float32 logits, each row on its own. A sequence has failed if
    one of its rows is not all finite numbers, or if no token may be drawn from it; but rows of
    drafts count only as far as plain decoding would have come, and there is a token before them.

    `proposals[seq_id]` is q [k, V] float32 that this step's drafts were drawn from; they are then
    verified by `method`, with `sums` (see `rejection`). All others are verified by coupling.
    """
    failed = _failed_silent(batch, hidden)
    sampled: dict[int, tuple[Draw, ...]] = {}
    first = 0
    for members in _tiles(batch.sampled, tile_rows):
        last = first + sum(1 + sequence.num_drafts for sequence in members)
        tile = _Tile(logits_of(hidden[first:last]), members)
        tile.draw(proposals or {}, (method, sums), sampled, failed)
        first = last
    scored: dict[int, list[TokenLogprobs]] = {}
    targets = _targets(batch.scored)
    while wanted := list(islice(targets, tile_rows)):
        logits = logits_of(hidden[first : first + len(wanted)])
        _score(logits, wanted, scored, failed)
        first += len(wanted)
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


def _tiles(
    sequences: Iterable[ScheduledSequence], tile_rows: int
) -> Iterator[list[ScheduledSequence]]:
    """Sequences in turn, as many as have `tile_rows` rows; all rows of one are in one tile."""
    members: list[ScheduledSequence] = []
    room = tile_rows
    for sequence in sequences:
        room -= 1 + sequence.num_drafts
        if members and room < 0:
            yield members
            members, room = [], tile_rows - 1 - sequence.num_drafts
        members.append(sequence)
    if members:
        yield members


class _Tile:
    """Some sequences that draw, and their rows of logits, 1 + `num_drafts` of each in turn."""

    def __init__(self, logits: Tensor, members: list[ScheduledSequence]) -> None:
        self._logits = logits
        self._sampler = RowSampler(logits)
        ends = accumulate(1 + sequence.num_drafts for sequence in members)
        self._members = [
            DraftedRows(sequence, end - 1 - sequence.num_drafts)
            for sequence, end in zip(members, ends, strict=True)
        ]

    def draw(
        self,
        proposals: Mapping[int, Tensor],
        method: tuple[str, Sums | None],
        sampled: dict[int, tuple[Draw, ...]],
        failed: dict[int, str],
    ) -> None:
        """All draws of each sequence into `sampled`, or why it has none into `failed`."""
        drafted = [member for member in self._members if member.sequence.num_drafts]
        runs = iter(verify_runs(self._sampler, drafted, proposals, *method))
        chosen: list[list[ChosenToken]] = []
        for member in self._members:
            run = next(runs) if member.sequence.num_drafts else None
            outcome = self._plain(member) if run is None else _choices(member, run)
            if isinstance(outcome, Undrawable):
                failed[member.sequence.seq_id] = outcome.reason
                outcome = []
            chosen.append(outcome)
        drawn = iter(draws(self._logits, [choice for own in chosen for choice in own]))
        for member, own in zip(self._members, chosen, strict=True):
            sampled[member.sequence.seq_id] = tuple(islice(drawn, len(own)))

    def _plain(self, member: DraftedRows) -> list[ChosenToken] | Undrawable:
        """One draw for each spec, all from one row; a sequence's draws fail together."""
        choices: list[ChosenToken] = []
        for spec in member.sequence.samples:
            token = self._sampler.choose(member.first, spec)
            if isinstance(token, Undrawable):
                return token
            choices.append(ChosenToken(member.first, spec.params, token))
        return choices


def _choices(member: DraftedRows, run: Run) -> list[ChosenToken] | Undrawable:
    """A run's tokens, from one row after the other."""
    if run.fault is not None and not run.token_ids:
        return run.fault
    params = member.sequence.samples[0].params
    return [
        ChosenToken(member.first + index, params, token)
        for index, token in enumerate(run.token_ids)
    ]


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
