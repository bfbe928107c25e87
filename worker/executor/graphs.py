# Apart: the steady state of a GPU; nothing of it runs on a CPU but in tests.
"""Decode steps as graphs: captured once for each size, replayed with other values in one place.

Theory of operation. A step in which every sequence decodes one token is padded to the next size.
All that differs between two such steps, the parameters of draws included, is packed into one buffer
of the host and copied into one of the device that never moves. Two graphs are then replayed. One
reads that buffer, brings the block tables up to date, takes the tokens that the step before left on
the device and runs the model up to the logits. The other draws from these and leaves the tokens for
the next step. There is one of the second kind for each `Cut`, so that a greedy step makes no noise.
One more copy brings tokens and states back, on a stream of its own. So a step launches the same few
calls whatever it holds, and waits for nothing.

Steps with adjusted draws or log probabilities replay the first graph, and go on as others do from a
copy of its logits.

Padded rows have a context of 0. They write their keys and values into the cache's last block, which
belongs to no sequence, and their token into slot 0 of the state, which belongs to none either.
Longest contexts and the like are constants of a graph: those of the longest sequence that may come.

Two steps can be under way, so host buffers take turns: when a step is submitted, the one before the
last was collected, and with it all that was copied for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.executor.answers import PendingAnswers
from worker.executor.interface import Ticket
from worker.executor.state import DeviceState, Ints
from worker.executor.step_batch import AnsweredRows
from worker.models.llama import LlamaModel
from worker.ops.sample import (
    DRAW_WORDS,
    DRAWS,
    UNDRAWABLE,
    Cut,
    DrawColumns,
    DrawState,
    Sampler,
    adjusts,
    cut_of,
    draw_table,
)
from worker.ops.step import StepTensors
from worker.types import Draw, ModelOutput, SampleSpec, SamplingParams, ScheduledSequence

# Of each row, behind what its draw is made by: slot of the state, token (-1: what the slot drew
# last), position, slot of the cache, context; and one change of a block table: slot, place, block.
_FIELDS = 8
_ROW_WORDS = DRAW_WORDS + _FIELDS
_LARGE_STEP = 8
# While one thread captures, another may wait for answers.
_ANY_THREAD = "thread_local"


class GraphDevice(Protocol):
    """What a device does for graphs. Nothing here waits but what `fetch` returns."""

    def host_buffer(self, size: int) -> Tensor:
        """Zeros [size] int32 on the host that can be copied from and to at any time."""
        ...

    def renew(self) -> None:
        """What is captured from now on shares no memory with what was captured before."""
        ...

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Does what `launch` does, with its tensors and constants. It writes all of `writes`, and
        its own memory may be that of other captures.
        """
        ...

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy a host buffer to the device, after all that was launched."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy to a host buffer, after all that was launched; beside what is launched from now on.
        The result waits until it is there.
        """
        ...

    def spare_fetched(self) -> None:
        """What is launched from now on waits for all fetches: it may overwrite what they read."""
        ...


class CudaGraphs:
    """Implements `GraphDevice` with CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._launched, self._fetched = _event(), _event()

    def host_buffer(self, size: int) -> Tensor:
        """Pinned."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def renew(self) -> None:
        """A pool in which every graph was dropped cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None], writes: Tensor) -> Callable[[], None]:
        """Run once before, so that kernels are compiled and libraries have their workspace."""
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
        """On the stream of launches."""
        target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """On a stream of its own."""
        self._launched.record()
        self._side.wait_event(self._launched)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            self._fetched = _event()
            self._fetched.record()
        wait: Callable[[], None] = self._fetched.synchronize
        return wait

    def spare_fetched(self) -> None:
        """On the stream of launches."""
        torch.cuda.current_stream().wait_event(self._fetched)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of steps that are captured: 1, 2, 4, 8, 16, 24 … and `max_num_seqs`."""
    sizes = (1, 2, 4, *range(_LARGE_STEP, max_num_seqs, _LARGE_STEP))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """Captured decode steps of `sizes` sequences; at first of no model.

    `room` is what `DeviceState` is to have room for: slots, and blocks of a sequence.
    """

    def __init__(self, device: GraphDevice, sizes: Sequence[int], room: tuple[int, int]) -> None:
        self.room = room
        self._device = device
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        buffers = [
            (device.host_buffer(most * _ROW_WORDS), device.host_buffer(most * 2)) for _ in range(2)
        ]
        self._buffers = {
            size: [_Buffers.of(size, *pair) for pair in buffers] for size in self._sizes
        }
        self._turn = 0
        self._captured: _Captured | None = None
        self._draws = _SlotDraws()

    def capture(self, model: LlamaModel, cache: Tensor, state: DeviceState) -> None:
        """Capture all sizes, the largest first: the others find room in its memory. The last block
        of the cache belongs to no sequence. Waits for the device.
        """
        self._captured = None
        self._captured = _Captured(self._device, model, cache, state, self._sizes)

    def drop(self) -> None:
        """Give back what was captured: model, cache or state will be others."""
        self._captured = None

    def submit(
        self,
        sequences: Sequence[ScheduledSequence],
        sampler: Sampler,
        with_history: Callable[[ScheduledSequence], ScheduledSequence],
    ) -> Ticket | None:
        """Launch a step; None, and nothing is done, for one that no graph holds. `sampler` draws,
        and `with_history` completes sequences, where a draw is adjusted.
        """
        captured, count = self._captured, len(sequences)
        if captured is None or count > self._sizes[-1] or not all(map(_decodes, sequences)):
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        state = captured.state
        slots, changes = state.enter_quietly(sequences)
        if captured.tables is not state.device_tables:
            captured = _Captured(self._device, captured.model, captured.cache, state, self._sizes)
            self._captured = captured
        if len(changes) > size:
            state.send(changes)
            changes = []
        places = np.array(slots, np.int32)
        is_plain = self._draws.describe(sequences, slots)
        self._turn = 1 - self._turn
        buffers = self._buffers[size][self._turn]
        draws, fields = buffers.draws, buffers.fields
        draws[:count] = self._draws.table[places]
        draws["position"][:count] = [sequence.samples[0].position for sequence in sequences]
        draws[count:] = 0
        _pack(fields, sequences, places, state)
        fields[3, count:] = captured.scratch
        if changes:
            fields[5:, : len(changes)] = np.array(changes, np.int32).T
        self._device.send(buffers.step, captured.steps[size])
        captured.models[size]()
        if not is_plain:
            known = AnsweredRows([with_history(sequence) for sequence in sequences], places)
            logits = captured.logits[:count].clone()
            answers = PendingAnswers(known, logits, _unchanged, sampler=sampler)
            answers.store(state)
            return answers
        self._device.spare_fetched()
        captured.draws[size, Cut(int(self._draws.cuts[places].max()))]()
        wait = self._device.fetch(captured.answers[size], buffers.answers)
        return _DecodeTicket(sequences, wait, buffers.received)


def _decodes(sequence: ScheduledSequence) -> bool:
    """Whether it runs one token and draws one."""
    return (
        len(sequence.token_ids) + sequence.takes_pending == 1
        and len(sequence.samples) == 1
        and not sequence.num_drafts
        and not sequence.prompt_targets
        and not sequence.num_pooled
    )


def _unchanged(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Of steps of one size, on the host: `step` as it is sent, which is `draws` [size] of `DRAWS`
    and then `fields` [8, size]; `answers` as they are fetched, which are `received` [2, size].
    """

    step: Tensor
    draws: npt.NDArray[np.void]
    fields: Ints
    answers: Tensor
    received: Ints

    @staticmethod
    def of(size: int, step: Tensor, answers: Tensor) -> _Buffers:
        """The first parts of larger buffers."""
        step, answers = step[: size * _ROW_WORDS], answers[: size * 2]
        words = step.numpy()
        fields = words[size * DRAW_WORDS :].reshape(_FIELDS, size)
        draws = words[: size * DRAW_WORDS].view(DRAWS)
        return _Buffers(step, draws, fields, answers, answers.numpy().reshape(2, size))


