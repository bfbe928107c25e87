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
from worker.ops.sample import (
    NOT_NUMBERS,
    TORCH_SAMPLER,
    ChosenToken,
    Sampler,
    Undrawable,
    drawable_scores,
    draws,
)
from worker.types import Draw, ModelOutput, SampleSpec, ScheduledSequence, TokenLogprobs

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
    sampler: Sampler = TORCH_SAMPLER,
) -> ModelOutput:
    """The output of a step from hidden [R, hidden_size], the rows of `batch`'s `sample_rows`.

    `logits_of` turns hidden rows into float32 logits, each row on its own. A sequence has failed if
    one of its rows is not all finite numbers, or if no token may be drawn from it; but rows of
    drafts count only as far as plain decoding would have come, and there is a token before them.

    `proposals[seq_id]` is q [k, V] float32 that this step's drafts were drawn from; they are then
    verified by `method`, with `sums` (see `rejection`). All others are verified by coupling, with
    draws by `sampler`.
    """
    failed = _failed_silent(batch, hidden)
    sampled: dict[int, tuple[Draw, ...]] = {}
    first = 0
    for members in _tiles(batch.sampled, tile_rows):
        last = first + sum(1 + sequence.num_drafts for sequence in members)
        tile = _Tile(logits_of(hidden[first:last]), members, proposals or {}, sampler)
        tile.collect((method, sums), sampled, failed)
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
    """Some sequences that draw, and their rows of logits, 1 + `num_drafts` of each in turn.

    All rows are drawn from at once, also those behind a draft that will fall: what they give is not
    looked at.
    """

    def __init__(
        self,
        logits: Tensor,
        members: list[ScheduledSequence],
        proposals: Mapping[int, Tensor],
        sampler: Sampler,
    ) -> None:
        self._logits = logits
        self._proposals = proposals
        ends = accumulate(1 + sequence.num_drafts for sequence in members)
        self._members = [
            DraftedRows(sequence, end - 1 - sequence.num_drafts)
            for sequence, end in zip(members, ends, strict=True)
        ]
        wanted = [each for m in self._members if not self._is_judged(m) for each in m.draws()]
        self._pending = sampler.launch(logits, [row for row, _ in wanted], [s for _, s in wanted])

    def collect(
        self,
        method: tuple[str, Sums | None],
        sampled: dict[int, tuple[Draw, ...]],
        failed: dict[int, str],
    ) -> None:
        """All draws of each sequence into `sampled`, or why it has none into `failed`."""
        outcomes = iter(self._pending.collect())
        judged = [member for member in self._members if self._is_judged(member)]
        runs = iter(_judge(self._logits, judged, self._proposals, *method))
        chosen: list[list[ChosenToken]] = []
        for member in self._members:
            if self._is_judged(member):
                run = next(runs)
            else:
                own = list(islice(outcomes, member.num_draws))
                drafts = member.sequence.drafts
                run = Run(*verify_coupled(drafts, own.__getitem__)) if drafts else _together(own)
            if run.fault is not None and not run.token_ids:
                failed[member.sequence.seq_id] = run.fault.reason
            chosen.append(member.choices(run.token_ids))
        drawn = iter(draws(self._logits, [choice for own in chosen for choice in own]))
        for member, tokens in zip(self._members, chosen, strict=True):
            sampled[member.sequence.seq_id] = tuple(islice(drawn, len(tokens)))

    def _is_judged(self, member: DraftedRows) -> bool:
        """Whether its drafts are verified by rejection: q is known, and it samples."""
        sequence = member.sequence
        if not sequence.num_drafts or sequence.seq_id not in self._proposals:
            return False
        return sequence.samples[0].params.temperature > 0


def _together(outcomes: Sequence[int | Undrawable]) -> Run:
    """Draws from one row fail together."""
    tokens = [outcome for outcome in outcomes if not isinstance(outcome, Undrawable)]
    fault = next((outcome for outcome in outcomes if isinstance(outcome, Undrawable)), None)
    return Run(tokens if fault is None else [], fault)


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
    """A sequence that draws, and the first of its 1 + `num_drafts` rows."""

    sequence: ScheduledSequence
    first: int

    @property
    def num_draws(self) -> int:
        """One of each row; of a lone row, one for each spec."""
        return (
            self.sequence.num_drafts + 1 if self.sequence.num_drafts else len(self.sequence.samples)
        )

    def draws(self) -> Iterator[tuple[int, SampleSpec]]:
        """The rows to draw from and how, were all drafts to stand."""
        drafts, samples = self.sequence.drafts, self.sequence.samples
        if not drafts:
            yield from ((self.first, spec) for spec in samples)
            return
        for index in range(len(drafts) + 1):
            yield self.first + index, samples[0].after(drafts[:index])

    def choices(self, token_ids: Sequence[int]) -> list[ChosenToken]:
        """Tokens drawn, with the rows and parameters they were drawn by."""
        step = 1 if self.sequence.num_drafts else 0
        specs = self.sequence.samples * (len(token_ids) if step else 1)
        return [
            ChosenToken(self.first + step * index, spec.params, token)
            for index, (spec, token) in enumerate(zip(specs, token_ids, strict=False))
        ]


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
    logits: Tensor,
    members: Sequence[DraftedRows],
    proposals: Mapping[int, Tensor],
    method: str,
    sums: Sums | None,
) -> list[Run]:
    """Runs by rejection, all at once, from `proposals`; `sums` as `rejection` takes them."""
    parts = [_usable(logits, member, proposals[member.sequence.seq_id]) for member in members]
    usable = [part for part in parts if not isinstance(part, Undrawable)]
    if not usable:
        return [Run([], part) for part in parts if isinstance(part, Undrawable)]
    specs = [
        member.sequence.samples[0]
        for member, part in zip(members, parts, strict=True)
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


def _usable(logits: Tensor, member: DraftedRows, proposals: Tensor) -> _Usable | Undrawable:
    """The rows before the first one from which nothing can be drawn; why, if that is the first."""
    [spec] = member.sequence.samples
    drafts = list(member.sequence.drafts)
    if len(proposals) != len(drafts):
        raise ValueError(f"{len(proposals)} proposals cannot be those of {len(drafts)} drafts")
    rows: list[Tensor] = []
    for index in range(len(drafts) + 1):
        scores = drawable_scores(logits[member.first + index], spec.after(drafts[:index]))
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
