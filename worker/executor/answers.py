"""The answers of a step: hidden states become draws and log probabilities.

A row from which nothing can be drawn ends the run of drafts before it: plain decoding would reach
that row one token later, so the next step starts there and fails.
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
from worker.ops.rejection import STANDARD, verify_batch, verify_coupled
from worker.ops.sample import (
    NOT_NUMBERS,
    TORCH_SAMPLER,
    UNDRAWABLE,
    ChosenToken,
    DrawState,
    Sampler,
    Undrawable,
    drawable_scores,
    draws,
)
from worker.ops.step import fetched, sent
from worker.types import Draw, ModelOutput, SampleSpec, ScheduledSequence, TokenLogprobs

# Rows of logits that exist at once: 50 MB of a vocabulary of 49,152 in float32.
TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Verification:
    """The `method` of verifying drafts that have `proposals[seq_id]`: q [k, V] float32."""

    proposals: Mapping[int, Tensor] = field(default_factory=dict)
    method: str = STANDARD


class PendingAnswers:
    """The answers of a step, from the hidden states [R, hidden_size] of the `sample_rows` of
    `batch`; construction launches all device work. `normed` computes the states that are pooled
    into embeddings.

    Log probabilities of draws, and drafts that are verified by rejection, need the logits until
    `collect`; up to `tile_rows` rows stay in memory. Steps that need more wait for the device
    during construction, and so do steps that score prompts.
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
        self._open: list[_Tile] = []
        verification = verification or Verification()
        first = place = 0
        for members in _tiles(batch.sampled, tile_rows):
            if self._open and self._open[-1].holds_logits:
                self._close()
            last = first + sum(1 + sequence.num_drafts for sequence in members)
            logits = logits_of(hidden[first:last])
            self._open.append(_Tile(logits, members, verification, sampler))
            slots = batch.sampled_slots[place : place + len(members)]
            self._drawn.append(self._open[-1].last_draws(slots))
            first, place = last, place + len(members)
        targets = ((s, token_id) for s in batch.scored for token_id in s.prompt_targets)
        while wanted := list(islice(targets, tile_rows)):
            logits = logits_of(hidden[first : first + len(wanted)])
            _score(logits, wanted, self._scored, self._failed)
            first += len(wanted)
        # All keys and values of a sequence go into its last row: it is finite only if they are.
        last = first + len(batch.silent)
        finite = hidden[first:last].isfinite().all(dim=-1) if batch.silent else None
        self._finite = None if finite is None else fetched(finite.int())
        self._pooled: list[Tensor] = []
        if batch.pooled and normed is not None:
            rows = torch.split(normed(hidden[last:]).float(), [s.num_pooled for s in batch.pooled])
            self._pooled = [each.sum(dim=0) for each in rows]

    def store(self, state: DeviceState) -> None:
        """Store the last token of each sequence for the next step, unless rejection decides it.
        With several answers, store the token of the first one.
        """
        for slots, tokens in self._drawn:
            state.remember(slots, tokens)

    def collect(self) -> ModelOutput:
        """Return the output of the step. Waits for the device."""
        self._close()
        failed = self._failed
        if self._finite is not None:
            rows = zip(self._batch.silent, self._finite().tolist(), strict=True)
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
        for tile in self._open:
            tile.collect(self._sampled, self._failed)
        self._open.clear()