def _pack(
    fields: Ints, sequences: Sequence[ScheduledSequence], slots: Ints, state: DeviceState
) -> None:
    """Write the fields of sequences, and zeros behind them and for changes of block tables."""
    count = len(sequences)
    positions = np.array([sequence.start for sequence in sequences], np.int32)
    blocks = state.blocks(slots, positions // state.block_size)
    fields[:] = 0
    fields[0, :count] = slots
    fields[1, :count] = [-1 if s.takes_pending else s.token_ids[0] for s in sequences]
    fields[2, :count] = positions
    fields[3, :count] = blocks * state.block_size + positions % state.block_size
    fields[4, :count] = positions + 1


class _SlotDraws:
    """How each slot draws, described once for a sequence.

    Of every slot, `table` [n] of `DRAWS` holds all but the position, and `cuts` [n] what it needs.
    """

    def __init__(self) -> None:
        self.table = np.zeros(0, DRAWS)
        self.cuts = np.zeros(0, np.int8)
        self._is_plain = np.zeros(0, np.bool_)
        self._params: list[SamplingParams | None] = []

    def describe(self, sequences: Sequence[ScheduledSequence], slots: list[int]) -> bool:
        """Make the entries of `slots` those of the sequences; whether no draw is adjusted or asks
        for log probabilities.
        """
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
        row = draw_table([0], [spec])
        self._params[slot], self.table[slot] = params, row[0]
        self.cuts[slot] = cut_of(row)
        needs_logits = params.logprobs is not None or bool(params.logprob_token_ids)
        self._is_plain[slot] = not needs_logits and not adjusts(spec)

    def _grow(self, count: int) -> None:
        self._params += [None] * count
        self.table = np.concatenate((self.table, np.zeros(count, DRAWS)))
        self.cuts = np.concatenate((self.cuts, np.zeros(count, np.int8)))
        self._is_plain = np.concatenate((self._is_plain, np.zeros(count, np.bool_)))


class _Captured:
    """The graphs of a model with its cache and state, and the tensors that they read and write."""

    def __init__(
        self,
        device: GraphDevice,
        model: LlamaModel,
        cache: Tensor,
        state: DeviceState,
        sizes: Sequence[int],
    ) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.tables = state.device_tables
        self.scratch = (cache.shape[1] - 1) * state.block_size
        device.renew()
        most = max(sizes)
        packed = torch.zeros(most * _ROW_WORDS, dtype=torch.int32, device=state.device)
        answers = torch.zeros(most * 2, dtype=torch.int32, device=state.device)
        self.steps = {size: packed[: size * _ROW_WORDS] for size in sizes}
        self.answers = {size: answers[: size * 2] for size in sizes}
        self._counts = torch.arange(most + 1, dtype=torch.int32, device=state.device)
        self.logits = torch.zeros(most, model.config.vocab_size, device=state.device)
        self.models: dict[int, Callable[[], None]] = {}
        self.draws: dict[tuple[int, Cut], Callable[[], None]] = {}
        for size in sorted(sizes, reverse=True):
            # What a capture runs is a step of padded rows.
            packed.zero_()
            self._fields(size)[3] = self.scratch
            run = partial(self._run_model, size)
            self.models[size] = device.capture(run, self.logits[:size])
            for cut in Cut:
                draw = partial(self._draw, size, cut)
                self.draws[size, cut] = device.capture(draw, self.answers[size])

    def _fields(self, size: int) -> Tensor:
        return self.steps[size][size * DRAW_WORDS :].view(_FIELDS, size)

    def _run_model(self, size: int) -> None:
        """From the packed step to logits."""
        slots, given, positions, places, contexts, *change = self._fields(size).unbind(0)
        rows, columns, blocks = change
        self.tables[rows, columns] = blocks
        tokens = torch.where(given < 0, self.state.last_tokens(slots), given)
        step = StepTensors(
            *(tokens, positions, places, self._counts[: size + 1], contexts),
            *(self.tables.index_select(0, slots), self._counts[:size]),
            *(1, self.tables.shape[1] * self.state.block_size),
        )
        logits = self.model.logits(self.model.hidden(step, self.cache))
        self.logits[:size] = logits

    def _draw(self, size: int, cut: Cut) -> None:
        """From logits to tokens and states, and the tokens into the state."""
        table = self.steps[size][: size * DRAW_WORDS].view(size, DRAW_WORDS)
        drawn = self.model.backend.draw(self.logits[:size], DrawColumns.of(table), cut)
        self.answers[size][:] = drawn.flatten()
        self.state.keep(self._fields(size)[0], drawn[0])


@dataclass(frozen=True, slots=True)
class _DecodeTicket:
    """A decode step whose answers are being fetched."""

    sequences: Sequence[ScheduledSequence]
    wait: Callable[[], None]
    received: Ints

    def collect(self) -> ModelOutput:
        """The step's result. Waits for its own answers only."""
        self.wait()
        tokens, states = self.received[:, : len(self.sequences)].tolist()
        sampled: dict[int, tuple[Draw, ...]] = {}
        failed: dict[int, str] = {}
        for sequence, token, state in zip(self.sequences, tokens, states, strict=True):
            if state == DrawState.DRAWN:
                sampled[sequence.seq_id] = (Draw(token),)
            else:
                failed[sequence.seq_id] = UNDRAWABLE[DrawState(state)].reason
        return ModelOutput(sampled, {}, failed)
