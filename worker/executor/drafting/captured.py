"""Drafting as a graph: the rounds of `rounds` after a replayed step, without a value for the host.

The step's graph leaves the tokens and states that it ran in the drafter's cache, and its draws on
the device. From these, one more graph runs the rows that the drafter has not seen (the last token
of the step before, the accepted drafts, and the token drawn behind them) together with the first
draft, and then one row for each further draft.

Only sequences whose earlier rows are all synced take part. Rows of others, padded rows, and rows
beyond a sequence's blocks write to a scratch slot; rows that pad a sequence stand in front of it,
as in the step. The number of rows and rounds are constants of a graph.

No `torch.where` has a number here: torch would copy it from the host, which a capture refuses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftNetwork
from worker.ops.draft import shares_of
from worker.ops.sample import largest
from worker.ops.step import StepTensors


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step of n sequences with up to `width` rows each, after its draws; int32 on the device.

    The first row of sequence i was at position `starts[i]`; `accepted[i]` of its drafts stand, and
    `lasts[i]` was drawn behind them. Its blocks `tables[i]`, of `tables` [n, W], have room for
    drafts below position `limits[i]`; 0: it gets no drafts.
    """

    width: int
    starts: Tensor
    accepted: Tensor
    lasts: Tensor
    limits: Tensor
    tables: Tensor


class CapturedRounds:
    """Launches the rounds of greedy drafts with a network on its cache, whose last block must
    belong to no sequence.
    """

    def __init__(self, network: DraftNetwork, cache: DraftCache, first_position: int) -> None:
        self._network = network
        self._cache = cache
        self._scratch = (cache.kv.shape[1] - 1) * cache.block_size
        self._first_position = first_position

    def launch(self, step: DrawnStep, drafts: Tensor, confidences: Tensor) -> None:
        """Write k drafts of each sequence to `drafts` [n, k] int32, and their probabilities to
        `confidences` [n, k] float32: nan from the first row on whose logits are not numbers. Both
        are undefined for sequences without room.
        """
        last = step.starts + step.accepted + 1
        has_room = last < step.limits
        tokens, hidden, is_sound = step.lasts, None, has_room
        for index in range(drafts.shape[1]):
            if index == 0:
                hidden, slots = self._read(step, last, has_room)
            else:
                hidden = self._run_on(step, last + index, tokens, hidden)
            logits = self._network.logits(hidden)
            peaks, choices = largest(logits)
            is_sound = is_sound & peaks.isfinite()
            if index == 0:
                self._mark(slots, is_sound)
            shares = shares_of(logits, choices)
            confidences[:, index] = shares.masked_fill(~is_sound, torch.nan)
            vocab = self._network.draft_vocab
            tokens = (choices if vocab is None else vocab.index_select(0, choices)).int()
            drafts[:, index] = tokens

    def _read(self, step: DrawnStep, last: Tensor, has_room: Tensor) -> tuple[Tensor, Tensor]:
        """Run the unseen rows up to position `last`; return the states [n, hidden] of the last ones
        and the slots [n, width + 1] of all.
        """
        count, width = len(last), step.width + 1
        back = torch.arange(1 - width, 1, dtype=torch.int32, device=last.device)
        positions = last[:, None] + back
        is_own = has_room[:, None] & (positions >= step.starts[:, None])
        slots = self._slots(step, positions, is_own)
        token_ids = self._cache.tokens_at(slots.flatten()).view(slots.shape).clone()
        token_ids[:, -1] = step.lasts
        features = None
        if self._network.reads_states:
            features = self._cache.states_at(self._slots(step, positions - 1, is_own).flatten())
        rows = (token_ids.flatten(), self._clean(positions, is_own), slots.flatten())
        states = self._network.run(features, self._tensors(step, rows, last, width), self._cache.kv)
        return states.view(count, width, -1)[:, -1], slots

    def _run_on(
        self, step: DrawnStep, position: Tensor, tokens: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """Run one more row of each sequence; return their states [n, hidden]."""
        fits = position < step.limits
        slots = self._slots(step, position[:, None], fits[:, None])
        rows = (tokens, self._clean(position, fits), slots.flatten())
        features = hidden if self._network.reads_states else None
        return self._network.run(features, self._tensors(step, rows, position, 1), self._cache.kv)

    def _tensors(
        self, step: DrawnStep, rows: tuple[Tensor, Tensor, Tensor], last: Tensor, width: int
    ) -> StepTensors:
        count, device = len(last), last.device
        starts = torch.arange(0, (count + 1) * width, width, dtype=torch.int32, device=device)
        contexts = (last + 1).masked_fill(last >= step.limits, 0)
        longest = step.tables.shape[1] * self._cache.block_size
        tensors = (*rows, starts, contexts, step.tables, starts[1:] - 1)
        return StepTensors(*tensors, width, longest, self._first_position)

    def _slots(self, step: DrawnStep, positions: Tensor, is_own: Tensor) -> Tensor:
        """Return the slots [n, m] int32 of `positions` [n, m] where they are a sequence's own, else
        the scratch slot.
        """
        size = self._cache.block_size
        positions = positions.masked_fill(~is_own, 0)
        columns = (positions // size).clamp(max=step.tables.shape[1] - 1)
        slots = step.tables.gather(1, columns.long()) * size + positions % size
        return slots.masked_fill(~is_own, self._scratch)

    def _clean(self, positions: Tensor, is_own: Tensor) -> Tensor:
        """Replace positions of padded rows, which may be out of range, by the first position."""
        return positions.masked_fill(~is_own, self._first_position).flatten()

    def _mark(self, slots: Tensor, is_sound: Tensor) -> None:
        """Mark all rows as synced but the last of each sequence, which the target has not run."""
        flags = is_sound[:, None].expand(slots.shape).clone()
        flags[:, -1] = False
        self._cache.mark_at(slots.flatten(), flags.flatten())