def _tiles(
    sequences: Iterable[ScheduledSequence], tile_rows: int
) -> Iterator[list[ScheduledSequence]]:
    """Group sequences, in order, into tiles of up to `tile_rows` rows; no sequence is split."""
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
    """Sequences that draw, with 1 + `num_drafts` rows of logits each. All rows are drawn from, even
    those after a rejected draft, so that only the draws leave the device.
    """

    def __init__(
        self,
        logits: Tensor,
        members: list[ScheduledSequence],
        verification: Verification,
        sampler: Sampler,
    ) -> None:
        self._verification = verification
        ends = accumulate(1 + sequence.num_drafts for sequence in members)
        self._members = [
            DraftedRows(sequence, end - 1 - sequence.num_drafts)
            for sequence, end in zip(members, ends, strict=True)
        ]
        coupled = [member for member in self._members if not self._is_judged(member)]
        wishes = [spec.params for sequence in members for spec in sequence.samples]
        self.holds_logits = len(coupled) < len(members) or any(
            params.logprobs is not None or params.logprob_token_ids for params in wishes
        )
        # Dropped logits make room for the next tile.
        self._logits = logits if self.holds_logits else logits.new_empty(0, 0)
        wanted = [each for member in coupled for each in member.draws()]
        pending = sampler.launch(logits, [row for row, _ in wanted], [s for _, s in wanted])
        runs = _Runs.of(pending.answers, coupled)
        self._width, self._lasts = runs.width, runs.lasts
        self._wait = fetched(runs.answers)

    def last_draws(self, slots: Ints) -> tuple[Ints, Tensor]:
        """Return the slots and the last tokens of members that coupling verifies."""
        coupled, places, place = list[int](), list[int](), 0
        for index, member in enumerate(self._members):
            if not self._is_judged(member):
                coupled.append(index)
                places.append(place)
                place += member.num_runs
        tokens = self._lasts
        if len(places) < len(tokens):
            tokens = tokens[sent(np.array(places, np.int32), tokens.device)]
        return slots[coupled], tokens

    def collect(self, sampled: dict[int, tuple[Draw, ...]], failed: dict[int, str]) -> None:
        outcomes = iter(self._wait().tolist())
        judged = [member for member in self._members if self._is_judged(member)]
        runs = iter(_judge(self._logits, judged, self._verification))
        chosen: list[list[ChosenToken]] = []
        for member in self._members:
            if self._is_judged(member):
                run = next(runs)
            else:
                run = self._run(member, [next(outcomes) for _ in range(member.num_runs)])
            if run.fault is not None and not run.token_ids:
                failed[member.sequence.seq_id] = run.fault.reason
            chosen.append(member.choices(run.token_ids))
        drawn = iter(draws(self._logits, [choice for own in chosen for choice in own]))
        for member, tokens in zip(self._members, chosen, strict=True):
            sampled[member.sequence.seq_id] = tuple(islice(drawn, len(tokens)))

    def _run(self, member: DraftedRows, outcomes: list[list[int]]) -> Run:
        """Return the run of a member. Draws from one row fail together."""
        tokens: list[int] = []
        for outcome in outcomes:
            own, state = run_of(outcome, self._width, member.sequence.num_drafts)
            tokens += own
            if state != DrawState.DRAWN:
                return Run(own, UNDRAWABLE[DrawState(state)])
        return Run(tokens, None)

    def _is_judged(self, member: DraftedRows) -> bool:
        """Return True if rejection verifies the drafts: q is known, and the sequence samples."""
        sequence = member.sequence
        if not sequence.num_drafts or sequence.seq_id not in self._verification.proposals:
            return False
        return sequence.samples[0].params.temperature > 0


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a tile's coupled sequences: `answers` from `run_answers`, and the last draws."""

    width: int
    answers: Tensor
    lasts: Tensor

    @staticmethod
    def of(answers: Tensor, members: Sequence[DraftedRows]) -> _Runs:
        width = 1 + max((member.sequence.num_drafts for member in members), default=0)
        if width == 1:
            return _Runs(width, answers.T, drawn_tokens(*answers))
        places, drafts, counts, place = [], [], [], 0
        for member in members:
            own = [*member.sequence.drafts]
            missing = width - 1 - len(own)
            for _ in range(member.num_runs):
                places.append([place] * missing + [*range(place, place + len(own) + 1)])
                drafts.append([0] * missing + own)
                counts.append([len(own)])
                place += len(own) + 1
        packed = np.concatenate((places, drafts, counts), axis=1, dtype=np.int32)
        there = sent(packed, answers.device)
        gathered = answers[:, there[:, :width]]
        given, num_drafts = there[:, width:-1], there[:, -1]
        made, lasts = run_answers(gathered[0], gathered[1], given, num_drafts)
        return _Runs(width, made, lasts)


