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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.executor.adapters import owners_of
from worker.executor.answers import TILE_ROWS, PendingAnswers, run_answers, run_of
from worker.executor.interface import Ticket
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
from worker.types import Draw, ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

# Fields of each row, behind its draw parameters: token (-1: the sequence's last draw), position,
# slot of the cache. Fields of each sequence: slot of the state, context, drafts; one change of a
# block table: slot, index, block; the slot for the last draw; and the slot of its adapter (-1:
# none).
_ROW_FIELDS, _FIELDS = 3, 8
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


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


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

    `room` is the capacity that `DeviceState` needs: slots, and blocks of a sequence. Steps with
    adapters are captured, too, if `plan_rows` plans them.
    """

    def __init__(
        self,
        device: GraphDevice,
        sizes: Sequence[int],
        room: tuple[int, int],
        most_drafts: int = 0,
        plan_rows: PlanRows | None = None,
    ) -> None:
        self.room = room
        self._plan_rows = plan_rows
        self._device = device
        self._keys = _keys(sizes, min(most_drafts, _MAX_DRAFTS))
        self._decoding = sorted(key for key in self._keys if key.width == 1)
        self._verifying = sorted(key for key in self._keys if key.width > 1)
        step = max(key.num_words for key in self._keys)
        answers = max(key.size * key.num_answers for key in self._keys)
        buffers = [(device.host_buffer(step), device.host_buffer(answers)) for _ in range(2)]
        self._buffers = {key: [_Buffers.of(key, *pair) for pair in buffers] for key in self._keys}
        self._turn = 0
        self._captured: _Captured | None = None
        self._draws = _SlotDraws()

    def capture(self, model: LlamaModel, cache: Tensor, state: DeviceState) -> None:
        """Capture all steps, the largest first, so that the others fit into its memory. The last
        block of the cache must belong to no sequence. Waits for the device.
        """
        self._captured = None
        self._captured = self._capture(model, cache, state)

    def drop(self) -> None:
        """Release all captures: the model, cache or state is about to be replaced."""
        self._captured = None

    def submit(
        self,
        sequences: Sequence[ScheduledSequence],
        sampler: Sampler,
        with_history: Callable[[ScheduledSequence], ScheduledSequence],
    ) -> Ticket | None:
        """Launch a step; None if no graph fits. `with_history` completes adjusted draws."""
        captured, key, owners = self._captured, self._key(sequences), owners_of(sequences)
        if captured is None or key is None or (key, owners is not None) not in captured.graphs:
            return None
        state, count = captured.state, len(sequences)
        slots, changes = state.enter_quietly(sequences)
        # The tables grew and moved; graphs hold their address.
        if captured.tables is not state.device_tables:
            captured = self._capture(captured.model, captured.cache, state)
            self._captured = captured
        # A packed step has room for one change of a table per sequence.
        if len(changes) > key.size:
            state.send(changes)
            changes = []
        places = np.array(slots, np.int32)
        is_plain = self._draws.describe(sequences, slots)
        self._turn = 1 - self._turn
        buffers = self._buffers[key][self._turn]
        buffers.pack(sequences, places, state, captured.scratch)
        buffers.draws[:] = 0
        if is_plain:
            buffers.draws[:count] = self._draws.table[places][:, None]
            # Rows before the first real row may have any draw parameters.
            buffers.draws["position"][:count] = buffers.positions[:count] + 1
            buffers.fields[6, :count] = places
        if changes:
            buffers.fields[3:6, : len(changes)] = np.array(changes, np.int32).T
        if owners is not None:
            buffers.fields[7] = -1
            buffers.fields[7, :count] = owners
        self._device.send(buffers.step, captured.steps[key])
        # Its answers are still being fetched while the step is sent.
        self._device.spare_fetched()
        captured.graphs[key, owners is not None]()
        if not is_plain:
            known = AnsweredRows([with_history(sequence) for sequence in sequences], places)
            logits = captured.logits_of(key, sequences)
            answers = PendingAnswers(known, logits, lambda rows: rows, sampler=sampler)
            answers.store(state)
            return answers
        wait = self._device.fetch(captured.answers[key], buffers.answers)
        return _DecodeTicket(sequences, key.width, wait, buffers.received)

    def _capture(self, model: LlamaModel, cache: Tensor, state: DeviceState) -> _Captured:
        return _Captured(self._device, model, cache, state, self._keys, self._plan_rows)

    def _key(self, sequences: Sequence[ScheduledSequence]) -> _Key | None:
        if not all(map(_decodes, sequences)):
            return None
        drafts = max([sequence.num_drafts for sequence in sequences])
        keys = self._verifying if drafts else self._decoding
        place = bisect_left(keys, len(sequences), key=lambda key: key.size)
        return keys[place] if place < len(keys) and keys[place].width > drafts else None


def _decodes(sequence: ScheduledSequence) -> bool:
    return (
        len(sequence.token_ids) + sequence.takes_pending == 1 + sequence.num_drafts
        and len(sequence.samples) == 1
        and not sequence.prompt_targets
        and not sequence.num_pooled
    )


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The host buffers of steps of one shape. `step` is the packed step: `draws` [size, width] of
    `DRAWS`, `tokens`, `positions` and `slots` of the cache [size, width], and `fields` [8, size].
    `answers` is the fetched result, and `received` [size, n] its view.
    """

    step: Tensor
    draws: npt.NDArray[np.void]
    tokens: Ints
    positions: Ints
    slots: Ints
    fields: Ints
    answers: Tensor
    received: Ints

    @staticmethod
    def of(key: _Key, step: Tensor, answers: Tensor) -> _Buffers:
        step, answers = step[: key.num_words], answers[: key.size * key.num_answers]
        draws, rows, fields = _parts(key, step)
        shape = (key.size, key.width)
        tokens, positions, slots = (row.numpy().reshape(shape) for row in rows)
        table = draws.numpy().view(DRAWS).reshape(shape)
        received = answers.numpy().reshape(key.size, key.num_answers)
        return _Buffers(step, table, tokens, positions, slots, fields.numpy(), answers, received)

    def pack(
        self, sequences: Sequence[ScheduledSequence], slots: Ints, state: DeviceState, scratch: int
    ) -> None:
        """Write all fields but the draws; rows without a token use slot `scratch` of the cache."""
        count, width, size = len(sequences), self.tokens.shape[1], state.block_size
        starts = np.array([sequence.start for sequence in sequences], np.int32)
        self.fields[:] = 0
        self.fields[0, :count] = slots
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
        given = [[*sequence.token_ids] or [-1] for sequence in sequences]
        self.tokens[:count] = [[0] * (width - len(own)) + own for own in given]
        places = np.arange(1 - width, 1, dtype=np.int32) + drafts[:, None]
        # No position comes before a sequence's beginning.
        positions = np.maximum(places + starts[:, None], 0)
        blocks = state.blocks(slots[:, None], positions // size)
        self.positions[:count] = positions
        self.slots[:count] = np.where(places < 0, scratch, blocks * size + positions % size)
        self.fields[1, :count] = starts + 1 + drafts
        self.fields[2, :count] = drafts


def _parts(key: _Key, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split into draws [rows, DRAW_WORDS], row fields [3, rows] and sequence fields [8, size]."""
    rows = key.num_rows
    sizes = [rows * DRAW_WORDS, rows * _ROW_FIELDS, key.size * _FIELDS]
    draws, fields, own = torch.split(step, sizes)
    return draws.view(rows, DRAW_WORDS), fields.view(_ROW_FIELDS, rows), own.view(_FIELDS, key.size)


class _SlotDraws:
    """The draw parameters of each slot, without the position."""

    def __init__(self) -> None:
        self.table = np.zeros(0, DRAWS)
        self._is_plain = np.zeros(0, np.bool_)
        self._params: list[SamplingParams | None] = []

    def describe(self, sequences: Sequence[ScheduledSequence], slots: list[int]) -> bool:
        """Update `slots`; return True if no draw is adjusted or asks for log probabilities."""
        missing = max(slots) + 1 - len(self._params)
        if missing > 0:
            self._grow(max(missing, len(self._params)))
        params, is_plain = self._params, True
        for slot, sequence in zip(slots, sequences, strict=True):
            spec = sequence.samples[0]
            if params[slot] is not spec.params:
                self._describe_one(slot, spec.params)
            if spec.banned_ids or spec.masks:
                is_plain = False
        return is_plain and bool(self._is_plain[slots].all())

    def _describe_one(self, slot: int, params: SamplingParams) -> None:
        spec = SampleSpec(params, 0)
        self._params[slot], self.table[slot] = params, draw_table([0], [spec])[0]
        needs_logits = params.logprobs is not None or bool(params.logprob_token_ids)
        self._is_plain[slot] = not needs_logits and not adjusts(spec)

    def _grow(self, count: int) -> None:
        self._params += [None] * count
        self.table = np.concatenate((self.table, np.zeros(count, DRAWS)))
        self._is_plain = np.concatenate((self._is_plain, np.zeros(count, np.bool_)))


class _Captured:
    """The graphs of a model with its cache and state, and the tensors that they read and write."""

    def __init__(
        self,
        device: GraphDevice,
        model: LlamaModel,
        cache: Tensor,
        state: DeviceState,
        keys: Sequence[_Key],
        plan_rows: PlanRows | None,
    ) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.tables = state.device_tables
        self.scratch = (cache.shape[1] - 1) * state.block_size
        device.renew()

        def ints(counts: Iterable[int]) -> Tensor:
            return torch.zeros(max(counts), dtype=torch.int32, device=state.device)

        packed = ints(key.num_words for key in keys)
        answers = ints(key.size * key.num_answers for key in keys)
        most = max(key.num_rows for key in keys)
        self.steps = {key: packed[: key.num_words] for key in keys}
        self.answers = {key: answers[: key.size * key.num_answers] for key in keys}
        counts = torch.arange(most + 1, dtype=torch.int32, device=state.device)
        # The first rows of sequences, by the width of a step.
        self._starts = {key.width: counts[:: key.width].contiguous() for key in keys}
        self.logits = torch.zeros(most, model.config.vocab_size, device=state.device)
        # With the adapters of its rows, and without.
        self.graphs: dict[tuple[_Key, bool], Callable[[], None]] = {}
        for key in keys:
            # A capture runs a step of padded rows.
            packed.zero_()
            _parts(key, self.steps[key])[1][2] = self.scratch
            for plan in dict.fromkeys((plan_rows, None)):
                launched = device.capture(partial(self._run, key, plan), self.answers[key])
                self.graphs[key, plan is not None] = launched

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
        slots, contexts, num_drafts, rows, columns, blocks, targets, owners = fields.unbind(0)
        self.tables[rows, columns] = blocks
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
        logits.copy_(self.model.logits(self.model.hidden(step, self.cache)))
        drawn = self.model.backend.draw(logits, DrawColumns.of(table))
        answers, lasts = drawn.T, drawn[0]
        if key.width > 1:
            tokens, states = drawn.view(2, key.size, key.width)
            drafts = given.view(key.size, key.width)[:, 1:]
            answers, lasts = run_answers(tokens, states, drafts, num_drafts)
        self.answers[key].view(answers.shape).copy_(answers)
        self.state.keep(targets, lasts)


@dataclass(frozen=True, slots=True)
class _DecodeTicket:
    sequences: Sequence[ScheduledSequence]
    width: int
    wait: Callable[[], None]
    received: Ints

    def collect(self) -> ModelOutput:
        self.wait()
        answers = self.received[: len(self.sequences)].tolist()
        sampled: dict[int, tuple[Draw, ...]] = {}
        failed: dict[int, str] = {}
        for sequence, answer in zip(self.sequences, answers, strict=True):
            if self.width == 1 and not answer[1]:  # `DRAWN`; most steps are of these
                sampled[sequence.seq_id] = (Draw(answer[0]),)
                continue
            tokens, state = run_of(answer, self.width, sequence.num_drafts)
            if tokens:
                sampled[sequence.seq_id] = tuple(map(Draw, tokens))
            else:
                failed[sequence.seq_id] = UNDRAWABLE[DrawState(state)].reason
        return ModelOutput(sampled, {}, failed)
