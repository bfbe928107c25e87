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
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from worker.executor.state import DeviceState, Ints
from worker.executor.step_batch import AnsweredRows, StepBatch
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
from worker.ops.step import sent
from worker.types import Draw, ModelOutput, SampleSpec, ScheduledSequence, TokenLogprobs

# Rows of logits that exist at once: 50 MB of a vocabulary of 49,152 in float32.
TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Verification:
    """How drafts are verified that were drawn from a distribution.

    `proposals[seq_id]` is q [k, V] float32 that this step's drafts were drawn from; they are
    verified by `method`, with `sums` (see `rejection`). All others are verified by coupling.
    """

    proposals: Mapping[int, Tensor] = field(default_factory=dict)
    method: str = STANDARD
    sums: Sums | None = None


@dataclass(frozen=True, slots=True)
class _Target:
    """One prompt token whose log probabilities are wanted, and whose it is."""

    seq_id: int
    token_id: int
    num_top: int


class PendingAnswers:
    """The answers of a step from hidden [R, hidden_size], the rows of `batch`'s `sample_rows`: all
    that the device does for them is launched.

    `logits_of` turns hidden rows into float32 logits, each row on its own, and `normed` into what
    embeddings are made of (None: none is asked for). A sequence has failed if
    one of its rows is not all finite numbers, or if no token may be drawn from it; but rows of
    drafts count only as far as plain decoding would have come, and there is a token before them.

    The logits of `tile_rows` rows are kept until `collect`. Steps that draw from more wait for the
    device before, and so do those that score prompts.
    """

    def __init__(
        self,
        batch: StepBatch | AnsweredRows,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        verification: Verification | None = None,
        sampler: Sampler = TORCH_SAMPLER,
        tile_rows: int = TILE_ROWS,
        normed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._batch = batch
        self._failed: dict[int, str] = {}
        self._sampled: dict[int, tuple[Draw, ...]] = {}
        self._scored: dict[int, list[TokenLogprobs]] = {}
        self._drawn: list[tuple[Ints, Tensor]] = []
        self._open: _Tile | None = None
        verification = verification or Verification()
        first = place = 0
        for members in _tiles(batch.sampled, tile_rows):
            self._close()
            last = first + sum(1 + sequence.num_drafts for sequence in members)
            logits = logits_of(hidden[first:last])
            self._open = _Tile(logits, members, verification, sampler)
            slots = batch.sampled_slots[place : place + len(members)]
            self._drawn.append(self._open.first_draws(slots))
            first, place = last, place + len(members)
        targets = _targets(batch.scored)
        while wanted := list(islice(targets, tile_rows)):
            logits = logits_of(hidden[first : first + len(wanted)])
            _score(logits, wanted, self._scored, self._failed)
            first += len(wanted)
        # All keys and values of a sequence go into its last row: it is finite only if they are.
        last = first + len(batch.silent)
        self._finite = hidden[first:last].isfinite().all(dim=-1) if batch.silent else None
        self._pooled: list[Tensor] = []
        if batch.pooled and normed is not None:
            rows = torch.split(normed(hidden[last:]).float(), [s.num_pooled for s in batch.pooled])
            self._pooled = [each.sum(dim=0) for each in rows]

    def store(self, state: DeviceState) -> None:
        """Leave the token of each sequence that drew without drafts where the next step finds it;
        of several tokens, the first.
        """
        for slots, tokens in self._drawn:
            state.remember(slots, tokens)

    def collect(self) -> ModelOutput:
        """The output of the step. Waits for the device."""
        self._close()
        failed = self._failed
        if self._finite is not None:
            rows = zip(self._batch.silent, self._finite.tolist(), strict=True)
            failed |= {sequence.seq_id: NOT_NUMBERS for sequence, good in rows if not good}
        return ModelOutput(
            {seq_id: draws for seq_id, draws in self._sampled.items() if seq_id not in failed},
            {seq_id: tuple(rows) for seq_id, rows in self._scored.items() if seq_id not in failed},
            failed,
            pooled={
                sequence.seq_id: sums.tolist()
                for sequence, sums in zip(self._batch.pooled, self._pooled, strict=True)
                if sequence.seq_id not in failed
            },
        )

    def _close(self) -> None:
        if self._open is not None:
            self._open.collect(self._sampled, self._failed)
            self._open = None


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
        verification: Verification,
        sampler: Sampler,
    ) -> None:
        self._logits = logits
        self._verification = verification
        ends = accumulate(1 + sequence.num_drafts for sequence in members)
        self._members = [
            DraftedRows(sequence, end - 1 - sequence.num_drafts)
            for sequence, end in zip(members, ends, strict=True)
        ]
        wanted = [each for m in self._members if not self._is_judged(m) for each in m.draws()]
        self._pending = sampler.launch(logits, [row for row, _ in wanted], [s for _, s in wanted])

    def first_draws(self, slots: Ints) -> tuple[Ints, Tensor]:
        """The slots of members without drafts, of `slots` of all, and the first token of each."""
        places = list[int]()
        kept = list[int]()
        place = 0
        for index, member in enumerate(self._members):
            if not member.sequence.num_drafts:
                kept.append(index)
                places.append(place)
            place += 0 if self._is_judged(member) else member.num_draws
        tokens = self._pending.tokens
        if len(places) < len(tokens):
            tokens = tokens[sent(np.array(places, np.int32), tokens.device)]
        return slots[kept], tokens

    def collect(self, sampled: dict[int, tuple[Draw, ...]], failed: dict[int, str]) -> None:
        """All draws of each sequence into `sampled`, or why it has none into `failed`."""
        outcomes = iter(self._pending.collect())
        judged = [member for member in self._members if self._is_judged(member)]
        runs = iter(_judge(self._logits, judged, self._verification))
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
        if not sequence.num_drafts or sequence.seq_id not in self._verification.proposals:
            return False
        return sequence.samples[0].params.temperature > 0


def _together(outcomes: Sequence[int | Undrawable]) -> Run:
    """Draws from one row fail together."""
    tokens = [outcome for outcome in outcomes if not isinstance(outcome, Undrawable)]
    fault = next((outcome for outcome in outcomes if isinstance(outcome, Undrawable)), None)
    return Run(tokens if fault is None else [], fault)


def _targets(scored: Sequence[ScheduledSequence]) -> Iterator[_Target]:
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
    verification: Verification,
) -> list[Run]:
    """Runs by rejection, all at once."""
    proposals = verification.proposals
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
        verification.method,
        verification.sums,
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
