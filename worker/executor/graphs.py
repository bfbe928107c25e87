"""Decode steps as graphs: captured once for each size, replayed with new values in fixed buffers.

Everything that varies from step to step, parameters of draws included, is packed into one pinned
buffer and copied into one buffer of the device that never moves. One graph is then replayed: it
updates the block tables, takes the tokens that the previous step left on the device, runs the
model, draws, and leaves the tokens for the next step. One more copy brings the answers back on its
own stream. So every step launches the same few calls and waits for nothing. For adjusted draws and
log probabilities, the graph's draws are greedy and left in slot 0 of the state; the eager path
draws from a copy of the logits, once it has the tokens that the previous step left. With LoRA there
is one more graph, for steps in which a sequence has an adapter.

A step is padded to the next size, and with drafts every sequence has as many rows as the largest
number of drafts takes. Padded rows come in front of a sequence, at positions before its first row,
so that its context stays the same. They write to the cache's last block, and padded sequences leave
their token in slot 0 of the state. Bounds such as the longest context are constants of a graph:
those of the longest possible sequence. Two steps can be in flight, so host buffers alternate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.executor.adapters import owners_of
from worker.executor.answers import (
    TILE_ROWS,
    PendingAnswers,
    Verification,
    drawn_tokens,
    run_answers,
    run_of,
)
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.captured import CapturedRounds, DrawnStep
from worker.executor.interface import Ticket
from worker.executor.pieces import StepPieces
from worker.executor.state import DeviceState, Ints
from worker.executor.step_batch import AnsweredRows
from worker.models.llama import LlamaModel
from worker.ops.lora import PlanRows
from worker.ops.sample import (
    DRAW_WORDS,
    DRAWS,
    UNDRAWABLE,
    DrawColumns,
    DrawState,
    Sampler,
    adjusts,
    draw_table,
)
from worker.ops.step import StepTensors, sent
from worker.types import Drafts, Draw, ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

# Fields of each row, behind its draw parameters: token (-1: the sequence's last draw), position,
# slot of the cache. Fields of each sequence: slot of the state, context, drafts; one change of a
# block table: slot, index, block; the slot for the last draw; the slot of its adapter (-1: none);
# the end of the room for new drafts, and how many are wanted; its limit if it follows, else 0.
_ROW_FIELDS, _FIELDS = 3, 11
# One of `DRAWS` as bytes: numpy copies structs field by field.
_DRAW = np.dtype((np.void, DRAWS.itemsize))
_LARGE_STEP = 8
# Attention treats a sequence with more rows as a chunk.
_MAX_DRAFTS = 15
# While one thread captures, another may wait for answers.
_ANY_THREAD = "thread_local"


class GraphDevice(Protocol):
    """The device operations that graphs need. Only the functions returned by `fetch` wait."""

    def host_buffer(self, size: int) -> Tensor:
        """Return zeros [size] int32 on the host, for copies in both directions at any time."""

    def renew(self) -> None:
        """Prevent future captures from sharing memory with past ones."""

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Return a function that repeats `launch`, with its tensors and constants. `launch` writes
        all of `writes`, and its working memory may be shared with other captures.
        """

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy a host buffer to the device, after all launched work."""

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy to a host buffer, concurrently with later launches; return a function that waits."""

    def spare_fetched(self) -> None:
        """Make later launches wait for all fetches, whose tensors they may overwrite."""

    def timed(self, replay: Callable[[], None]) -> Callable[[], float]:
        """Replay; return a function that gives the seconds that the device took, after a fetch that
        began later has been waited for.
        """


class CudaGraphs:
    """Implements `GraphDevice` with CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._launched, self._fetched = _event(), _event()

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def renew(self) -> None:
        """Replace the pool: it cannot be used again after all its graphs were dropped."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Run `launch` first, which compiles kernels and gives libraries their workspace."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_ANY_THREAD):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        self._launched.record()
        self._side.wait_event(self._launched)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            self._fetched = _event()
            self._fetched.record()
        wait: Callable[[], None] = self._fetched.synchronize
        return wait

    def spare_fetched(self) -> None:
        torch.cuda.current_stream().wait_event(self._fetched)

    def timed(self, replay: Callable[[], None]) -> Callable[[], float]:
        before, after = _event(enable_timing=True), _event(enable_timing=True)
        before.record()
        replay()
        after.record()
        return lambda: before.elapsed_time(after) / 1000