def run_answers(
    tokens: Tensor, states: Tensor, drafts: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the runs of n sequences, for `run_of` to read, and their last draws on the device."""
    runs = verify_coupled(tokens, states, drafts, num_drafts)
    made = torch.cat((tokens, runs.states[:, None], runs.ends[:, None]), 1)
    return made, drawn_tokens(runs.lasts, runs.states)


def drawn_tokens(tokens: Tensor, states: Tensor) -> Tensor:
    """Return the tokens of draws, and token 0 for others: the next step may run them in vain, and
    what cannot be drawn need not be an id.
    """
    return tokens.masked_fill(states != DrawState.DRAWN, 0)


def run_of(answer: list[int], width: int, num_drafts: int) -> tuple[list[int], int]:
    """Return a run's tokens, and the `DrawState` of the draw that ends it."""
    first, end = width - 1 - num_drafts, answer[-1] if width > 1 else 0
    state = answer[width]
    return answer[first : end + (not state)], state  # `DRAWN` is 0


def _score(
    logits: Tensor,
    targets: list[tuple[ScheduledSequence, int]],
    scored: dict[int, list[TokenLogprobs]],
    failed: dict[int, str],
) -> None:
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    queries = []
    for row, ((sequence, token_id), good) in enumerate(zip(targets, finite, strict=True)):
        if good:
            queries.append(LogprobQuery(row, token_id, sequence.num_prompt_logprobs))
        else:
            failed[sequence.seq_id] = NOT_NUMBERS
    for query, found in zip(queries, token_logprobs(logits, queries), strict=True):
        scored.setdefault(targets[query.row][0].seq_id, []).append(found)


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens that a sequence draws, in order; if there are none, `fault` has the reason."""

    token_ids: list[int]
    fault: Undrawable | None


@dataclass(frozen=True, slots=True)
class DraftedRows:
    sequence: ScheduledSequence
    first: int

    @property
    def num_runs(self) -> int:
        """The number of runs: one with drafts; without drafts, one of a single draw per spec."""
        return 1 if self.sequence.num_drafts else len(self.sequence.samples)

    def draws(self) -> Iterator[tuple[int, SampleSpec]]:
        """Yield each row to draw from with its parameters, as if all drafts were accepted."""
        drafts, samples = self.sequence.drafts, self.sequence.samples
        if not drafts:
            yield from ((self.first, spec) for spec in samples)
            return
        for index in range(len(drafts) + 1):
            yield self.first + index, samples[0].after(drafts[:index])

    def choices(self, token_ids: Sequence[int]) -> list[ChosenToken]:
        step = 1 if self.sequence.num_drafts else 0
        specs = self.sequence.samples * (len(token_ids) if step else 1)
        return [
            ChosenToken(self.first + step * index, spec.params, token)
            for index, (spec, token) in enumerate(zip(specs, token_ids, strict=False))
        ]


@dataclass(frozen=True, slots=True)
class _Usable:
    """The drafts before the first row from which nothing can be drawn.

    If it is `padded`, the last row is not real, and its token does not count.
    """

    drafts: list[int]
    scores: Tensor
    proposals: Tensor
    padded: bool


def _judge(logits: Tensor, members: Sequence[DraftedRows], verification: Verification) -> list[Run]:
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
    """Return the rows before the first undrawable one; if that is the first row, the reason."""
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
            # The drafts before a draft decide whether it can be verified, never the draft itself.
            padded = torch.stack([*rows, torch.zeros_like(rows[0])])
            return _Usable(drafts[:index], padded, proposals[:index], padded=True)
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