def _event(enable_timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing)  # type: ignore[no-untyped-call]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes of captured steps: 1, 2, 4, 8, 16, 24 … and `max_num_seqs`."""
    sizes = (1, 2, 4, *range(_LARGE_STEP, max_num_seqs, _LARGE_STEP))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    """The shape of a captured step: `size` sequences with `width` rows each."""

    size: int
    width: int

    @property
    def num_rows(self) -> int:
        return self.size * self.width

    @property
    def num_words(self) -> int:
        """The size of a packed step in int32 words."""
        return self.num_rows * (DRAW_WORDS + _ROW_FIELDS) + self.size * _FIELDS

    @property
    def num_answers(self) -> int:
        """The number of fetched values per sequence; see `run_of`."""
        return self.width + 1 + (self.width > 1)


def _keys(sizes: Sequence[int], most_drafts: int) -> list[_Key]:
    """Return the shapes of all captured steps, the largest first. Steps with drafts have at most as
    many rows as decode steps, or 256: beyond that, drafts seldom pay, and logits take memory.
    """
    keys = [_Key(size, 1) for size in sizes]
    room = max(*sizes, TILE_ROWS)
    if most_drafts:
        verifying = (_Key(size, 1 + most_drafts) for size in sizes)
        keys += [key for key in verifying if key.num_rows <= room]
    return sorted(keys, key=lambda key: (-key.num_rows, key))


class DecodeGraphs:
    """Captured steps of `sizes` sequences with up to `most_drafts` drafts each; empty until
    `capture`.

    A step that follows another one is launched before it is known how many drafts that has
    accepted: the device completes its rows.

    `room` is the capacity that `DeviceState` needs: slots, and blocks of a sequence. Steps with
    adapters are captured, too, if `plan_rows` plans them; `pieces` of `piece_sizes` rows serve what
    `submit` does not.
    """

    def __init__(
        self,
        device: GraphDevice,
        sizes: Sequence[int],
        room: tuple[int, int],
        most_drafts: int = 0,
        plan_rows: PlanRows | None = None,
        piece_sizes: Sequence[int] = (),
    ) -> None:
        self.room = room
        self.pieces = StepPieces(device.capture, piece_sizes)
        self._plan_rows = plan_rows
        self._device = device
        self.most_drafts = most_drafts = min(most_drafts, _MAX_DRAFTS)
        self._keys = _keys(sizes, most_drafts)
        self._rounds = _rounds(most_drafts)
        self._decoding = sorted(key for key in self._keys if key.width == 1)
        self._verifying = sorted(key for key in self._keys if key.width > 1)
        step = max(key.num_words for key in self._keys)
        answers = max(key.size * (key.num_answers + 2 * most_drafts) for key in self._keys)
        buffers = [(device.host_buffer(step), device.host_buffer(answers)) for _ in range(2)]
        self._buffers = {key: [_Buffers.of(key, *pair) for pair in buffers] for key in self._keys}
        self._turn = 0
        self._captured: _Captured | None = None
        self._draws = _SlotDraws()
        self._drafting: set[int] = set()  # sequences in the last step, if a graph made its drafts
        self._after: _After = {}

    def capture(
        self,
        model: LlamaModel,
        cache: Tensor,
        state: DeviceState,
        drafter: CachedDrafter | None = None,
    ) -> None:
        """Capture all steps, the largest first, so that the others fit into its memory. The last
        block of each cache must belong to no sequence. Waits for the device.
        """
        self._captured = None
        captured = _Captured(self._device, model, cache, state, drafter)
        captured.capture(self._keys, self._rounds, self._plan_rows)
        self.pieces.capture(model, cache, () if drafter is None else drafter.layers)
        self._captured = captured

    def drop(self) -> None:
        """Release all captures: the model, cache or state is about to be replaced."""
        self._captured = None
        self.pieces.drop()

    def can_follow(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """True if these may follow the last step: a graph has made the drafts of all of them."""
        is_left = all(sequence.seq_id in self._drafting for sequence in sequences)
        return is_left and self._key(sequences) is not None

    def submit(
        self,
        sequences: Sequence[ScheduledSequence],
        sampler: Sampler,
        with_history: Callable[[ScheduledSequence], ScheduledSequence],
        verification: Verification | None = None,
    ) -> tuple[Ticket, bool] | None:
        """Launch a step; None if no graph fits. True if its drafts are made, too. `with_history`
        completes adjusted draws.
        """
        self._drafting = set()
        captured, key, owners = self._captured, self._key(sequences), owners_of(sequences)
        if captured is None or key is None or (key, owners is not None) not in captured.graphs:
            return None
        state, count = captured.state, len(sequences)
        places, changes, moved = state.enter_quietly(sequences)
        # The tables grew and moved; graphs hold their address.
        if captured.tables is not state.device_tables:
            self.capture(captured.model, captured.cache, state, captured.drafter)
            captured = self._captured or captured
        drafts = captured.drafts_of(key, sequences, moved)
        # A packed step has room for one change of a table per sequence.
        if changes.shape[1] > key.size:
            state.send(changes)
            changes = changes[:, :0]
        draws = self._draws.rows(sequences, places)
        if verification and verification.proposals:
            draws = None
        self._turn = 1 - self._turn
        buffers = self._buffers[key][self._turn]
        buffers.pack(sequences, places, state, captured.scratch)
        buffers.pack_draws(draws, places)
        buffers.fields[3:6, : changes.shape[1]] = changes
        if owners is not None:
            buffers.fields[7] = -1
            buffers.fields[7, :count] = owners
        if captured.drafter is not None:
            wanted, limits = [s.num_to_draft for s in sequences], [s.limit for s in sequences]
            buffers.fields[8:, :count] = (drafts.limits, wanted, limits)
        self._device.send(buffers.step, captured.steps[key])
        # Its answers are still being fetched while the step is sent.
        self._device.spare_fetched()
        captured.graphs[key, owners is not None]()
        if draws is None:
            known = AnsweredRows([with_history(sequence) for sequence in sequences], places)
            logits = captured.logits_of(key, sequences)
            answers = PendingAnswers(known, logits, lambda rows: rows, verification, sampler)
            answers.store(state)
            return answers, False
        seconds = None
        if drafts.replay is not None:
            seconds = self._device.timed(drafts.replay)
        size = key.size * (key.num_answers + 2 * drafts.rounds)
        wait = self._device.fetch(captured.fetched[:size], buffers.answers[:size])
        ticket = _DecodeTicket(sequences, key.width, wait, buffers.received, self._after)
        if seconds is None or captured.drafter is None:
            return ticket, False
        self._drafting = {sequence.seq_id for sequence in sequences}
        made = buffers.fetched[key.size * key.num_answers : size].reshape(2, -1)
        return _DraftedTicket(ticket, captured.drafter, drafts, made, seconds), True

    def _key(self, sequences: Sequence[ScheduledSequence]) -> _Key | None:
        drafts = 0
        for sequence in sequences:
            num_drafts = sequence.num_drafts
            if (
                len(sequence.token_ids) + sequence.takes_pending != 1 + num_drafts
                or len(sequence.samples) != 1
                or sequence.prompt_targets
                or sequence.num_pooled
            ):
                return None  # it does more than to decode
            if sequence.limit and not num_drafts:
                num_drafts = 1
            if num_drafts > drafts:
                drafts = num_drafts
        keys = self._verifying if drafts else self._decoding
        place = bisect_left(keys, len(sequences), key=lambda key: key.size)
        return keys[place] if place < len(keys) and keys[place].width > drafts else None


def _rounds(most_drafts: int) -> tuple[int, ...]:
    """Return the numbers of drafts that are captured: powers of two, and the largest."""
    powers = (1 << bit for bit in range(most_drafts.bit_length()))
    return (*(each for each in powers if each < most_drafts), most_drafts) if most_drafts else ()


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The host buffers of steps of one shape. `step` is the packed step: `draws` [size, width] of
    `DRAWS`, `tokens`, `positions` and `slots` of the cache [size, width], and `fields` [11, size].
    `answers` is the fetched result with room for drafts, `fetched` its view, and `received` [size,
    n] that of its first part. `back` [width] are the places of rows before a sequence's last one.
    """

    step: Tensor
    draws: npt.NDArray[np.void]
    tokens: Ints
    positions: Ints
    slots: Ints
    fields: Ints
    answers: Tensor
    fetched: Ints
    received: Ints
    back: Ints

    @staticmethod
    def of(key: _Key, step: Tensor, answers: Tensor) -> _Buffers:
        step, num_answers = step[: key.num_words], key.size * key.num_answers
        draws, rows, fields = _parts(key, step)
        shape = (key.size, key.width)
        tokens, positions, slots = (row.numpy().reshape(shape) for row in rows)
        table = draws.numpy().view(DRAWS).reshape(shape)
        fetched = answers.numpy()
        received = fetched[:num_answers].reshape(key.size, key.num_answers)
        arrays = (table, tokens, positions, slots, fields.numpy())
        back = np.arange(1 - key.width, 1, dtype=np.int32)
        return _Buffers(step, *arrays, answers, fetched, received, back)

    def pack(
        self, sequences: Sequence[ScheduledSequence], slots: Ints, state: DeviceState, scratch: int
    ) -> None:
        """Write all fields but the draws; rows without a token use slot `scratch` of the cache."""
        count, width, size = len(sequences), self.tokens.shape[1], state.block_size
        starts = np.array([sequence.start for sequence in sequences], np.int32)
        self.fields[:] = 0
        self.fields[0, :count] = slots
        if count < len(self.tokens):
            self.tokens[count:] = self.positions[count:] = 0
            self.slots[count:] = scratch
        if width == 1:
            self.tokens[:count, 0] = [-1 if s.takes_pending else s.token_ids[0] for s in sequences]
            self.positions[:count, 0] = starts
            blocks = state.blocks(slots, starts // size)
            self.slots[:count, 0] = blocks * size + starts % size
            self.fields[1, :count] = starts + 1
            return
        drafts = np.array([sequence.num_drafts for sequence in sequences], np.int32)
        ends = starts + drafts
        positions = self.back + ends[:, None]
        own = positions >= starts[:, None]
        given: list[int] = []
        for sequence in sequences:
            given += sequence.token_ids or (-1,)
        self.tokens[:count] = 0
        self.tokens[:count][own] = np.array(given, np.int32)
        # No position comes before a sequence's beginning.
        positions = np.maximum(positions, 0, out=self.positions[:count])
        columns, offsets = np.divmod(positions, size)
        blocks = state.blocks(slots[:, None], columns)
        self.slots[:count] = np.where(own, blocks * size + offsets, scratch)
        self.fields[1, :count] = ends + 1
        self.fields[2, :count] = drafts

    def pack_draws(self, draws: npt.NDArray[np.void] | None, slots: Ints) -> None:
        """Write the parameters of draws, behind positions; None: the graph's draws do not count."""
        count = 0 if draws is None else len(draws)
        if count < len(self.draws):
            self.draws[count:] = 0
        if draws is not None:
            self.draws.view(_DRAW)[:count] = draws[:, None]
            # Rows before the first real row may have any draw parameters.
            self.draws["position"][:count] = self.positions[:count] + 1
            self.fields[6, :count] = slots


def _parts(key: _Key, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split into draws [rows, DRAW_WORDS], row fields [3, rows] and sequence fields [11, size]."""
    rows = key.num_rows
    sizes = [rows * DRAW_WORDS, rows * _ROW_FIELDS, key.size * _FIELDS]
    draws, fields, own = torch.split(step, sizes)
    return draws.view(rows, DRAW_WORDS), fields.view(_ROW_FIELDS, rows), own.view(_FIELDS, key.size)


class _SlotDraws:
    """The draw parameters of each slot, without the position."""

    def __init__(self) -> None:
        self._table = np.zeros(0, _DRAW)
        self._is_plain = np.zeros(0, np.bool_)
        self._params: list[SamplingParams | None] = []
        self._given: list[SamplingParams] = []
        self._slots: Ints | None = None
        self._rows: npt.NDArray[np.void] | None = None

    def rows(
        self, sequences: Sequence[ScheduledSequence], slots: Ints
    ) -> npt.NDArray[np.void] | None:
        """Return the parameters [n] of sequences in `slots`; None if a draw is adjusted or asks for
        log probabilities.
        """
        specs = [sequence.samples[0] for sequence in sequences]
        given = [spec.params for spec in specs]
        if slots is not self._slots or given != self._given:
            self._slots, self._given = slots, given
            self._describe(slots, given)
        masked = [spec for spec in specs if spec.banned_ids or spec.masks]
        return None if masked else self._rows

    def _describe(self, slots: Ints, given: Sequence[SamplingParams]) -> None:
        missing = int(slots.max()) + 1 - len(self._params)
        if missing > 0:
            self._grow(max(missing, len(self._params)))
        for slot, params in zip(slots.tolist(), given, strict=True):
            if params is not self._params[slot]:
                self._describe_one(slot, params)
        self._rows = self._table[slots] if self._is_plain[slots].all() else None

    def _describe_one(self, slot: int, params: SamplingParams) -> None:
        spec = SampleSpec(params, 0)
        self._params[slot], self._table[slot] = params, draw_table([0], [spec]).view(_DRAW)[0]
        needs_logits = params.logprobs is not None or bool(params.logprob_token_ids)
        self._is_plain[slot] = not needs_logits and not adjusts(spec)

    def _grow(self, count: int) -> None:
        self._params += [None] * count
        self._table = np.concatenate((self._table, np.zeros(count, _DRAW)))
        self._is_plain = np.concatenate((self._is_plain, np.zeros(count, np.bool_)))


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The drafts to make after a step: `limits` are those of `CachedDrafter.follow`, and `replay`
    is the graph that makes `rounds` for each sequence; None: it makes none.
    """

    limits: Sequence[int]
    rounds: int = 0
    replay: Callable[[], None] | None = None


class _Captured:
    """The graphs of a model with its cache, state and drafter, and the tensors that they read and
    write.
    """

    def __init__(
        self,
        device: GraphDevice,
        model: LlamaModel,
        cache: Tensor,
        state: DeviceState,
        drafter: CachedDrafter | None,
    ) -> None:
        self.model, self.cache, self.state, self.drafter = model, cache, state, drafter
        self.tables = state.device_tables
        self.scratch = (cache.shape[1] - 1) * state.block_size
        # With the adapters of its rows, and without.
        self.graphs: dict[tuple[_Key, bool], Callable[[], None]] = {}
        self._drafts: dict[_Key, dict[int, Callable[[], None]]] = {}
        self._device = device
        self._drafting = None if drafter is None else drafter.captured()
        device.renew()

    def capture(
        self, keys: Sequence[_Key], all_rounds: Sequence[int], plan_rows: PlanRows | None
    ) -> None:
        def ints(counts: Iterable[int]) -> Tensor:
            return torch.zeros(max(counts), dtype=torch.int32, device=self.state.device)

        packed = ints(key.num_words for key in keys)
        most_drafts = max(all_rounds, default=0)
        self.fetched = ints(key.size * (key.num_answers + 2 * most_drafts) for key in keys)
        most = max(key.num_rows for key in keys)
        self.steps = {key: packed[: key.num_words] for key in keys}
        self._answers = {key: self.fetched[: key.size * key.num_answers] for key in keys}
        counts = torch.arange(most + 1, dtype=torch.int32, device=self.state.device)
        # The first rows of sequences, by the width of a step.
        self._starts = {key.width: counts[:: key.width].contiguous() for key in keys}
        self.logits = torch.zeros(most, self.model.config.vocab_size, device=self.state.device)
        # More sequences than can verify drafts get none.
        verifying = max((key.size for key in keys if key.width > 1), default=0)
        for key in keys:
            # A capture runs a step of padded rows.
            packed.zero_()
            _parts(key, self.steps[key])[1][2] = self.scratch
            for plan in dict.fromkeys((plan_rows, None)):
                run = partial(self._run, key, plan)
                captured = self._device.capture(run, self._answers[key])
                self.graphs[key, plan is not None] = captured
            self._capture_drafts(key, all_rounds if key.size <= verifying else ())

    def _capture_drafts(self, key: _Key, all_rounds: Sequence[int]) -> None:
        drafting = self._drafting
        self._drafts[key] = {}
        if drafting is None:
            return
        for rounds in all_rounds:
            first = key.size * key.num_answers
            writes = self.fetched[first : first + 2 * key.size * rounds]
            draft = partial(self._draft, key, drafting, writes.view(2, key.size, rounds))
            self._drafts[key][rounds] = self._device.capture(draft, writes)

    def drafts_of(
        self, key: _Key, sequences: Sequence[ScheduledSequence], moved: Collection[int]
    ) -> _Drafts:
        """Return the drafts to make after a step; sequences in `moved` have other blocks than
        before.
        """
        limits = None if self.drafter is None else self.drafter.follow(sequences, moved)
        wanted = max([sequence.num_to_draft for sequence in sequences])
        fitting = min((n for n in self._drafts[key] if n >= wanted), default=0)
        if limits is None or not wanted or not fitting:
            return _Drafts([0] * len(sequences))
        return _Drafts(limits, fitting, self._drafts[key][fitting])

    def logits_of(self, key: _Key, sequences: Sequence[ScheduledSequence]) -> Tensor:
        if key.width == 1:
            # A copy, as the next replay overwrites the logits.
            return self.logits[: len(sequences)].clone()
        rows = [
            row
            for index, sequence in enumerate(sequences)
            for row in range(
                (index + 1) * key.width - 1 - sequence.num_drafts, (index + 1) * key.width
            )
        ]
        return self.logits.index_select(0, sent(np.array(rows, np.int32), self.logits.device))

    def _run(self, key: _Key, plan_rows: PlanRows | None) -> None:
        table, (given, positions, places), fields = _parts(key, self.steps[key])
        slots, contexts, num_drafts, rows, columns, blocks, targets, owners = fields[:8].unbind(0)
        self.tables[rows, columns] = blocks
        if key.width > 1 and self._drafting is not None:
            self._complete(key)
        tokens = given.view(key.size, key.width)
        tokens = torch.where(tokens < 0, self.state.last_tokens(slots)[:, None], tokens).flatten()
        step = StepTensors(
            *(tokens, positions, places),
            *(self._starts[key.width][: key.size + 1], contexts),
            *(self.tables.index_select(0, slots), self._starts[1][: key.num_rows]),
            *(key.width, self.tables.shape[1] * self.state.block_size),
            adapters=plan_rows and plan_rows(owners.repeat_interleave(key.width)),
        )
        logits = self.logits[: key.num_rows]
        if self.drafter is None:
            hidden = self.model.hidden(step, self.cache)
        else:
            hidden, inputs = self.model.states_and_inputs(step, self.cache, self.drafter.layers)
            self.drafter.record_rows(step, hidden, inputs)
        logits.copy_(self.model.logits(hidden))
        drawn = self.model.backend.draw(logits, DrawColumns.of(table))
        answers, lasts = drawn.T, drawn_tokens(*drawn)
        if key.width > 1:
            tokens, states = drawn.view(2, key.size, key.width)
            drafts = given.view(key.size, key.width)[:, 1:]
            answers, lasts = run_answers(tokens, states, drafts, num_drafts)
        self._answers[key].view(answers.shape).copy_(answers)
        self.state.keep(targets, lasts)

    def _complete(self, key: _Key) -> None:
        """Fill in the rows of sequences that follow, from what the step before has left."""
        draws, (tokens, positions, places), fields = _parts(key, self.steps[key])
        slots, contexts, num_drafts, limits = fields[0], fields[1], fields[2], fields[10]
        left, size = self.state.drafted.index_select(0, slots), self.state.block_size
        last, follows = left[:, :1], limits[:, None] > 0
        count = torch.minimum(left[:, 1], (limits - 1 - left[:, 0]).clamp(min=0))
        num_drafts.copy_(torch.where(limits > 0, count, num_drafts))
        contexts.copy_(torch.where(limits > 0, left[:, 0] + 1 + count, contexts))
        back = torch.arange(1 - key.width, 1, dtype=torch.int32, device=slots.device)
        at = contexts[:, None] - 1 + back
        is_own = follows & (at >= last)
        at = at.masked_fill(~is_own, 0)
        drafts = left[:, 2:].gather(1, (at - last - 1).clamp(0, left.shape[1] - 3).long())
        blocks = self.tables.index_select(0, slots).gather(1, (at // size).long())
        for row, value in (
            (tokens, drafts.masked_fill(at <= last, -1)),
            (positions, at),
            (places, blocks * size + at % size),
        ):
            row.copy_(torch.where(is_own.flatten(), value.flatten(), row))
        drawn = draws.view(torch.int64)[:, 1]
        drawn.copy_(torch.where(is_own.flatten(), at.flatten() + 1, drawn))

    def _draft(self, key: _Key, drafting: CapturedRounds, drafts: Tensor) -> None:
        """Write the drafts and the bits of their confidences to `drafts` [2, size, rounds]."""
        _, (given, _, _), fields = _parts(key, self.steps[key])
        slots, contexts, num_drafts, limits, wanted = *fields[:3], *fields[8:10]
        answers = self._answers[key].view(key.size, key.num_answers)
        is_drawn, accepted = answers[:, key.width] == DrawState.DRAWN, torch.zeros_like(contexts)
        lasts = self.state.last_tokens(slots)
        # A sequence that follows a step which made no drafts for it has rows that were not read.
        is_behind = (fields[10] > 0) & (self.state.drafted.index_select(0, slots)[:, 1] == 0)
        # Where nothing can be drawn, the accepted draft before that is the last token.
        ends = torch.zeros_like(lasts)
        if key.width > 1:
            accepted = answers[:, -1] - (key.width - 1 - num_drafts)
            ends = given.view(key.size, key.width).gather(1, answers[:, -1:].long())[:, 0]
        lasts = torch.where(is_drawn, lasts, ends.clamp(min=0))
        self.state.keep(slots, lasts)
        starts = contexts - 1 - num_drafts
        limits = limits.masked_fill(is_behind | ~is_drawn, 0)
        tables = self.tables.index_select(0, slots)
        confidences = drafts[1].view(torch.float32)
        step = DrawnStep(key.width, starts, accepted, lasts, limits, tables)
        drafting.launch(step, drafts[0], confidences)
        last = starts + accepted + is_drawn
        room = torch.minimum(wanted, (limits - last).clamp(min=0))
        made = torch.minimum(room, confidences.isfinite().sum(1, dtype=torch.int32))
        left = torch.cat((last[:, None], made[:, None], drafts[0]), 1)
        self.state.drafted[:, : left.shape[1]].index_copy_(0, slots.long(), left)


# By sequence id: the position of the last token, and the number of drafts behind it.
_After = dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _DecodeTicket:
    """A step without drafts; `after` is what the steps collected so far have left."""

    sequences: Sequence[ScheduledSequence]
    width: int
    wait: Callable[[], None]
    received: Ints
    after: _After

    def collect(self) -> ModelOutput:
        self.wait()
        answers = self.received[: len(self.sequences)].tolist()
        sampled: dict[int, tuple[Draw, ...]] = {}
        failed: dict[int, str] = {}
        for sequence, answer in zip(self.sequences, answers, strict=True):
            if self.width == 1 and not answer[1]:  # `DRAWN`; most steps are of these
                sampled[sequence.seq_id] = (Draw(answer[0]),)
                continue
            num_drafts = sequence.num_drafts
            if sequence.limit:
                last, made = self.after.get(sequence.seq_id, (sequence.start, 0))  # or it failed
                num_drafts = max(0, min(made, sequence.limit - last - 1))
            tokens, state = run_of(answer, self.width, num_drafts)
            if tokens:
                sampled[sequence.seq_id] = tuple(map(Draw, tokens))
            else:
                failed[sequence.seq_id] = UNDRAWABLE[DrawState(state)].reason
        return ModelOutput(sampled, {}, failed)


@dataclass(frozen=True, slots=True)
class _DraftedTicket:
    """A step after which a graph made `drafts`: `fetched` are their tokens, and their confidences
    as bits, [2, size · rounds].
    """

    step: _DecodeTicket
    drafter: CachedDrafter
    drafts: _Drafts
    fetched: Ints
    seconds: Callable[[], float]

    def collect(self) -> ModelOutput:
        output = self.step.collect()
        values = (self.fetched[0].tolist(), self.fetched[1].view(np.float32).tolist())
        found: dict[int, Drafts] = {}
        starts: dict[int, int] = {}
        after = self.step.after
        ended = after.copy()
        after.clear()
        # Tuples: a slice of a whole tuple is that tuple.
        rows = (zip(*[iter(every)] * self.drafts.rounds, strict=True) for every in values)
        for sequence, limit, drafts, confidences in zip(
            self.step.sequences, self.drafts.limits, *rows, strict=False
        ):
            seq_id = sequence.seq_id
            draws = output.sampled.get(seq_id)
            if draws is None:
                continue
            start = sequence.start
            if sequence.limit and seq_id in ended:
                start, _ = ended[seq_id]
            last = start + len(draws)
            after[seq_id] = last, 0
            if not limit:
                continue
            count = min(sequence.num_to_draft, limit - last)
            # They are nan from the first row on whose logits are not numbers.
            while count > 0 and isnan(confidences[count - 1]):
                count -= 1
            if count > 0:
                found[seq_id] = Drafts(last + 1, drafts[:count], confidences[:count])
                starts[seq_id], after[seq_id] = last, (last, count)
        self.drafter.drafted(starts)
        drafts = (found, self.seconds())
        return ModelOutput(output.sampled, {}, output.failed, *drafts, may_be_followed=True)
